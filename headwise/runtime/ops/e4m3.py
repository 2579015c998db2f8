"""Numbers of 8 bits in floating point, float8_e4m3fn, as float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_EXPONENT_BIAS, _MANTISSA = 7, 8


def _e4m3_numbers() -> NDArray[np.float32]:
    """The number that each byte is as float8_e4m3fn: it has no infinities, and one NaN of either sign."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    power = np.maximum(exponent, 1) - _EXPONENT_BIAS
    magnitude = (mantissa + np.where(exponent > 0, _MANTISSA, 0)) / _MANTISSA * 2.0**power
    magnitude[(bits & 127) == 127] = np.nan
    numbers: NDArray[np.float32] = np.where(bits >> 7, -magnitude, magnitude).astype(np.float32)
    return numbers


E4M3 = _e4m3_numbers()
"""``[256]``"""
