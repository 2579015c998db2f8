"""Matrices of low rank that some requests have added to a model's projections (LoRA), as one rank has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps, Weight
from headwise.runtime.ops.quantised import Matrix

Made = TypeVar("Made")

Parts = Sequence[tuple[str, list[tuple[int, int]]]]
"""Projections by their names, and which ranges of their outputs."""

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "q_gate": "q_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Projections that checkpoints may have as a part of another one, whose input they share."""


class Adapter(Protocol):
    """What an adapter's file has; see `headwise.runtime.loader.adapters.AdapterFile`."""

    name: str

    @property
    def modules(self) -> Set[str]: ...

    def down(self, module: str) -> NDArray[np.float32]: ...

    def up(self, module: str) -> NDArray[np.float32]: ...


STACKED = 8
"""Adapters that are multiplied as one. More would be more work for rows of others, fewer more products."""

Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
"""What one adapter adds to a projection: ``down [rank, inputs]`` and ``up [outputs, rank]``."""


@dataclass(frozen=True)
class LowRank:
    """``x @ down.T @ up.T`` is added to what a projection makes of ``x``, where of the numbers between the two each row
    has those of its own adapter.

    down:   ``[ranks, inputs]``, of some adapters below one another
    up:     ``[outputs, ranks]``
    owners: int16 ``[ranks]``: whose, by the adapters' places from 1 on
    """

    down: Weight
    up: Weight
    owners: NDArray[np.int16]


class Added(Protocol):
    """What all adapters add to a projection."""

    def add(self, y: Tensor, x: Tensor, adapted: AdaptedRows) -> Tensor:
        """What a projection made of ``x [T, inputs]``, ``y [T, outputs]``, with what the rows' adapters add; ``y`` is
        the caller's no more."""


@runtime_checkable
class AdaptingOps(TensorOps, Protocol):
    """Operations with products of their own for adapters."""

    def adapters(self, pairs: Sequence[Pair | None], gated: bool = False) -> Added | None:
        """What adapters, in their order, add to a projection (None: nothing), whose outputs are ``gate | up`` if
        ``gated``; None: none does."""


@dataclass(frozen=True)
class Stacked:
    """Adapters multiplied `STACKED` at a time, with all rows."""

    parts: Sequence[LowRank]
    ops: TensorOps

    def add(self, y: Tensor, x: Tensor, adapted: AdaptedRows) -> Tensor:
        """See `Added.add`."""
        for each in self.parts:
            others = adapted.others(each.owners, self.ops)
            if others is not None:
                between = self.ops.kernel_array(self.ops.linear(x, each.down))
                between[others] = 0  # not a product: infinities of others would be this row's
                y = y + self.ops.linear(self.ops.from_kernel_array(between), each.up)
        return y


def added_by(pairs: Sequence[Pair | None], ops: TensorOps, gated: bool = False) -> Added | None:
    """See `AdaptingOps.adapters`, of any operations."""
    if isinstance(ops, AdaptingOps):
        return ops.adapters(pairs, gated)
    parts = stacked(pairs, ops)
    return Stacked(parts, ops) if parts else None


def stacked(pairs: Sequence[Pair | None], ops: TensorOps) -> tuple[LowRank, ...]:
    """What all adapters, in their order, add to a projection; None: nothing."""
    found = []
    for first in range(0, len(pairs), STACKED):
        some = {first + at + 1: pair for at, pair in enumerate(pairs[first : first + STACKED]) if pair is not None}
        if some:
            down, up = (np.concatenate(each, axis) for axis, each in enumerate(zip(*some.values(), strict=True)))
            owners = np.repeat(np.array([*some], np.int16), [len(down) for down, _ in some.values()])
            found.append(LowRank(ops.float_weight(down), ops.float_weight(up), owners))
    return tuple(found)


class AdaptedRows:
    """Which rows of a step go by which adapter. adapters: int16 ``[T]``, by its place from 1 on; 0: none"""

    def __init__(self, adapters: NDArray[np.int16]) -> None:
        self.adapters, self._others = adapters, dict[bytes, KernelArray | None]()
        self._known: dict[Callable[..., Any], Any] = {}

    def known(self, make: Callable[[NDArray[np.int16]], Made]) -> Made:
        """What ``make`` makes of them; once."""
        if make not in self._known:
            self._known[make] = make(self.adapters)
        found: Made = self._known[make]
        return found

    def others(self, owners: NDArray[np.int16], ops: TensorOps) -> KernelArray | None:
        """bool ``[T, ranks]``: whether a rank's owner is not the row's adapter. None: it is of no row."""
        key = owners.tobytes()
        if key not in self._others:
            others = self.adapters[:, None] != owners
            self._others[key] = None if others.all() else ops.upload(others)
        return self._others[key]


class RankAdapter:
    """One rank's part of an adapter.

    prefix: of the names of the model's layers
    view:   see `Decoder.view`: rows of ``up`` come in the order of a projection's own
    """

    def __init__(self, adapter: Adapter, prefix: str, view: Callable[[Weights], Weights]) -> None:
        self._adapter, self._prefix = adapter, prefix
        self._ups = view(_Ups(adapter, prefix))
        self._used: set[str] = set()

    def of_rows(self, parts: Parts, inputs: int) -> Pair | None:
        """For these outputs of some projections as one; None: it changes none of them."""
        modules = [self._module(name) for name, _ in parts]
        if not any(modules):
            return None
        downs, ups = [], []
        for (name, ranges), module in zip(parts, modules, strict=True):
            outputs = sum(stop - start for start, stop in ranges)
            if module is None:
                downs.append(np.zeros((0, inputs), np.float32))
                ups.append(np.zeros((outputs, 0), np.float32))
                continue
            up = np.concatenate([self._ups.rows(f"{name}.weight", start, stop) for start, stop in ranges])
            down = self._adapter.down(module)
            self._check(module, (down.shape[1], up.shape[0]), (inputs, outputs))
            downs.append(down)
            ups.append(up)
        return np.concatenate(downs), _diagonal(ups)

    def of_columns(self, name: str, ranges: Sequence[tuple[int, int]], outputs: int) -> Pair | None:
        """For these inputs of a projection; None: it does not change that."""
        module = self._module(name)
        if module is None:
            return None
        down, up = self._adapter.down(module), self._adapter.up(module)
        most = max(stop for _, stop in ranges)
        self._check(module, (min(down.shape[1], most), up.shape[0]), (most, outputs))
        return np.concatenate([down[:, start:stop] for start, stop in ranges], axis=1), up

    @property
    def is_used(self) -> bool:
        """Whether it changes anything that was asked for."""
        return bool(self._used)

    def check_used(self, elsewhere: Collection[str]) -> None:
        """Raise ModelError if it changes something that was not asked for, but for layers whose names begin so."""
        unused = [name for name in sorted(self._adapter.modules - self._used) if not name.startswith((*elsewhere,))]
        if unused:
            raise ModelError(
                f"adapter {self._adapter.name!r} changes {unused[0]}, which this model has not, or is not served with: "
                "q_proj, k_proj, v_proj and o_proj of attention over keys and values are, and gate_proj, up_proj and "
                "down_proj of dense MLPs"
            )

    def _module(self, name: str) -> str | None:
        """The adapter's name of a projection; None: it has none."""
        own = name.removeprefix(self._prefix)
        at, _, last = own.rpartition(".")
        known = own if own in self._adapter.modules else f"{at}.{_FUSED.get(last, last)}"
        if known not in self._adapter.modules:
            return None
        self._used.add(known)
        return known

    def _check(self, module: str, found: tuple[int, int], expected: tuple[int, int]) -> None:
        if found != expected:
            raise ModelError(
                f"adapter {self._adapter.name!r}: {module} has {found[0]} inputs and {found[1]} outputs, the model's "
                f"{expected[0]} and {expected[1]}: it is for another model"
            )


def _diagonal(blocks: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """A matrix with these along its diagonal, and zeros elsewhere."""
    found = np.zeros((sum(len(block) for block in blocks), sum(block.shape[1] for block in blocks)), np.float32)
    row = column = 0
    for block in blocks:
        found[row : row + len(block), column : column + block.shape[1]] = block
        row, column = row + len(block), column + block.shape[1]
    return found


class _Ups:
    """`Weights` that are an adapter's ``up``s, by the names of the projections that they are for."""

    def __init__(self, adapter: Adapter, prefix: str) -> None:
        self._adapter, self._prefix = adapter, prefix

    @property
    def names(self) -> Sequence[str]:
        return [f"{self._prefix}{module}.weight" for module in self._adapter.modules]

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._adapter.up(name.removeprefix(self._prefix).removesuffix(".weight"))

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self.tensor(name)[start:stop]

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self.tensor(name)[:, start:stop]

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        raise ModelError(f"adapter {self._adapter.name!r} has no bytes")

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        return None

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return None
