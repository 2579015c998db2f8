"""A checkpoint's weights as they are; for models whose checkpoints have some by other names or in another order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.decoder import Weights
from headwise.runtime.ops.quantised import GroupQuantised, Matrix


class WeightView:
    """`Weights` of ``source``, all of them as float32. Models override what differs."""

    def __init__(self, source: Weights) -> None:
        self._source = source

    @property
    def names(self) -> Sequence[str]:
        return self._source.names

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._source.tensor(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self._source.rows(name, start, stop)

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self._source.columns(name, start, stop)

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        return self._source.byte_rows(name, start, stop)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        """None: a model that reorders or joins rows has float32 to do it with, unless it says how else."""
        return None

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        """None, likewise."""
        return None


def taken(matrix: Matrix, rows: NDArray[np.int64]) -> Matrix:
    """Rows of a matrix in another order, as they are kept."""
    return matrix.taken(rows) if isinstance(matrix, GroupQuantised) else matrix[rows]


class ExpertWeights(WeightView):
    """Experts one by one, whether a checkpoint has them so or a layer's in two tensors.

    These are ``experts.gate_up_proj [E, 2 I, hidden]``, gates above ups, and ``experts.down_proj [E, hidden, I]``.
    Either form is read by the names ``experts.N.gate_proj.weight`` and so on.

    has_inputs_first: joined experts are ``[E, hidden, 2 I]`` and ``[E, I, hidden]``
    """

    has_inputs_first: ClassVar[bool] = False

    _EXPERT = re.compile(r"(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self._source.names)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        expert = self._joined_expert(name)
        return super().rows(name, start, stop) if expert is None else expert[start:stop]

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        expert = self._joined_expert(name)
        return super().columns(name, start, stop) if expert is None else expert[:, start:stop]

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        """As the checkpoint has it, where that has experts one by one."""
        return self._source.kept_rows(name, start, stop) if name in self._known else None

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_columns(name, start, stop) if name in self._known else None

    def _joined_expert(self, name: str) -> NDArray[np.float32] | None:
        """One expert's matrix out of a layer's, if that is how this checkpoint has it."""
        match = None if name in self._known else self._EXPERT.fullmatch(name)
        if match is None:
            return None
        is_down = match["kind"] == "down"
        joined = f"{match['at']}.{'down' if is_down else 'gate_up'}_proj"
        if joined not in self._known:
            return None
        expert = int(match["expert"])
        matrix: NDArray[np.float32] = self._source.rows(joined, expert, expert + 1)[0]
        matrix = matrix.T if self.has_inputs_first else matrix
        if is_down:
            return matrix
        gate, up = np.split(matrix, 2)
        return gate if match["kind"] == "gate" else up


class InterleavedWeights(ExpertWeights):
    """The same, of models that rotate neighbours ``(2i, 2i + 1)`` of a head by the angle ``i``.

    The rope operation rotates the elements ``(i, i + D / 2)``. So the rows of the query and the key projection are
    reordered here, each head's even ones before its odd ones: then the rope operation turns the pairs that the model
    turns, and queries and keys, being reordered alike, have the same products.
    """

    _ROTATED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")

    def __init__(self, source: Weights, head_dim: int) -> None:
        super().__init__(source)
        self._even_first = np.concatenate([np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)])

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        rows = super().rows(name, start, stop)
        if not name.endswith(self._ROTATED):
            return rows
        heads = rows.reshape(-1, len(self._even_first), rows.shape[1])
        return heads[:, self._even_first].reshape(rows.shape)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        kept = super().kept_rows(name, start, stop)
        if kept is None or not name.endswith(self._ROTATED):
            return kept
        dim = len(self._even_first)
        return taken(kept, (np.arange(0, stop - start, dim)[:, None] + self._even_first).reshape(-1))
