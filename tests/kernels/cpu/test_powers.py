"""Powers of two in vectors: as near as their docstrings say, and what becomes of numbers that are none."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from headwise.kernels.cpu.simd import ISA, LANES, Emitter

NEEDS_TILES = pytest.mark.skipif(not ISA.amx, reason="only emitted where AMX multiplies what comes of it")
WAYS = [
    pytest.param(lambda e, x: e.exp2(x), 2e-7, id="exp2"),
    pytest.param(lambda e, x: e.exp2(x, degree=4), 5e-6, id="exp2-degree-4"),
    pytest.param(lambda e, x: e.quick_exp2(x), 5e-6, id="quick", marks=NEEDS_TILES),
]


def powers(way: Any, numbers: np.ndarray) -> np.ndarray:
    """``way(emitter, vector)`` of so many numbers as are a multiple of LANES."""

    @intrinsic
    def of_vector(typing: Any, x: Any, at: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            place = e.at(*e.args)
            e.store(way(e, e.load(place)), place)
            return context.get_dummy_value()

        return types.void(x, types.intp), emit

    @numba.njit(error_model="numpy")
    def run(x: Any) -> None:
        for at in range(0, len(x), LANES):
            of_vector(x, at)

    found = numbers.astype(np.float32)
    run(found)
    return found


@pytest.mark.parametrize(("way", "error"), WAYS)
def test_powers_are_as_near_as_is_said(way: Any, error: float) -> None:
    x = np.linspace(-125, 126, 64 * 251, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(powers(way, x) / exact - 1).max() < error


@pytest.mark.parametrize(("way", "error"), WAYS)
def test_what_is_masked_is_nothing_and_nan_shows(way: Any, error: float) -> None:
    x = np.array([-np.inf, -1e30, -400, np.nan] * LANES, np.float32)
    found = powers(way, x).reshape(-1, 4)
    np.testing.assert_array_equal(found, np.tile([0, 0, 0, np.nan], (LANES, 1)))
