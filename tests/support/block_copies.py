"""Arenas of random bytes, and any copies between two of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

SOURCE_BLOCKS, TARGET_BLOCKS, GROUPS = 21, 19, 3


def some_bytes(count: int, seed: int = 0, offset: int = 0) -> np.ndarray:
    """Random bytes that begin ``offset`` bytes behind a multiple of 16."""
    array = np.empty(count + 16 + offset, np.uint8)
    array = array[-array.ctypes.data % 16 + offset :][:count]
    array[:] = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return array


def int32(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray]:
    """(block bytes, ranges, pairs): any ranges, target blocks once each, often side by side in both arenas."""
    block_bytes = draw(st.sampled_from([1, 63, 64, 200, 256, 1000, 1024, 2048, 4096, 4112, 10_000]))
    bounds = st.one_of(
        st.just((0, block_bytes)), st.tuples(st.integers(0, block_bytes), st.integers(0, block_bytes)).map(sorted)
    )
    ranges = np.array(draw(st.lists(bounds, min_size=GROUPS, max_size=GROUPS)), dtype=np.int64)
    if draw(st.booleans()):
        ranges = ranges // 64 * 64
    targets = draw(st.lists(st.integers(0, TARGET_BLOCKS - 1), unique=True))
    if draw(st.booleans()):
        targets.sort()
    shift = draw(st.integers(0, SOURCE_BLOCKS - TARGET_BLOCKS))
    sources = st.one_of(st.integers(0, SOURCE_BLOCKS - 1), st.none())
    pairs = []
    for target in targets:
        source = draw(sources)
        pairs.append((draw(st.integers(0, GROUPS - 1)), target + shift if source is None else source, target))
    return block_bytes, ranges, np.array(pairs, dtype=np.int32).reshape(-1, 3)
