"""Gates are what NumPy makes of the same numbers, however large they are and however many."""

from __future__ import annotations

import math
from collections.abc import Callable

import numba
import numpy as np
import pytest

from headwise.kernels.cpu.gates import padded, set_exponentials, times_gelu, times_sigmoid


@numba.njit
def gated_by_sigmoid(row, gate, count):
    times_sigmoid(row, 0, gate, 0, count)


@numba.njit
def gated_by_gelu(row, gate, count):
    times_gelu(row, 0, gate, 0, count)


@numba.njit
def made_exponentials(row, count):
    set_exponentials(row, 0, count)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * np.tanh(0.5 * x) + 0.5


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("gated", "factor"), [(gated_by_sigmoid, sigmoid), (gated_by_gelu, gelu)])
@pytest.mark.parametrize("count", [1, 16, 53])
def test_rows_are_multiplied_by_what_gates_say(
    gated: Callable[..., None], factor: Callable[[np.ndarray], np.ndarray], count: int
) -> None:
    draw = np.random.default_rng(count)
    gate = draw.standard_normal(padded(count)).astype(np.float32) * 4
    gate[: min(4, count)] = np.array([-200.0, 200.0, -1e6, 0.0], np.float32)[: min(4, count)]
    row = draw.standard_normal(padded(count)).astype(np.float32)
    expected = row[:count] * factor(gate[:count].astype(np.float64))
    gated(row, gate.copy(), count)
    np.testing.assert_allclose(row[:count], expected, rtol=2e-6, atol=1e-6)


def test_a_gate_that_is_no_number_leaves_none() -> None:
    row, gate = np.ones(padded(3), np.float32), np.zeros(padded(3), np.float32)
    gate[1] = np.nan
    gated_by_sigmoid(row, gate, 3)
    assert np.isnan(row[:3]).tolist() == [False, True, False]


@pytest.mark.parametrize("count", [1, 16, 53])
def test_exponentials_of_what_is_at_most_0(count: int) -> None:
    row = -np.random.default_rng(count).exponential(9, padded(count)).astype(np.float32)
    row[: min(3, count)] = np.array([0.0, -1e6, -87.0], np.float32)[: min(3, count)]
    wanted = np.exp(row.astype(np.float64))
    made_exponentials(row, count)
    np.testing.assert_allclose(row[:count], wanted[:count], rtol=4e-6, atol=1e-37)
