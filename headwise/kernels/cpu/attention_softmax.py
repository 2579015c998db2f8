# mypy: ignore-errors
"""The softmax of attention: some keys of the cache taken into that of one token's rows, or of a tile's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np

from headwise.kernels.cpu.addresses import address_in, floats_from, ints_from
from headwise.kernels.cpu.attention_micro import (
    LARGEST_INT16,
    TILED_STRIP,
    exp2,
    is_integer,
    is_quantised,
    is_tiled,
    pair_size,
    row_copy,
    row_exp2,
    row_max,
    row_multiply,
    row_softcap,
    row_times,
    stored_unit,
    strip_size,
)
from headwise.kernels.cpu.attention_plan import KEYS
from headwise.kernels.cpu.attention_products import (
    CHUNK,
    MATH,
    mix_strip,
    mix_token,
    score_strip,
    score_token,
)
from headwise.kernels.cpu.attention_strip import raise_tops, strip_powers
from headwise.kernels.cpu.int4 import CODES, expand_rows, is_int4, scales_of_row
from headwise.kernels.cpu.simd import LANES

LOG2E = math.log2(math.e)
_pasted = numba.njit(inline="always", fastmath=MATH, nogil=True, error_model="numpy")
_inlined = numba.njit(forceinline=True, fastmath=MATH, nogil=True, error_model="numpy")
_token_exp2, _tile_exp2 = row_exp2(is_tile=False), row_exp2(is_tile=True)


class Step(NamedTuple):
    """All that stays the same during one call. Pointers know no lengths.

    query:   address of ``float32 [tokens, q_heads, dim]``; ..._row, ..._head: floats from row to row, head to head
    out:     address of ``float32 [tokens, q_heads, value_dim]``, where heads lie side by side; ``out_words``: as
             `records.LAYER` has it, of ``rows``
    kv:      pointer to the arena as what it stores: ``float32``, ``uint16`` (bits of bfloat16), ``int8`` or
             ``uint8`` (E4M3); of int4 to what the thread has expanded, room for ``2 * CHUNK`` rows
    codes:   pointer to the arena, of int4 as ``int16``; else the same as ``kv``
    scales:  pointer to the arena as ``float32``
    cache:   a `records.CACHE`
    tables:  pointer to ``int32 [batch * groups, table_columns]``
    head_...: pointers to ``int32 [kv_heads]``
    sink_logits: pointer to ``float32 [q_heads]``, if there are any
    lse:     address of ``float32 [tokens, q_heads]``, or 0; see `records.PASS`
    sees:    address of ``int32 [tokens]``, or 0; see `AttentionBatch.sees`
    factor:  of queries
    share:   query heads per KV head
    """

    query: Any
    query_row: Any
    query_head: Any
    out: Any
    out_row: Any
    out_words: Any
    rows: Any
    kv: Any
    codes: Any
    scales: Any
    cache: Any
    tables: Any
    table_columns: Any
    groups: Any
    head_group: Any
    head_slot: Any
    head_window: Any
    head_sink: Any
    sink_logits: Any
    has_sink_logits: Any
    lse: Any
    sees: Any
    factor: Any
    softcap: Any
    share: Any
    dim: Any
    value_dim: Any


class Scratch(NamedTuple):
    """Pointers to a thread's own.

    q:         queries ``[rows, dim]``
    s:         scores ``[rows in place or of a strip, KEYS or CHUNK]``
    turned:    keys ``[dim, TURNED_STRIDE]``
    values:    ``[CHUNK, value_dim]``
    scales:    of keys and values ``[2, CHUNK]``
    q_scales:  of queries in place that became integers ``[rows]``
    p_scales:  of their probabilities
    addresses: of keys, then of values ``int64 [CHUNK]``
    """

    q: Any
    s: Any
    turned: Any
    values: Any
    scales: Any
    q_scales: Any
    p_scales: Any
    addresses: Any


class Softmax(NamedTuple):
    """Pointers to a softmax under way: each row's maximum and sum so far, and weighted values.

    acc: ``[rows, value_dim]``
    """

    top: Any
    total: Any
    acc: Any


@_inlined
def _mask_row(s, at, first, count, width, position, end, window, sink):
    """Set to -inf what the query at ``position``, which sees none from ``end`` on, does not see of the keys ``[first,
    first + count)``."""
    for i in range(count, width):
        s[at + i] = -np.inf
    if first + count <= end and (window == 0 or position - first < window or first + count <= sink):
        return
    for i in range(count):
        k = first + i
        if k >= end or (window > 0 and position - k >= window and k >= sink):
            s[at + i] = -np.inf


@_pasted
def _end_of(step, item, token):
    """Behind the last position that a tile's ``token`` may see."""
    if step.sees != 0:
        return np.int64(ints_from(step.sees)[item.token + token])
    return item.position + token + 1


@_inlined
def _raise_top(softmax, row, dim, highest):
    """Take a row's new maximum into its softmax; what powers of its scores are to be lowered by."""
    top, total, acc = softmax
    if highest > top[row]:
        shrink = exp2(top[row] - highest)
        total[row] *= shrink
        row_times(acc, row * dim, acc, row * dim, dim, shrink)
        top[row] = highest
    # Where nothing was seen yet, -inf must not be taken from -inf.
    return top[row] if top[row] > -np.inf else np.float32(0.0)


@_pasted
def _take_strip(kv, s, softmax, strip, some, dim, width, scratch):
    """Make probabilities of the scores ``s`` of a strip, all of whose rows are computed though only ``some`` are used.

    Shifts and shrinkage of rows lie behind the scores.
    """
    top, total = behind(softmax.top, strip), behind(softmax.total, strip)
    shifts, shrinks = behind(s, TILED_STRIP * CHUNK), behind(s, TILED_STRIP * CHUNK + TILED_STRIP)
    if raise_tops(s, CHUNK, width, top, total, shifts, shrinks):
        for row in range(some):
            if shrinks[row] != 1.0:
                at = (strip + row) * dim
                row_times(softmax.acc, at, softmax.acc, at, dim, shrinks[row])
    strip_powers(kv, s, CHUNK, width, shifts, behind(scratch.scales, CHUNK), total)


@_pasted
def behind(pointer, offset):
    return floats_from(address_in(pointer, offset))


@_pasted
def _in_block(step, position):
    return position % step.cache.block_size


@_pasted
def values_behind(step, position):
    """How far behind the key at ``position`` its value lies, in elements: rows of values may be shorter."""
    shorter = step.dim - step.value_dim
    return step.cache.value_offset - _in_block(step, position) * (shorter // CODES if is_int4(step.codes) else shorter)


@_pasted
def load_scales(step, scratch, scales_at, at, count, width):
    """Scales of ``count`` keys and values to ``at``; zeros behind them until ``width``: what lies there may be NaN."""
    values = step.cache.value_scales - step.cache.key_scales
    row_copy(step.scales, scales_at, scratch.scales, at, count)
    row_copy(step.scales, scales_at + values, scratch.scales, CHUNK + at, count)
    for i in range(at + count, width):
        scratch.scales[i] = scratch.scales[CHUNK + i] = 0.0


@_pasted
def expand_keys(step, keys_at, scales_at, first, row, count, ahead):
    """Keys and values of ``count`` tokens side by side in a block, from position ``first`` on, to `Step.kv`, from its
    ``row`` on, of values behind CHUNK keys.

    What lies ``ahead`` elements behind them is prefetched; of their scales what does, if it is in the same slot.
    """
    dim, value_dim, value_row = step.dim, step.value_dim, CHUNK * step.dim + row * step.value_dim
    scales, value_scales, values_at = scales_of_row(dim), scales_of_row(value_dim), keys_at + values_behind(step, first)
    expand_rows(step.codes, keys_at, scales_at, dim, count, step.kv, row * dim, ahead, count * scales)
    scales_at += step.cache.value_scales - step.cache.key_scales - _in_block(step, first) * (scales - value_scales)
    expand_rows(
        step.codes, values_at, scales_at, value_dim, count, step.kv, value_row, ahead, count * value_scales
    )  # fmt: skip


@_pasted
def attend_segment(step, item, scratch, softmax, keys_at, scales_at, first, count, ahead):
    """Take ``count`` keys of one block, the first at position ``first``, into the softmax of an item in place."""
    kv, s, scales, factors, dim = step.kv, scratch.s, scratch.scales, scratch.p_scales, step.dim
    value_dim = step.value_dim
    window, sink, rows = step.head_window[item.head], step.head_sink[item.head], item.tokens * step.share
    width, values_at = -(-count // LANES) * LANES, keys_at + values_behind(step, first)
    if is_int4(step.codes):
        expand_keys(step, keys_at, scales_at, first, 0, count, ahead)
        keys_at, values_at, ahead = 0, CHUNK * dim, 0
    score_token(kv, keys_at, scratch.q, s, dim, rows, count, ahead)
    unit = np.float32(1.0)  # that integers stand for
    if is_quantised(kv):
        load_scales(step, scratch, scales_at, 0, count, width)
        unit = row_max(scales, CHUNK, width) / np.float32(LARGEST_INT16)
    for row in range(rows):
        at = row * KEYS
        if is_quantised(kv):
            row_multiply(s, at, width, scales, 0, scratch.q_scales[row] * stored_unit(kv))
        if step.softcap > 0:
            row_softcap(s, at, width, step.softcap * LOG2E)
        position = item.position + row // step.share
        _mask_row(s, at, first, count, width, position, position + 1, window, sink)
        factors[row] = row_max(s, at, width)
    for row in range(rows):  # a loop of its own: what the first one's rows wait for goes side by side
        at, highest = row * KEYS, factors[row]
        shift = _raise_top(softmax, row, value_dim, highest)
        if is_integer(kv):  # of the largest here, however small it is beside those before
            own = highest if highest > -np.inf else shift
            weight = exp2(own - shift)
            softmax.total[row] += weight * _token_exp2(kv, s, at, width, own, scales, CHUNK, np.float32(1.0) / unit)
            factors[row] = weight * unit
        else:
            softmax.total[row] += _token_exp2(kv, s, at, width, shift, scales, CHUNK, unit)
    mix_token(kv, values_at, s, factors, softmax.acc, value_dim, rows, count, ahead)


@_pasted
def attend_chunk(step, item, scratch, softmax, first, count):
    """Take the ``count`` keys of `Scratch.addresses`, the first at position ``first``, into the softmax of a tile."""
    kv, s, scales, dim, share = step.kv, scratch.s, scratch.scales, step.value_dim, step.share
    window, sink = step.head_window[item.head], step.head_sink[item.head]
    words, rows = step.dim // pair_size(kv), item.tokens * share
    for strip in range(0, rows, strip_size(kv)):
        some = min(strip_size(kv), rows - strip)
        seen = min(count, _end_of(step, item, (strip + some - 1) // share) - first)
        if seen <= 0:
            continue
        width = -(-seen // (2 * LANES)) * (2 * LANES)
        score_strip(kv, scratch.q, strip * words, words, scratch.turned, s, some, width)
        for row in range(strip, strip + some):
            at = (row - strip) * CHUNK
            if is_quantised(kv):
                row_multiply(s, at, width, scales, 0, stored_unit(kv))
            if step.softcap > 0:
                row_softcap(s, at, width, step.softcap * LOG2E)
            token = row // share
            end = _end_of(step, item, token)
            _mask_row(s, at, first, seen, width, item.position + token, end, window, sink)
        if is_tiled(kv):
            _take_strip(kv, s, softmax, strip, some, dim, width, scratch)
        else:
            for row in range(strip, strip + some):
                at = (row - strip) * CHUNK
                shift = _raise_top(softmax, row, dim, row_max(s, at, width))
                softmax.total[row] += _tile_exp2(kv, s, at, width, shift, scales, CHUNK, np.float32(1.0))
        mix_strip(kv, s, scratch.values, softmax.acc, strip * dim, dim, some, -(-seen // pair_size(kv)))
