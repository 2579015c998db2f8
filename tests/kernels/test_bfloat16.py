"""bfloat16 as bits, without ml_dtypes, is what ml_dtypes makes of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from headwise.kernels.bfloat16 import to_bits, to_float32


def test_every_bfloat16_and_all_that_lie_halfway_between_are_rounded_half_to_even() -> None:
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    numbers = to_float32(every)
    halfway = (every.astype(np.uint32) << 16 | 0x8000).view(np.float32)
    halfway = halfway[~np.isnan(halfway)]
    beside = [np.nextafter(halfway, np.float32(limit)) for limit in (-np.inf, np.inf)]
    for finite in (numbers[~np.isnan(numbers)], halfway, *beside):
        np.testing.assert_array_equal(to_bits(finite), finite.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.isnan(to_float32(to_bits(numbers[np.isnan(numbers)]))).all()
    np.testing.assert_array_equal(numbers, every.view(ml_dtypes.bfloat16).astype(np.float32))
