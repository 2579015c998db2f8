# mypy: ignore-errors
"""Products of attention: some rows of queries with keys, and some rows of probabilities with values.

The rows of a tile are multiplied a strip at a time, with keys and values that were laid out for it; those of one token
with keys and values where they lie in the cache. All take arrays and offsets in elements, and as ``kv`` the cache.
Where that `is_tiled`, AMX's tiles are configured for `SIDE` rows.
"""

from __future__ import annotations

import numba

from headwise.kernels.cpu.addresses import address_in
from headwise.kernels.cpu.attention_micro import (
    COLUMNS,
    VECTOR_STRIP,
    is_tiled,
    tile_product,
    token_pair_size,
    token_product,
    token_scores,
)
from headwise.kernels.cpu.attention_plan import KEYS
from headwise.kernels.cpu.simd import ISA, LANES
from headwise.kernels.cpu.tiles import SIDE, multiply_columns

CHUNK = 128
"""Keys that a tile takes at a time; a multiple of 2 * LANES."""

TURNED_STRIDE = CHUNK + LANES
"""Floats from one row of turned keys to the next: no power of two, whose rows would share cache lines' places."""

STRIP_ROOM = 3 * VECTOR_STRIP if ISA.amx else VECTOR_STRIP
"""Rows of scores that there is room for: AMX's strips may be multiplied in vectors, too, by whole strips of these."""

# Everything LLVM may assume of floats but for NaN and infinity: masked scores are -inf, and NaN must show.
MATH = {"reassoc", "nsz", "arcp", "contract", "afn"}
_compiled = numba.njit(fastmath=MATH, nogil=True, error_model="numpy")

_score_6_wide, _score_6_narrow = (tile_product(6, columns, is_new=True) for columns in (COLUMNS, 1))
_score_3_wide, _score_3_narrow = (tile_product(3, columns, is_new=True) for columns in (COLUMNS, 1))
_mix_6_wide, _mix_6_narrow = (tile_product(6, columns, is_new=False) for columns in (COLUMNS, 1))
_mix_3_wide, _mix_3_narrow = (tile_product(3, columns, is_new=False) for columns in (COLUMNS, 1))
_mix_token_1_wide, _mix_token_1_narrow = token_product(1, COLUMNS), token_product(1, 1)
_mix_token_2_wide, _mix_token_2_narrow = token_product(2, COLUMNS), token_product(2, 1)
_mix_token_3_wide, _mix_token_3_narrow = token_product(3, COLUMNS), token_product(3, 1)
_mix_token_4_wide, _mix_token_4_narrow = token_product(4, COLUMNS), token_product(4, 1)
_score_token_1, _score_token_2, _score_token_3, _score_token_4 = (token_scores(rows) for rows in (1, 2, 3, 4))


@_compiled
def score_strip(kv, q, qo, words, turned, s, rows, width):
    """``s [rows, CHUNK] = q [rows, words] @ turned [words, width]``."""
    if is_tiled(kv) and words % SIDE == 0:
        by, sums = address_in(turned, 0), address_in(s, 0)
        multiply_columns(
            address_in(q, qo), 4 * words, by, 4 * TURNED_STRIDE, words // SIDE, sums, 4 * CHUNK, width, True
        )
        return
    for first in range(0, rows, VECTOR_STRIP):
        some = min(VECTOR_STRIP, rows - first)
        _score_rows(kv, q, qo + first * words, words, turned, s, first * CHUNK, some, width)


@_compiled
def _score_rows(kv, q, qo, words, turned, s, so, rows, width):
    wide, column = COLUMNS * LANES, 0
    while width - column >= wide:
        if rows > 3:
            _score_6_wide(kv, q, qo, words, turned, column, TURNED_STRIDE, s, so + column, CHUNK, words)
        else:
            _score_3_wide(kv, q, qo, words, turned, column, TURNED_STRIDE, s, so + column, CHUNK, words)
        column += wide
    while column < width:
        if rows > 3:
            _score_6_narrow(kv, q, qo, words, turned, column, TURNED_STRIDE, s, so + column, CHUNK, words)
        else:
            _score_3_narrow(kv, q, qo, words, turned, column, TURNED_STRIDE, s, so + column, CHUNK, words)
        column += LANES


@_compiled
def mix_strip(kv, s, values, acc, ao, dim, rows, count):
    """``acc [rows, dim] += s [rows, count] @ values [count, dim]``."""
    if is_tiled(kv):
        x, by, sums = address_in(s, 0), address_in(values, 0), address_in(acc, ao)
        multiply_columns(x, 4 * CHUNK, by, 4 * dim, -(-count // SIDE), sums, 4 * dim, dim, False)
        return
    wide, column = COLUMNS * LANES, 0
    while dim - column >= wide:
        if rows > 3:
            _mix_6_wide(kv, s, 0, CHUNK, values, column, dim, acc, ao + column, dim, count)
        else:
            _mix_3_wide(kv, s, 0, CHUNK, values, column, dim, acc, ao + column, dim, count)
        column += wide
    while column < dim:
        if rows > 3:
            _mix_6_narrow(kv, s, 0, CHUNK, values, column, dim, acc, ao + column, dim, count)
        else:
            _mix_3_narrow(kv, s, 0, CHUNK, values, column, dim, acc, ao + column, dim, count)
        column += LANES


@_compiled
def score_token(kv, keys_at, q, s, dim, rows, count, ahead):
    """``s [rows, KEYS] = q [rows, words] @ keys.T`` of ``count`` keys that lie at ``keys_at``."""
    i, words = 0, dim // token_pair_size(kv)
    while i < count:
        at, left, row = keys_at + i * dim, min(count - i, LANES), 0
        while row < rows:
            here, so = row * words, row * KEYS + i
            if rows - row >= 4:
                _score_token_4(q, here, kv, at, dim, s, so, KEYS, left, ahead)
            elif rows - row == 3:
                _score_token_3(q, here, kv, at, dim, s, so, KEYS, left, ahead)
            elif rows - row == 2:
                _score_token_2(q, here, kv, at, dim, s, so, KEYS, left, ahead)
            else:
                _score_token_1(q, here, kv, at, dim, s, so, KEYS, left, ahead)
            row += 4
        i += LANES


@_compiled
def mix_token(kv, values_at, s, factors, acc, dim, rows, count, ahead):
    """``acc [rows, dim] += s [rows, count] @ values`` that lie at ``values_at``."""
    wide, row = COLUMNS * LANES, 0
    while row < rows:
        so, column = row * KEYS, 0
        while column < dim:
            is_wide = dim - column >= wide
            b, c = values_at + column, row * dim + column
            if rows - row >= 4:
                if is_wide:
                    _mix_token_4_wide(s, so, KEYS, kv, b, dim, acc, c, dim, count, ahead, factors, row)
                else:
                    _mix_token_4_narrow(s, so, KEYS, kv, b, dim, acc, c, dim, count, ahead, factors, row)
            elif rows - row == 3:
                if is_wide:
                    _mix_token_3_wide(s, so, KEYS, kv, b, dim, acc, c, dim, count, ahead, factors, row)
                else:
                    _mix_token_3_narrow(s, so, KEYS, kv, b, dim, acc, c, dim, count, ahead, factors, row)
            elif rows - row == 2:
                if is_wide:
                    _mix_token_2_wide(s, so, KEYS, kv, b, dim, acc, c, dim, count, ahead, factors, row)
                else:
                    _mix_token_2_narrow(s, so, KEYS, kv, b, dim, acc, c, dim, count, ahead, factors, row)
            elif is_wide:
                _mix_token_1_wide(s, so, KEYS, kv, b, dim, acc, c, dim, count, ahead, factors, row)
            else:
                _mix_token_1_narrow(s, so, KEYS, kv, b, dim, acc, c, dim, count, ahead, factors, row)
            column += wide if is_wide else LANES
        row += 4
