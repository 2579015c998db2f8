"""Attention in which every token sees every other one, as towers have it: a tile of queries at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from headwise.cores import usable_cores
from headwise.runtime.ops.base import Tensor, TensorOps

_TILE_BYTES = 2 << 20
"""Of a tile's scores, float32: they stay in a core's cache."""


def dense_attention(ops: TensorOps, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``softmax(query @ key.T * scale) @ value`` of each head, of ``[T, H, D]`` each, and as ``[T, H, D]``.

    Scores and sums are float32, of what the operations' dtype is.
    """
    given = [ops.kernel_array(each) for each in (query, key, value)]
    q, k, v = (each.astype(np.float32, copy=False).transpose(1, 0, 2) for each in given)
    out = ops.empty_like(given[0])

    def head(index: int) -> None:
        _head(out[:, index], q[index], k[index], v[index], np.float32(scale))

    if isinstance(out, np.ndarray):
        # NumPy lets go of the interpreter, and its own threads are few: heads are computed beside one another.
        with ThreadPoolExecutor(min(usable_cores(), out.shape[1])) as threads:
            list(threads.map(head, range(out.shape[1])))
    else:
        for index in range(out.shape[1]):
            head(index)
    return ops.from_kernel_array(out)


def _head(out: Any, query: Any, key: Any, value: Any, scale: np.float32) -> None:
    tokens = len(query)
    step = max(1, _TILE_BYTES // (4 * tokens))
    query, key, value = query * scale, key.T.copy(), value.copy()
    for start in range(0, tokens, step):
        scores = query[start : start + step] @ key
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        seen = scores @ value
        seen /= scores.sum(axis=1, keepdims=True)
        out[start : start + step] = seen.astype(out.dtype, copy=False)
