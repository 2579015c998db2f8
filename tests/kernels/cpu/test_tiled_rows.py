"""Rows that a product leaves for the next one's tiles lie as if they had been prepared for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest

from headwise.kernels.cpu import matmul_rows
from headwise.kernels.cpu.simd import ISA
from headwise.kernels.cpu.tiles import SIDE


@pytest.fixture(scope="module")
def made_by() -> Iterator[tuple[Any, Any]]:
    """What makes a row, and what makes a panel of one, compiled once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_rows, "TILES", True)
        whole_row, panel_of = matmul_rows.tiled_row, matmul_rows.tiled_panel

        @numba.njit
        def prepared(values, factors, row, rows, words):
            whole_row(values, factors, row, rows, words, 0, words // SIDE)

        @numba.njit
        def by_panels(values, factors, row, rows, words, panel, width):
            panel_of(values, factors, row, rows, words, panel, width)

        yield prepared, by_panels


@pytest.mark.skipif(not ISA.avx512bf16, reason="this CPU does not make bfloat16 of floats")
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("depth", [32, 96, 160, 256])
@pytest.mark.parametrize("rows", [1, 16, 21])
def test_what_a_panel_makes_is_a_part_of_a_tiled_row(
    width: int, depth: int, rows: int, made_by: tuple[Any, Any]
) -> None:
    """The last panel of a row that is no whole number of panels writes nothing beyond it."""
    prepared, by_panels = made_by
    words, panels = depth // 2, -(-depth // width)
    values = np.random.default_rng(depth).standard_normal((rows, panels * width), dtype=np.float32)
    values[:, depth:] = np.nan
    expected, found = (np.zeros(rows * words + width, np.int32) for _ in range(2))
    for row in range(rows):
        prepared(values[row], expected, row, rows, words)
        for panel in range(panels):
            by_panels(values[row, panel * width : (panel + 1) * width], found, row, rows, words, panel, width)
    assert expected[: rows * words].all()
    np.testing.assert_array_equal(found, expected)
