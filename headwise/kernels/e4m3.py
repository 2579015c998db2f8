"""Numbers of 8 bits in floating point, float8_e4m3fn, by their bits: ml_dtypes is not needed."""

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

LARGEST = np.float32(448.0)


def to_e4m3(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bits of numbers, rounded half to even; those beyond `LARGEST` become it, NaN stays NaN."""
    magnitude = np.minimum(np.abs(numbers), LARGEST)
    bits = magnitude.view(np.uint32)
    with np.errstate(invalid="ignore"):  # of NaN
        normal = (bits + np.uint32(0x7FFFF) + (bits >> 20 & 1) >> 20).astype(np.int32) - (120 << 3)
        small = np.rint(magnitude * np.float32(512)).astype(np.int32)  # without a leading one
    codes = np.where(magnitude < 2.0**-6, small, normal)
    found: NDArray[np.uint8] = (np.where(np.isnan(numbers), 127, codes) | np.signbit(numbers) << 7).astype(np.uint8)
    return found
