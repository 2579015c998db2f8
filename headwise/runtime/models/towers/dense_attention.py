"""Attention in which every token sees every other one, or those of its window, as towers have it: a tile of queries at
a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from headwise.cores import usable_cores
from headwise.runtime.ops.base import Tensor, TensorOps

Windows = Sequence[tuple[int, int]]
"""How many windows follow each other, and of how many tokens each, and how many behind these. Together all tokens."""
_TILE_BYTES, _DEVICE_TILE_BYTES = 2 << 20, 256 << 20
"""Of a tile's scores, float32: on a CPU they stay in a core's cache, on a GPU there are few enough to be launched."""


def dense_attention(
    ops: TensorOps, query: Tensor, key: Tensor, value: Tensor, scale: float, windows: Windows = ()
) -> Tensor:
    """``softmax(query @ key.T * scale) @ value`` of each head, of ``[T, H, D]`` each, and as ``[T, H, D]``.

    windows: whose tokens see one another only; empty: all see all

    Scores and sums are float32, of what the operations' dtype is.
    """
    given = [ops.kernel_array(each) for each in (query, key, value)]
    q, k, v = (each.astype(np.float32, copy=False).transpose(1, 0, 2) for each in given)
    out = ops.empty_like(given[0])
    windows = windows or ((1, len(out)),)

    def head(index: int) -> None:
        start = 0
        for count, length in windows:
            stop = start + count * length
            parts = [each[start:stop] for each in (out[:, index], q[index], k[index], v[index])]
            _of_windows([part.reshape(count, length, -1) for part in parts], np.float32(scale))
            start = stop

    if isinstance(out, np.ndarray):
        # NumPy lets go of the interpreter, and its own threads are few: heads are computed beside one another.
        with ThreadPoolExecutor(min(usable_cores(), out.shape[1])) as threads:
            list(threads.map(head, range(out.shape[1])))
    else:
        _of_all_heads(out, (q, k, v), windows, np.float32(scale))
    return ops.from_kernel_array(out)


def _of_all_heads(out: Any, given: Sequence[Any], windows: Windows, scale: np.float32) -> None:
    """Of queries, keys and values ``[H, T, D]``, together: as if each head had windows of its own."""
    start = 0
    for count, length in windows:
        stop, (heads, _, size) = start + count * length, given[0].shape
        parts = [each[:, start:stop].reshape(heads * count, length, size) for each in given]
        seen = parts[0].copy()
        _of_windows([seen, *parts], scale, _DEVICE_TILE_BYTES)
        found = seen.reshape(heads, stop - start, size).transpose(1, 0, 2)
        out[start:stop] = found.astype(out.dtype, copy=False)
        start = stop


def _of_windows(parts: list[Any], scale: np.float32, tile_bytes: int = _TILE_BYTES) -> None:
    """Of windows of one length, some of them at a time, or a part of one.

    parts: what is written to, queries, keys and values, ``[count, length, D]`` each
    """
    out, query, key, value = parts
    count, length, _ = query.shape
    rows = max(1, tile_bytes // (4 * length))
    many = max(1, rows // length)
    query, key, value = query * scale, key.swapaxes(1, 2).copy(), value.copy()
    for first in range(0, count, many):
        these = slice(first, first + many)
        for start in range(0, length, rows):
            scores = query[these, start : start + rows] @ key[these]
            scores -= scores.max(axis=2, keepdims=True)
            np.exp(scores, out=scores)
            seen = scores @ value[these]
            seen /= scores.sum(axis=2, keepdims=True)
            out[these, start : start + rows] = seen.astype(out.dtype, copy=False)
