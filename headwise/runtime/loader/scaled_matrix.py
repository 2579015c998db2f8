"""Matrices of numbers of 8 bits, FP8 or int8, with a scale for each tile: the matrix, a row, or such as 128 x 128."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.e4m3 import E4M3
from headwise.runtime.loader.stored_matrix import StoredTensors
from headwise.runtime.ops.fp4 import powers_of_two
from headwise.runtime.ops.quantised import GroupQuantised


@dataclass(frozen=True, eq=False)
class ScaledMatrix:
    """A `StoredMatrix` of ``codes [N, K]``, int8 or the bits of float8_e4m3fn (uint8).

    scales: float32 ``[ceil(N / tile rows), ceil(K / tile columns)]``
    tile:   rows and columns that share a scale
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32]
    tile: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def part(self, rows: slice, columns: slice) -> NDArray[np.float32]:
        codes = self.codes[rows, columns]
        numbers = codes.astype(np.float32) if codes.dtype == np.int8 else E4M3[codes]
        numbers *= self.scales[np.ix_(self._tiles(rows, 0), self._tiles(columns, 1))]
        return numbers

    def _tiles(self, part: slice, axis: int) -> NDArray[np.int64]:
        """The tile of each row or column, or the only one of all."""
        if self.scales.shape[axis] == 1:
            return np.zeros(1, np.int64)
        return np.arange(part.start, part.stop) // self.tile[axis]

    def quantised(self, rows: slice, columns: slice) -> GroupQuantised | None:
        """A tile's rows have its scale each; where columns cut through tiles, groups are as small as that takes.

        None: int8 whose tiles are no whole rows.
        """
        is_float = self.codes.dtype == np.uint8
        is_whole = self.scales.shape[1] == 1
        if not is_float and not is_whole:
            return None
        codes = self.codes[rows, columns]
        depth = codes.shape[1]
        group = depth if is_whole else gcd(columns.start, columns.stop, self.tile[1])
        begins = np.arange(columns.start, columns.stop, max(group, 1))
        tiles = np.zeros(1, np.int64) if is_whole else begins // self.tile[1]
        scales = np.broadcast_to(self.scales[self._tiles(rows, 0)], (len(codes), self.scales.shape[1]))[:, tiles]
        return GroupQuantised(codes, np.ascontiguousarray(scales), None, group, 8, is_float)


def scaled_matrix(
    tensors: StoredTensors, name: str, scale_name: str, tile: tuple[int, int] | None, powers: bool = False
) -> ScaledMatrix:
    """The matrix ``name`` with the scales ``scale_name``.

    tile:   of scales that are a matrix of several columns, as the configuration says; None: it has no such
    powers: scales are stored as exponents (E8M0), as bytes

    Raises:
        ModelError: codes are of another dtype, or scales of another shape.
    """
    codes = tensors.stored(name)
    scales = _powers(tensors, scale_name) if powers else tensors.tensor(scale_name)
    if codes.ndim != 2 or codes.dtype not in (np.int8, np.uint8):
        raise ModelError(f"{name!r} is {codes.dtype} {list(codes.shape)}: a matrix of FP8 (E4M3) or int8 is expected")
    rows, columns = codes.shape
    if scales.size == 1:
        return ScaledMatrix(codes, scales.reshape(1, 1), (max(rows, 1), max(columns, 1)))
    if scales.shape in ((rows,), (rows, 1)):
        return ScaledMatrix(codes, scales.reshape(rows, 1), (1, max(columns, 1)))
    if tile is not None and scales.shape == (-(-rows // tile[0]), -(-columns // tile[1])):
        return ScaledMatrix(codes, scales, tile)
    tiles = "" if tile is None else f", or one for each {tile[0]} x {tile[1]}"
    raise ModelError(
        f"{scale_name!r} has the shape {list(scales.shape)}, and {name!r} {list(codes.shape)}: one scale is expected, "
        f"or one for each row{tiles}"
    )


def _powers(tensors: StoredTensors, name: str) -> NDArray[np.float32]:
    stored = tensors.stored(name)
    if stored.dtype != np.uint8:
        raise ModelError(
            f"{name!r} is {stored.dtype} {list(stored.shape)}: powers of two (E8M0), as bytes, are expected"
        )
    return powers_of_two(stored)
