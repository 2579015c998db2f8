"""Matrices of integers of 4 or 8 bits, several to a 32-bit word, with a scale and a zero point for each group of a row:

    w[n, k] = scale[n, group of k] * (codes[n, k] - zero[n, group of k])

AWQ, GPTQ and compressed-tensors differ in which way round the matrix lies, along which axis words are packed, and in
which order a word has its codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.stored_matrix import StoredTensors
from headwise.runtime.ops.quantised import GroupQuantised

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ eight neighbours lie: neighbour ``i`` in the bits from ``4 * AWQ_ORDER[i]`` on."""


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """Codes ``[N, K]`` in words.

    words:   int32, ``[N, K]`` but for the packed axis, which is shorter: a view that is transposed where need be
    axis:    the one that is packed, 0 or 1
    length:  of that axis, unpacked
    order:   places of neighbours in a word, in codes
    """

    words: NDArray[np.int32]
    bits: int
    axis: int
    length: int
    order: Sequence[int]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.words.shape
        return (self.length, columns) if self.axis == 0 else (rows, self.length)

    def part(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        """``[rows, columns]``, each code in a byte."""
        each, is_across = 32 // self.bits, self.axis == 0
        lines, asked = (columns, rows) if is_across else (rows, columns)
        first = asked.start // each
        words = (self.words.T if is_across else self.words)[lines, first : -(-asked.stop // each)].view(np.uint32)
        spread = words[:, :, None] >> np.array(self.order, np.uint32) * np.uint32(self.bits)
        codes = (spread & np.uint32((1 << self.bits) - 1)).astype(np.uint8)
        kept = slice(asked.start - first * each, asked.stop - first * each)
        part = codes.reshape(len(words), words.shape[1] * each)[:, kept]
        return part.T if is_across else part


@dataclass(frozen=True, eq=False)
class PackedGroups:
    """A `StoredMatrix` of `PackedCodes`.

    scales:   float32 ``[N, groups]``
    zeros:    ``[N, groups]``, of which ``zero_offset`` is to be taken; None: all are the middle of the codes
    group:    neighbours in a row that share a scale
    group_of: int32 ``[K]``, where groups are not of neighbours; else None
    """

    codes: PackedCodes
    scales: NDArray[np.float32]
    zeros: PackedCodes | None
    zero_offset: int
    group: int
    group_of: NDArray[np.int32] | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    def part(self, rows: slice, columns: slice) -> NDArray[np.float32]:
        groups = self._groups(columns)
        scale, zero = self.scales[rows], self._zeros(rows)
        numbers = self.codes.part(rows, columns).astype(np.float32)
        numbers -= zero[:, groups] if isinstance(zero, np.ndarray) else np.float32(zero)
        numbers *= scale[:, groups]
        return numbers

    def quantised(self, rows: slice, columns: slice) -> GroupQuantised | None:
        if self.group_of is not None or columns.start % self.group or columns.stop % self.group:
            return None
        middle = self._middle
        groups = slice(columns.start // self.group, columns.stop // self.group)
        codes = (self.codes.part(rows, columns) - np.uint8(middle)).view(np.int8)
        scale, zero = np.ascontiguousarray(self.scales[rows, groups]), self._zeros(rows)
        minimum = None
        if isinstance(zero, np.ndarray) and (zero := zero[:, groups] - np.float32(middle)).any():
            minimum = -(scale * zero)
        return GroupQuantised(codes, scale, minimum, self.group, self.codes.bits)

    @property
    def _middle(self) -> int:
        return 1 << (self.codes.bits - 1)

    def _groups(self, columns: slice) -> NDArray[Any]:
        """The group of each column."""
        if self.group_of is not None:
            return self.group_of[columns]
        return np.arange(columns.start, columns.stop) // self.group

    def _zeros(self, rows: slice) -> NDArray[np.float32] | int:
        """``[rows, groups]``, or the one number that all are."""
        if self.zeros is None:
            return self._middle
        stored = self.zeros.part(rows, slice(0, self.zeros.shape[1])).astype(np.float32)
        # Zero points lie within the range of codes: one that was stored less 1 has wrapped around.
        return (stored + np.float32(self.zero_offset)) % np.float32(1 << self.codes.bits)


def words(tensors: StoredTensors, name: str) -> NDArray[np.int32]:
    """The words of a packed matrix; raises ModelError if it is none."""
    stored = tensors.stored(name)
    if stored.ndim != 2 or stored.dtype != np.int32:
        raise ModelError(f"{name!r} is {stored.dtype} {list(stored.shape)}: a matrix of packed int32 is expected")
    return stored


def check_groups(name: str, matrix: PackedGroups) -> PackedGroups:
    """The same matrix, if its parts fit each other; else raises ModelError."""
    rows, columns = matrix.shape
    groups, zeros = -(-columns // matrix.group), matrix.zeros
    fit = matrix.scales.shape == (rows, groups)
    if zeros is not None:
        fit = fit and zeros.shape == (rows, groups) and zeros.words.shape[zeros.axis] * 32 // zeros.bits >= rows
    order = matrix.group_of
    if order is not None:
        fit = fit and order.shape == (columns,) and order.size > 0
        fit = fit and bool(order.min() >= 0 and order.max() < groups)
    if not fit:
        raise ModelError(
            f"{name!r} has codes {[rows, columns]} in groups of {matrix.group}, which do not fit scales "
            f"{list(matrix.scales.shape)} and their zero points: fetch the model again"
        )
    return matrix


def neighbours_or_none(order: NDArray[np.int32], group: int) -> NDArray[np.int32] | None:
    """``group_of``, or None where it only says that neighbours make the groups."""
    return None if np.array_equal(order, np.arange(len(order)) // group) else order
