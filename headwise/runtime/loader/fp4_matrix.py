"""Matrices in FP4, with a power of two for each 32 of a row (MXFP4), or an E4M3 scale for each 16 and one of all
(NVFP4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.e4m3 import E4M3
from headwise.runtime.loader.stored_matrix import StoredTensors
from headwise.runtime.ops.fp4 import GROUP, in_integers, may_be_packed, powers_of_two
from headwise.runtime.ops.quantised import GroupQuantised, as_float32

NV_GROUP = 16
"""Neighbours in a row that share a scale, in NVFP4."""
_ONE = np.float32(1)


@dataclass(frozen=True, eq=False)
class Fp4Matrix:
    """A `StoredMatrix` of ``halves uint8 [N, K / 2]`` and ``scales float32 [N, K / group]``."""

    halves: NDArray[np.uint8]
    scales: NDArray[np.float32]
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.halves.shape[0], 2 * self.halves.shape[1]

    def part(self, rows: slice, columns: slice) -> NDArray[np.float32]:
        first, last = columns.start // self.group, -(-columns.stop // self.group)
        expanded = as_float32(self._groups(rows, first, last))
        return expanded[:, columns.start - first * self.group : columns.stop - first * self.group]

    def quantised(self, rows: slice, columns: slice) -> GroupQuantised | None:
        """Of int8. None also where scales are beyond what those of packed weights hold."""
        first, last = columns.start // self.group, columns.stop // self.group
        cuts = columns.start % self.group or columns.stop % self.group
        if cuts or not may_be_packed(self.scales[rows, first:last]):
            return None
        return self._groups(rows, first, last)

    def _groups(self, rows: slice, first: int, last: int) -> GroupQuantised:
        halves = self.halves[rows, first * self.group // 2 : last * self.group // 2]
        return in_integers(halves, self.scales[rows, first:last])


def mxfp4_matrix(tensors: StoredTensors, name: str, exponents_name: str) -> Fp4Matrix:
    """The matrix ``name`` with these exponents. Raises ModelError if they are of other shapes or dtypes."""
    halves, exponents = _checked(tensors, name, exponents_name, GROUP, f"a power of two (E8M0) for each {GROUP}")
    return Fp4Matrix(halves, powers_of_two(exponents), GROUP)


def nvfp4_matrix(
    tensors: StoredTensors,
    name: str,
    scales_name: str,
    factor: np.float32 = _ONE,
    divisor: np.float32 = _ONE,
) -> Fp4Matrix:
    """The matrix ``name`` with these scales, all times ``factor / divisor``. Raises ModelError as `mxfp4_matrix`."""
    halves, scales = _checked(tensors, name, scales_name, NV_GROUP, f"a scale (E4M3) for each {NV_GROUP}")
    return Fp4Matrix(halves, E4M3[scales] * factor / divisor, NV_GROUP)


def overall_scale(tensors: StoredTensors, name: str) -> np.float32:
    """The one number that ``name`` has. Raises ModelError if it has others, or that is none to scale by."""
    found = tensors.tensor(name)
    if found.size != 1 or not np.isfinite(found).all() or found.item() == 0:
        raise ModelError(f"{name!r} is {list(found.shape)}: one number that is not 0 is expected")
    return np.float32(found.item())


def _checked(
    tensors: StoredTensors, name: str, scales_name: str, group: int, expected: str
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    halves, scales = tensors.stored(name), tensors.stored(scales_name)
    fits = halves.ndim == 2 and scales.shape == (len(halves), 2 * halves.shape[1] // group)
    if halves.dtype not in (np.int8, np.uint8) or scales.dtype != np.uint8 or not fits or 2 * halves.shape[1] % group:
        raise ModelError(
            f"{name!r} is {halves.dtype} {list(halves.shape)}, and {scales_name!r} {scales.dtype} "
            f"{list(scales.shape)}: FP4, two numbers in a byte, with {expected} numbers of a row is expected"
        )
    return halves.view(np.uint8), scales
