# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.dsa_attention`: what an indexer's heads say of keys in the cache."""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
from numba import types

from headwise.kernels.cpu.attention_micro import (
    is_quantised,
    is_tiled,
    load_query,
    pair_size,
    stored_unit,
    strip_size,
    turn_keys,
)
from headwise.kernels.cpu.attention_products import CHUNK, MATH, STRIP_ROOM, TURNED_STRIDE, score_strip
from headwise.kernels.cpu.machine_code import callable_from_python
from headwise.kernels.cpu.rows import row_of
from headwise.kernels.cpu.simd import LANES
from headwise.kernels.cpu.tiles import SIDE, configure, release

_compiled = numba.njit(fastmath=MATH, nogil=True, error_model="numpy")
_load_query = load_query(is_tile=True)


@_compiled
def _lay_out(kv, table, size, block_stride, keys_at, dim, first, count, addresses, turned):
    """The keys at positions ``first .. first + count - 1`` in columns; how many of their blocks are mapped."""
    known, mapped = np.int64(-1), 0
    for i in range(count):
        block = np.int64(table[(first + i) // size])
        addresses[i] = -1
        if block >= 0:
            addresses[i] = known = block * block_stride + keys_at + (first + i) % size * dim
            mapped += 1
    if mapped == 0:
        return 0
    columns = -(-count // (2 * LANES)) * (2 * LANES)
    places = np.full(columns, known, np.int64)  # columns of nobody hold some key
    for i in range(count):
        if addresses[i] >= 0:
            places[i] = addresses[i]
    for i in range(0, columns, LANES):
        turn_keys(kv, places, i, dim, turned, TURNED_STRIDE)
    return mapped


@_compiled
def _scores_of_row(kv, query, weights, row, q, turned, s, total, count):
    """``total [count]``: the weighted sum of what is positive of a row's heads' products with the keys laid out."""
    heads, dim = query.shape[1], query.shape[2]
    words = dim // pair_size(kv)
    for head in range(heads):
        _load_query(kv, row_of(query, row, head), np.float32(1), q, head * words, dim)
    total[:] = 0
    for first in range(0, heads, strip_size(kv)):
        some = min(strip_size(kv), heads - first)
        score_strip(kv, q, first * words, words, turned, s, some, count)
        for head in range(some):
            weight, at = weights[row, first + head], head * CHUNK
            for i in range(CHUNK):
                score = s[at + i]
                if score < 0:  # not of NaN, which must show
                    score = np.float32(0)
                total[i] += weight * score


@cache
def score_chunks(stored):
    """The compiled function below, of keys that are stored in this dtype."""
    integer, number = types.int64, types.float32
    arguments = (
        integer, integer, number[:, :, ::1], number[:, ::1], numba.from_dtype(np.dtype(stored))[::1],
        types.int32[::1], *[integer] * 3, number[::1], *[integer] * 5, number[:, ::1],
    )  # fmt: skip
    return callable_from_python(_score_chunks, arguments, fastmath=MATH, nogil=True, error_model="numpy")


def _score_chunks(
    begin, end, query, weights, kv, table, size, block_stride, keys_at, scales, block_scales, scales_at, start, window,
    sink, out,
):  # fmt: skip
    """Scores of the chunks of keys ``begin .. end - 1`` of a sequence, for queries at the positions from ``start`` on.

    ``out [queries, keys]`` is minus infinity where a key is not visible to a query, or not mapped.
    """
    rows, heads, dim = query.shape
    if is_tiled(kv):
        configure(SIDE)
    addresses, s = np.empty(CHUNK, np.int64), np.zeros(STRIP_ROOM * CHUNK, np.float32)
    turned = np.empty(max(dim, 2 * LANES) * TURNED_STRIDE, np.float32)
    q, total = np.zeros((heads + STRIP_ROOM) * dim, np.float32), np.empty(CHUNK, np.float32)
    for chunk in range(begin, end):
        first = chunk * CHUNK
        count = min(CHUNK, out.shape[1] - first)
        mapped = _lay_out(kv, table, size, block_stride, keys_at, dim, first, count, addresses, turned)
        for row in range(rows):
            position = start + row
            if mapped > 0 and first <= position:
                _scores_of_row(kv, query, weights, row, q, turned, s, total, count)
                if is_quantised(kv):  # scales are positive: what is positive of a product stays so
                    for i in range(count):
                        if addresses[i] >= 0:
                            block = np.int64(table[(first + i) // size])
                            at = block * block_scales + scales_at + (first + i) % size
                            total[i] *= stored_unit(kv) * scales[at]
            for i in range(count):
                key = first + i
                is_seen = window == 0 or position - key < window or key < sink
                if mapped > 0 and key <= position and is_seen and addresses[i] >= 0:
                    out[row, key] = total[i]
                else:
                    out[row, key] = -np.inf
    if is_tiled(kv):
        release()
