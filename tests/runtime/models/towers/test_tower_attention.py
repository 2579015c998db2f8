"""Attention of towers by tiles, and the order of patches in windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.runtime.models.towers import dense_attention as attention
from headwise.runtime.models.towers.patch_order import PatchOrder
from headwise.runtime.ops.select import make_ops

WINDOWS = [(), ((3, 8), (2, 4), (1, 6)), ((1, 38),), ((38, 1),)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("tile", [1, 4 * 8 * 8, 4 * 38 * 5, 1 << 20])
def test_tokens_see_those_of_their_window_however_tiles_are_cut(
    windows: attention.Windows, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_TILE_BYTES", tile)
    draw = np.random.default_rng(0)
    query, key, value = (draw.standard_normal((38, 2, 4)).astype(np.float32) for _ in range(3))
    found = attention.dense_attention(make_ops("numpy", 1, "float32", "float32"), query, key, value, 0.5, windows)
    lengths = [length for count, length in windows or ((1, 38),) for _ in range(count)]
    window_of = np.repeat(np.arange(len(lengths)), lengths)
    scores = np.einsum("qhd,khd->hqk", query, key) * 0.5
    scores[:, window_of[:, None] != window_of[None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("hqk,khd->qhd", weights, value), atol=2e-6)


@given(high=st.integers(1, 9), wide=st.integers(1, 9), merge=st.integers(1, 3), window=st.integers(0, 5))
def test_every_patch_has_its_place_with_its_square_and_its_window(
    high: int, wide: int, merge: int, window: int
) -> None:
    order = PatchOrder.of(high * merge, wide * merge, merge, window)
    assert sorted(order.squares.tolist()) == list(range(high * wide))
    rows, columns = (each.reshape(high * wide, merge**2) for each in (order.rows, order.columns))
    np.testing.assert_array_equal(rows // merge * wide + columns // merge, order.squares[:, None].repeat(merge**2, 1))
    inside = rows % merge * merge + columns % merge
    np.testing.assert_array_equal(inside, np.arange(merge**2)[None].repeat(high * wide, 0))
    if not window:
        assert order.windows == []
        np.testing.assert_array_equal(order.squares, np.arange(high * wide))
        return
    lengths = [length for count, length in order.windows for _ in range(count)]
    assert sum(lengths) == high * wide * merge**2
    assert len(order.windows) <= 4
    ends = np.cumsum(lengths) // merge**2
    row, column = np.divmod(order.squares, wide)
    seen = {
        tuple({*zip(row[start:end] // window, column[start:end] // window, strict=True)})
        for start, end in zip([0, *ends], ends, strict=False)
    }
    assert all(len(windows) == 1 for windows in seen)
    assert len(seen) == len(lengths) == -(-high // window) * -(-wide // window)
