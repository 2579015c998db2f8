"""FP4: numbers of 4 bits (E2M1), two in a byte, low one first, with a scale for each group of a row: in MXFP4 a power
of two for 32, in NVFP4 any for 16.

Sources: OCP Microscaling Formats (MX) Specification 1.0; NVIDIA's NVFP4, as compressed-tensors and Model Optimizer
write it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.quantised import GroupQuantised

GROUP = 32
"""Of MXFP4."""

_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the 16 numbers of 4 bits: integers."""
_BIAS = 127
_SMALLEST, _LARGEST = 2.0**-24, 65504.0
"""Float16's, which packed int8 weights keep their scales in."""


def powers_of_two(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What exponents (E8M0) stand for."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS).astype(np.float32)


def in_integers(halves: NDArray[np.uint8], scales: NDArray[np.float32]) -> GroupQuantised:
    """``halves [N, K / 2]`` with ``scales [N, K / group]``, as int8 without loss."""
    codes = np.stack([_DOUBLED[halves & 15], _DOUBLED[halves >> 4]], axis=-1)
    codes = codes.reshape(len(halves), 2 * halves.shape[1])
    return GroupQuantised(codes, scales / np.float32(2), None, codes.shape[1] // max(scales.shape[1], 1), 8)


def may_be_packed(scales: NDArray[np.float32]) -> bool:
    """Whether packed weights can keep the scales that `in_integers` gives: powers of two whole, others rounded."""
    halved = scales[scales != 0] / 2
    return bool(halved.min(initial=1.0) >= _SMALLEST and halved.max(initial=1.0) <= _LARGEST)
