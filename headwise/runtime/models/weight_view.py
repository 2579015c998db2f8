"""A checkpoint's weights as they are; for models whose checkpoints have some by other names or in another order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.quantised import GroupQuantised, Matrix


class Reader(Protocol):
    """Reads parts of matrices as floats: float32, or in the dtype that they are stored in."""

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]: ...

    def columns(self, name: str, start: int, stop: int) -> NDArray[Any]: ...


class WeightView:
    """`Weights` of ``source``, all of them as floats. Models override what differs, in `read_rows` and `read_columns`.

    What the source keeps in the model's dtype is kept so, also where rows are reordered or joined; codes are not.
    """

    def __init__(self, source: Weights) -> None:
        self._source, self._kept = source, _KeptFloats(source)

    @property
    def names(self) -> Sequence[str]:
        return self._source.names

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._source.tensor(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self.read_rows(self._source, name, start, stop)

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self.read_columns(self._source, name, start, stop)

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        return self._source.byte_rows(name, start, stop)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        """None: not all that these rows are made of is stored in the model's dtype."""
        try:
            return self.read_rows(self._kept, name, start, stop)
        except _NotKeptError:
            return None

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        """None, likewise."""
        try:
            return self.read_columns(self._kept, name, start, stop)
        except _NotKeptError:
            return None

    def read_rows(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        """`rows`, of what ``source`` reads and in its dtype."""
        return source.rows(name, start, stop)

    def read_columns(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        """`columns`, likewise."""
        return source.columns(name, start, stop)


class RenamedWeights(WeightView):
    """A checkpoint's weights by other names. here: of each of its names, what it is called"""

    def __init__(self, source: Weights, here: Mapping[str, str]) -> None:
        super().__init__(source)
        self._names = {ours: theirs for theirs, ours in here.items()}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._names)

    def tensor(self, name: str) -> NDArray[np.float32]:
        return super().tensor(self._name(name))

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        return super().byte_rows(self._name(name), start, stop)

    def read_rows(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        return super().read_rows(source, self._name(name), start, stop)

    def read_columns(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        return super().read_columns(source, self._name(name), start, stop)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_rows(self._name(name), start, stop)

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_columns(self._name(name), start, stop)

    def _name(self, name: str) -> str:
        """The checkpoint's."""
        return self._names.get(name, name)


class _NotKeptError(Exception):
    """A matrix is stored as codes, or in another dtype."""


class _KeptFloats:
    """`Reader` in the dtype that matrices are stored in; raises `_NotKeptError` of what a source does not keep."""

    def __init__(self, source: Weights) -> None:
        self._source = source

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return _floats(self._source.kept_rows(name, start, stop))

    def columns(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return _floats(self._source.kept_columns(name, start, stop))


def _floats(kept: Matrix | None) -> NDArray[Any]:
    if kept is None or isinstance(kept, GroupQuantised):
        raise _NotKeptError
    return kept


def taken(matrix: Matrix, rows: NDArray[np.int64]) -> Matrix:
    """Rows of a matrix in another order, as they are kept."""
    return matrix.taken(rows) if isinstance(matrix, GroupQuantised) else matrix[rows]


class ExpertWeights(WeightView):
    """Experts one by one, whether a checkpoint has them so or a layer's in two tensors.

    These are ``experts.gate_up_proj [E, 2 I, hidden]``, gates above ups, and ``experts.down_proj [E, hidden, I]``.
    Either form is read by the names ``experts.N.gate_proj.weight`` and so on.

    has_inputs_first: joined experts are ``[E, hidden, 2 I]`` and ``[E, I, hidden]``
    joined:           names of both tensors in a layer's MLP
    """

    has_inputs_first: ClassVar[bool] = False
    joined: ClassVar[tuple[str, str]] = ("experts.gate_up_proj", "experts.down_proj")

    _EXPERT = re.compile(r"(?P<at>.*\.)experts\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self._source.names)

    def read_rows(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        expert = self._joined_expert(source, name)
        return super().read_rows(source, name, start, stop) if expert is None else expert[start:stop]

    def read_columns(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        expert = self._joined_expert(source, name)
        return super().read_columns(source, name, start, stop) if expert is None else expert[:, start:stop]

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        """As the checkpoint has it, codes too, where that has experts one by one."""
        kept = self._source.kept_rows if name in self._known else super().kept_rows
        return kept(name, start, stop)

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        """Likewise."""
        kept = self._source.kept_columns if name in self._known else super().kept_columns
        return kept(name, start, stop)

    def _joined_expert(self, source: Reader, name: str) -> NDArray[Any] | None:
        """One expert's matrix out of a layer's, if that is how this checkpoint has it."""
        match = None if name in self._known else self._EXPERT.fullmatch(name)
        if match is None:
            return None
        is_down = match["kind"] == "down"
        joined = match["at"] + self.joined[is_down]
        if joined not in self._known:
            return None
        expert = int(match["expert"])
        matrix: NDArray[Any] = source.rows(joined, expert, expert + 1)[0]
        matrix = matrix.T if self.has_inputs_first else matrix
        if is_down:
            return matrix
        gate, up = np.split(matrix, 2)
        return gate if match["kind"] == "gate" else up


class InputsFirstExperts(ExpertWeights):
    """The same with inputs before outputs, where experts are joined."""

    has_inputs_first: ClassVar[bool] = True


class FusedWeights(WeightView):
    """Projections that a checkpoint has below one another in one matrix, one by one.

    at: of each such projection's last name, that of the matrix, and the row there that it begins with
    """

    def __init__(self, source: Weights, at: Mapping[str, tuple[str, int]]) -> None:
        super().__init__(source)
        self._at = at

    def read_rows(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        name, first = self._place(name)
        return super().read_rows(source, name, first + start, first + stop)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        name, first = self._place(name)
        return self._source.kept_rows(name, first + start, first + stop)

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_columns(name, start, stop)

    def _place(self, name: str) -> tuple[str, int]:
        """The name of the matrix, and the row that the projection begins with."""
        layer, _, last = name.rpartition(".")
        at, _, part = layer.rpartition(".")
        if part not in self._at:
            return name, 0
        fused, first = self._at[part]
        return f"{at}.{fused}.{last}", first


class RotatedWeights(WeightView):
    """Queries, keys and their norms with each head's elements in an order as `pairs_first` gives it.

    So the rope operation turns the pairs that the model turns; and queries and keys, being reordered alike, have the
    same products.
    """

    _ROWS = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
    _NORMS = ("q_norm.weight", "k_norm.weight")

    def __init__(self, source: Weights, order: NDArray[np.int64]) -> None:
        super().__init__(source)
        self._order = order

    def tensor(self, name: str) -> NDArray[np.float32]:
        found = self._source.tensor(name)
        return found[self._every(len(found))] if name.endswith(self._NORMS) else found

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        rows = self._source.rows(name, start, stop)
        return rows[self._every(len(rows))] if name.endswith(self._ROWS) else rows

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        kept = self._source.kept_rows(name, start, stop)
        return kept if kept is None or not name.endswith(self._ROWS) else taken(kept, self._every(stop - start))

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_columns(name, start, stop)

    def _every(self, rows: int) -> NDArray[np.int64]:
        """The order of so many rows, of whole heads."""
        return (np.arange(0, rows, len(self._order))[:, None] + self._order).reshape(-1)


def rotated(source: Weights, order: NDArray[np.int64] | None) -> Weights:
    """`RotatedWeights`, where a head's elements are not in that order already."""
    return source if order is None else RotatedWeights(source, order)


class RotatedByLayer(Weights):
    """`RotatedWeights` of layers whose heads' elements come in orders of their own. orders: of each layer; None: theirs

    Weights of no layer, or of none of these, are as they are.
    """

    _LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

    def __init__(self, source: Weights, orders: Sequence[NDArray[np.int64] | None]) -> None:
        self._source = source
        self._views = [rotated(source, order) for order in orders]

    @property
    def names(self) -> Sequence[str]:
        return self._source.names

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._view(name).tensor(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self._view(name).rows(name, start, stop)

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self._view(name).columns(name, start, stop)

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        return self._view(name).byte_rows(name, start, stop)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._view(name).kept_rows(name, start, stop)

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._view(name).kept_columns(name, start, stop)

    def _view(self, name: str) -> Weights:
        found = self._LAYER.search(name)
        layer = len(self._views) if found is None else int(found[1])
        return self._views[layer] if layer < len(self._views) else self._source
