"""bfloat16 on a host: ``uint16`` arrays of its bits, which NumPy alone can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_bits(numbers: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of ``numbers`` as bfloat16, rounded from float32 half to even; NaN stays NaN."""
    exact = np.ascontiguousarray(numbers, np.float32)
    bits = exact.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet = bits | np.uint32(0x400000)
    return (np.where(np.isnan(exact), quiet, rounded) >> np.uint32(16)).astype(np.uint16)


def to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
