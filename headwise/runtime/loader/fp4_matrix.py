"""Matrices in FP4, with a power of two for each 32 of a row (MXFP4), in a checkpoint whose others are in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.ops.mxfp4 import GROUP, are_exact, in_integers
from headwise.runtime.ops.quantised import GroupQuantised, as_float32


@dataclass(frozen=True, eq=False)
class Fp4Matrix:
    """A `StoredMatrix` of ``halves uint8 [N, K / 2]`` and ``exponents uint8 [N, K / 32]``."""

    halves: NDArray[np.uint8]
    exponents: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        return self.halves.shape[0], 2 * self.halves.shape[1]

    def part(self, rows: slice, columns: slice) -> NDArray[np.float32]:
        first, last = columns.start // GROUP, -(-columns.stop // GROUP)
        expanded = as_float32(self._groups(rows, first, last))
        return expanded[:, columns.start - first * GROUP : columns.stop - first * GROUP]

    def quantised(self, rows: slice, columns: slice) -> GroupQuantised | None:
        """Of int8. None also where exponents are beyond what scales of packed weights hold."""
        first, last = columns.start // GROUP, columns.stop // GROUP
        if columns.start % GROUP or columns.stop % GROUP or not are_exact(self.exponents[rows, first:last]):
            return None
        return self._groups(rows, first, last)

    def _groups(self, rows: slice, first: int, last: int) -> GroupQuantised:
        halves = self.halves[rows, first * GROUP // 2 : last * GROUP // 2]
        return in_integers(halves, self.exponents[rows, first:last])


def fp4_matrix(name: str, codes: NDArray[Any], exponents: NDArray[Any]) -> Fp4Matrix:
    """The matrix ``name``, whose bytes are ``codes``.

    Raises:
        ModelError: exponents are of another shape or dtype.
    """
    groups = codes.shape[0], 2 * codes.shape[1] // GROUP
    if codes.ndim != 2 or 2 * codes.shape[1] % GROUP or exponents.dtype != np.uint8 or exponents.shape != groups:
        raise ModelError(
            f"{name!r} is int8 {list(codes.shape)} in a checkpoint of FP8, and its scales are {exponents.dtype} "
            f"{list(exponents.shape)}: FP4 with a power of two (F8_E8M0) for each {GROUP} numbers of a row is expected"
        )
    return Fp4Matrix(codes.view(np.uint8), exponents)
