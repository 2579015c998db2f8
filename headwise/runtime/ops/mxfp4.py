"""MXFP4: numbers of 4 bits (E2M1), two in a byte, low one first, and a power of two for each 32 of a row.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.quantised import GroupQuantised

GROUP = 32

_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the 16 numbers of 4 bits: integers."""
_BIAS = 128
"""Of the exponents, and 1 because the integers are twice the numbers."""
_EXACT = range(_BIAS - 24, _BIAS + 16)
"""Exponents whose power of two float16 holds, which packed int8 weights keep their scales in."""


def in_integers(halves: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> GroupQuantised:
    """``halves [N, K / 2]`` with ``exponents [N, K / 32]``, as int8 without loss."""
    codes = np.stack([_DOUBLED[halves & 15], _DOUBLED[halves >> 4]], axis=-1)
    codes = codes.reshape(len(halves), 2 * halves.shape[1])
    scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS).astype(np.float32)
    return GroupQuantised(codes, scale, None, GROUP, 8)


def are_exact(exponents: NDArray[np.uint8]) -> bool:
    """Whether packed weights can keep what `in_integers` gives."""
    return int(exponents.min(initial=_BIAS)) in _EXACT and int(exponents.max(initial=_BIAS)) in _EXACT
