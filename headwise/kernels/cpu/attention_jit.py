# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.attention`: the block walk, the softmax, and what threads do.

How `attend` works. The work is planned (`attention_plan`), and threads take its parts from a shared counter; whoever
finishes an item's last part merges them. A part walks the two spans of positions that its queries can see, with an
online softmax in base 2: queries are scaled by ``scale * log2(e)`` once.

An item of one token (decode) is bound by memory. It goes segment by segment (keys side by side in one block), whose
keys and values are read where they lie, once for up to four query heads. While one segment is computed on, the next
is prefetched: blocks lie anywhere in memory, where the processor's own prefetching cannot follow.

A tile of several tokens is bound by arithmetic. It goes by chunks of CHUNK keys, which are turned and laid out for
the products once for all rows, then by strips of STRIP rows: scores, softmax and weighted values of a strip, while
its scores are in the L1 cache.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.attention_micro import (
    COLUMNS,
    LARGEST_INT16,
    exp2,
    is_integer,
    is_quantised,
    load_query,
    load_values,
    pair_size,
    row_add,
    row_copy,
    row_exp2,
    row_max,
    row_multiply,
    row_softcap,
    row_times,
    row_to_int16,
    tile_product,
    token_pair_size,
    token_product,
    token_scores,
    turn_keys,
)
from headwise.kernels.cpu.attention_plan import (
    FIRST_ROW,
    HEAD,
    KEYS,
    PARTS,
    POSITION,
    SEQUENCE,
    SINK_END,
    TOKEN,
    TOKENS,
    WINDOW_START,
    Plan,
    make_plan,
    span_of_part,
)
from headwise.kernels.cpu.native_call import call_at
from headwise.kernels.cpu.rows import row_of
from headwise.kernels.cpu.simd import LANES
from headwise.kernels.cpu.threads import fetch_add, use_threads

CHUNK = 128
"""Keys that a tile takes at a time; a multiple of 2 * LANES."""

TURNED_STRIDE = CHUNK + LANES
"""Floats from one row of turned keys to the next: no power of two, whose rows would share cache lines' places."""

STRIP = 6
"""Rows of a tile's product: as many as their accumulators fit in registers."""

LOG2E = math.log2(math.e)

# Everything LLVM may assume of floats but for NaN and infinity: masked scores are -inf, and NaN must show.
_MATH = {"reassoc", "nsz", "arcp", "contract", "afn"}
_inlined = numba.njit(forceinline=True, fastmath=_MATH, nogil=True, error_model="numpy")
_compiled = numba.njit(fastmath=_MATH, nogil=True, error_model="numpy")
_pasted = numba.njit(inline="always", fastmath=_MATH, nogil=True, error_model="numpy")

_score_6_wide, _score_6_narrow = (tile_product(6, columns, is_new=True) for columns in (COLUMNS, 1))
_score_3_wide, _score_3_narrow = (tile_product(3, columns, is_new=True) for columns in (COLUMNS, 1))
_mix_6_wide, _mix_6_narrow = (tile_product(6, columns, is_new=False) for columns in (COLUMNS, 1))
_mix_3_wide, _mix_3_narrow = (tile_product(3, columns, is_new=False) for columns in (COLUMNS, 1))
_mix_token_1_wide, _mix_token_1_narrow = token_product(1, COLUMNS), token_product(1, 1)
_mix_token_2_wide, _mix_token_2_narrow = token_product(2, COLUMNS), token_product(2, 1)
_mix_token_3_wide, _mix_token_3_narrow = token_product(3, COLUMNS), token_product(3, 1)
_mix_token_4_wide, _mix_token_4_narrow = token_product(4, COLUMNS), token_product(4, 1)
_score_token_1, _score_token_2, _score_token_3, _score_token_4 = (token_scores(rows) for rows in (1, 2, 3, 4))
_load_token_query, _load_tile_query = load_query(is_tile=False), load_query(is_tile=True)
_token_exp2, _tile_exp2 = row_exp2(is_tile=False), row_exp2(is_tile=True)

# --- what the stages pass on --------------------------------------------------------------------------------------


class Step(NamedTuple):
    """All that stays the same during one call.

    query:   ``float32 [tokens, q_heads, dim]``, rows contiguous
    kv:      the arena as what it stores: ``float32``, ``uint16`` (bits of bfloat16) or ``int8``
    scales:  the arena as ``float32``
    strides: of `headwise.kernels.cpu.attention.strides_of`
    tables:  ``int32 [batch * groups, max_blocks]``
    factor:  of queries
    share:   query heads per KV head
    """

    query: Any
    kv: Any
    scales: Any
    strides: Any
    tables: Any
    groups: Any
    head_group: Any
    head_slot: Any
    head_window: Any
    head_sink: Any
    factor: Any
    softcap: Any
    share: Any
    dim: Any


BLOCK_STRIDE, SLOT_STRIDE, VALUE_OFFSET, BLOCK_SIZE, BLOCK_SCALES, SLOT_SCALES, KEY_SCALES, VALUE_SCALES = range(8)
"""Strides: from block to block, slot to slot, keys to values, in elements; tokens of a block; then from block to block
and slot to slot, and of the scales of keys and values within a slot, in floats."""


class _Scratch(NamedTuple):
    """A thread's own, flat.

    q:         queries ``[rows, dim]``
    s:         scores ``[rows of a token or strip, KEYS or CHUNK]``
    turned:    keys ``[dim, TURNED_STRIDE]``
    values:    ``[CHUNK, dim]``
    scales:    of keys and values ``[2, CHUNK]``
    q_scales:  of one token's queries that became integers ``[share]``
    p_scales:  of its probabilities
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
    """A softmax under way: each row's maximum and sum so far, and weighted values ``acc [rows, dim]``."""

    top: Any
    total: Any
    acc: Any


# --- products -----------------------------------------------------------------------------------------------------


@_compiled
def _score_strip(kv, q, qo, words, turned, s, rows, width):
    """``s [STRIP, CHUNK] = q [rows, words] @ turned [words, width]``."""
    wide, column = COLUMNS * LANES, 0
    while width - column >= wide:
        if rows > 3:
            _score_6_wide(kv, q, qo, words, turned, column, TURNED_STRIDE, s, column, CHUNK, words)
        else:
            _score_3_wide(kv, q, qo, words, turned, column, TURNED_STRIDE, s, column, CHUNK, words)
        column += wide
    while column < width:
        if rows > 3:
            _score_6_narrow(kv, q, qo, words, turned, column, TURNED_STRIDE, s, column, CHUNK, words)
        else:
            _score_3_narrow(kv, q, qo, words, turned, column, TURNED_STRIDE, s, column, CHUNK, words)
        column += LANES


@_compiled
def _mix_strip(kv, s, values, acc, ao, dim, rows, count):
    """``acc [rows, dim] += s [rows, count] @ values [count, dim]``."""
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
def _score_token(kv, keys_at, q, s, dim, rows, count, ahead):
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
def _mix_token(kv, values_at, s, factors, acc, dim, rows, count, ahead):
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


# --- softmax ------------------------------------------------------------------------------------------------------


@_inlined
def _mask_row(s, at, first, count, width, position, window, sink):
    """Set to -inf what the query at ``position`` does not see of the keys ``[first, first + count)``."""
    for i in range(count, width):
        s[at + i] = -np.inf
    if first + count - 1 <= position and (window == 0 or position - first < window or first + count <= sink):
        return
    for i in range(count):
        k = first + i
        if k > position or (window > 0 and position - k >= window and k >= sink):
            s[at + i] = -np.inf


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
def _attend_segment(step, item, scratch, softmax, keys_at, scales_at, first, count, ahead):
    """Take ``count`` keys of one block, the first at position ``first``, into the softmax of one token's rows."""
    kv, s, scales, factors, dim = step.kv, scratch.s, scratch.scales, scratch.p_scales, step.dim
    window, sink = step.head_window[item[HEAD]], step.head_sink[item[HEAD]]
    width = -(-count // LANES) * LANES
    _score_token(kv, keys_at, scratch.q, s, dim, step.share, count, ahead)
    unit = np.float32(1.0)  # that integers stand for
    if is_quantised(kv):
        _load_scales(step, scratch, scales_at, 0, count, width)
        unit = row_max(scales, CHUNK, width) / np.float32(LARGEST_INT16)
    for row in range(step.share):
        at = row * KEYS
        if is_quantised(kv):
            row_multiply(s, at, width, scales, 0, scratch.q_scales[row])
        if step.softcap > 0:
            row_softcap(s, at, width, step.softcap * LOG2E)
        _mask_row(s, at, first, count, width, item[POSITION], window, sink)
        factors[row] = row_max(s, at, width)
    for row in range(step.share):  # a loop of its own: what the first one's rows wait for goes side by side
        at, highest = row * KEYS, factors[row]
        shift = _raise_top(softmax, row, dim, highest)
        if is_integer(kv):  # of the largest here, however small it is beside those before
            own = highest if highest > -np.inf else shift
            weight = exp2(own - shift)
            softmax.total[row] += weight * _token_exp2(kv, s, at, width, own, scales, CHUNK, np.float32(1.0) / unit)
            factors[row] = weight * unit
        else:
            softmax.total[row] += _token_exp2(kv, s, at, width, shift, scales, CHUNK, unit)
    _mix_token(kv, keys_at + step.strides[VALUE_OFFSET], s, factors, softmax.acc, dim, step.share, count, ahead)


@_pasted
def _attend_chunk(step, item, scratch, softmax, first, count):
    """Take the ``count`` keys of `_Scratch.addresses`, the first at position ``first``, into the softmax of a tile."""
    kv, s, scales, dim, share = step.kv, scratch.s, scratch.scales, step.dim, step.share
    window, sink = step.head_window[item[HEAD]], step.head_sink[item[HEAD]]
    words, rows = dim // pair_size(kv), item[TOKENS] * share
    for strip in range(0, rows, STRIP):
        some = min(STRIP, rows - strip)
        seen = min(count, item[POSITION] + (strip + some - 1) // share + 1 - first)
        if seen <= 0:
            continue
        width = -(-seen // (2 * LANES)) * (2 * LANES)
        _score_strip(kv, scratch.q, strip * words, words, scratch.turned, s, some, width)
        for row in range(strip, strip + some):
            at = (row - strip) * CHUNK
            if is_quantised(kv):
                row_multiply(s, at, width, scales, 0, np.float32(1.0))
            if step.softcap > 0:
                row_softcap(s, at, width, step.softcap * LOG2E)
            _mask_row(s, at, first, seen, width, item[POSITION] + row // share, window, sink)
            shift = _raise_top(softmax, row, dim, row_max(s, at, width))
            softmax.total[row] += _tile_exp2(kv, s, at, width, shift, scales, CHUNK, np.float32(1.0))
        _mix_strip(kv, s, scratch.values, softmax.acc, strip * dim, dim, some, -(-seen // pair_size(kv)))


# --- one part -----------------------------------------------------------------------------------------------------


@_compiled
def _load_queries(step, item, scratch):
    head, dim, kv, q = item[HEAD] * step.share, step.dim, step.kv, scratch.q
    if item[TOKENS] == 1:
        words = dim // token_pair_size(kv)
        for h in range(step.share):
            if is_integer(kv):
                _load_token_query(kv, row_of(step.query, item[TOKEN], head + h), step.factor, scratch.s, 0, dim)
                scratch.q_scales[h] = row_to_int16(scratch.s, 0, dim)
                row_copy(scratch.s, 0, q, h * words, words)
            else:
                _load_token_query(kv, row_of(step.query, item[TOKEN], head + h), step.factor, q, h * words, dim)
                scratch.q_scales[h] = 1.0
        return
    words = dim // pair_size(kv)
    for token in range(item[TOKENS]):
        for h in range(step.share):
            row, query = token * step.share + h, row_of(step.query, item[TOKEN] + token, head + h)
            _load_tile_query(kv, query, step.factor, q, row * words, dim)


@_inlined
def _block_of(step, item, position):
    row = item[SEQUENCE] * step.groups + step.head_group[item[HEAD]]
    return np.int64(step.tables[row, position // step.strides[BLOCK_SIZE]])


@_inlined
def _address(step, item, block, position):
    """Where the key at ``position`` lies in the arena, in elements."""
    strides, slot = step.strides, np.int64(step.head_slot[item[HEAD]])
    return block * strides[BLOCK_STRIDE] + slot * strides[SLOT_STRIDE] + position % strides[BLOCK_SIZE] * step.dim


@_inlined
def _scale_address(step, item, block, position):
    """Where the scale of the key at ``position`` lies in the arena, in floats."""
    strides, slot = step.strides, np.int64(step.head_slot[item[HEAD]])
    within = slot * strides[SLOT_SCALES] + strides[KEY_SCALES] + position % strides[BLOCK_SIZE]
    return block * strides[BLOCK_SCALES] + within


@_inlined
def _load_scales(step, scratch, scales_at, at, count, width):
    """Scales of ``count`` keys and values to ``at``; zeros behind them until ``width``: what lies there may be NaN."""
    values = step.strides[VALUE_SCALES] - step.strides[KEY_SCALES]
    row_copy(step.scales, scales_at, scratch.scales, at, count)
    row_copy(step.scales, scales_at + values, scratch.scales, CHUNK + at, count)
    for i in range(at + count, width):
        scratch.scales[i] = scratch.scales[CHUNK + i] = 0.0


@_pasted
def _walk_token(step, item, scratch, softmax, first, last):
    """Attend to the positions ``[first, last)``, stepping over blocks that are not mapped."""
    block_size = step.strides[BLOCK_SIZE]
    while first < last:
        in_block = first % block_size
        count = min(last - first, block_size - in_block, KEYS - in_block % KEYS)
        block = _block_of(step, item, first)
        if block >= 0:
            keys_at, ahead = _address(step, item, block, first), 0
            if first + count < last:
                following = max(_block_of(step, item, first + count), 0)
                ahead = _address(step, item, following, first + count) - keys_at
            scales_at = _scale_address(step, item, block, first)
            _attend_segment(step, item, scratch, softmax, keys_at, scales_at, first, count, ahead)
        first += count


@_pasted
def _walk_tile(step, item, scratch, softmax, first, last):
    """The same for a tile, chunk by chunk."""
    block_size, addresses = step.strides[BLOCK_SIZE], scratch.addresses
    while first < last:
        count, chunk = 0, min(last - first, CHUNK)
        while count < chunk:
            position = first + count
            block = _block_of(step, item, position)
            if block < 0:
                break
            some = min(chunk - count, block_size - position % block_size)
            address = _address(step, item, block, position)
            for i in range(some):
                addresses[count + i] = address + i * step.dim
            if is_quantised(step.kv):
                _load_scales(step, scratch, _scale_address(step, item, block, position), count, some, CHUNK)
            count += some
        if count > 0:
            _lay_out(step, scratch, count)
            _attend_chunk(step, item, scratch, softmax, first, count)
            first += count
        else:
            first += block_size - first % block_size


@_compiled
def _lay_out(step, scratch, count):
    """Keys and values of the chunk's addresses, as its products take them. The last key fills the last vectors."""
    addresses, dim = scratch.addresses, step.dim
    for i in range(count, CHUNK):
        addresses[i] = addresses[count - 1]
    for i in range(0, -(-count // (2 * LANES)) * (2 * LANES), LANES):
        turn_keys(step.kv, addresses, i, dim, scratch.turned, TURNED_STRIDE)
    for i in range(CHUNK):
        addresses[i] += step.strides[VALUE_OFFSET]
    for i in range(0, count, 2):
        load_values(step.kv, addresses, i, dim, scratch.values)


@_pasted
def _walk(step, item, part, scratch, softmax):
    """Attend to the part's share of the item's two spans."""
    begin, end = span_of_part(item, part)
    shift = item[WINDOW_START] - item[SINK_END]
    for span in range(2):
        if span == 0:
            first, last = begin, min(end, item[SINK_END])
        else:
            first, last = max(begin, item[SINK_END]) + shift, end + shift
        if item[TOKENS] == 1:
            _walk_token(step, item, scratch, softmax, first, last)
        else:
            _walk_tile(step, item, scratch, softmax, first, last)


@_compiled
def _store(step, item, softmax, first, out):
    """Write the item's output, from the softmax's rows ``first`` on; zeros where nothing was seen."""
    head, dim = item[HEAD] * step.share, step.dim
    for token in range(item[TOKENS]):
        for h in range(step.share):
            row = first + token * step.share + h
            inverse = np.float32(0.0)
            if softmax.total[row] != 0.0:
                inverse = np.float32(1.0) / softmax.total[row]
            row_times(softmax.acc, row * dim, row_of(out, item[TOKEN] + token, head + h), 0, dim, inverse)


@_compiled
def _merge(step, item, partials):
    """Merge the partial results of all parts of an item into its first one."""
    top, total, acc = partials
    dim, rows, into = step.dim, item[TOKENS] * step.share, item[FIRST_ROW]
    for part in range(1, item[PARTS]):
        for row in range(rows):
            a, b = into + row, into + part * rows + row
            if total[b] == 0.0:
                continue
            highest = max(top[a], top[b])
            keep, take = exp2(top[a] - highest), exp2(top[b] - highest)
            top[a] = highest
            total[a] = total[a] * keep + total[b] * take
            row_times(acc, a * dim, acc, a * dim, dim, keep)
            row_add(acc, b * dim, acc, a * dim, dim, take)


# --- threads ------------------------------------------------------------------------------------------------------

TAKEN, FINISHED, FIRST_ITEM = range(3)
"""Counters: parts taken, parts finished (with their merging), then parts finished of each item."""


@_compiled
def new_counters(plan):
    """Counters of a `work` that has not begun, ``int64``."""
    return np.zeros(FIRST_ITEM + len(plan.items), np.int64)


@_compiled
def new_partials(plan, dim):
    """Room for the partial results of a plan. It is of no use to anyone once all parts are finished."""
    rows = plan.partial_rows
    return Softmax(np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty(rows * dim, np.float32))


@_compiled
def new_scratch(plan, share, dim):
    """What one thread works with, ``(floats, int64)``."""
    rows, tile = -(-plan.rows // STRIP) * STRIP, 1 if plan.is_tiled else 0
    floats = rows * (2 * dim + 2) + _score_floats(share, dim) + 2 * CHUNK + 2 * share
    floats += tile * (max(dim, 2 * LANES) * TURNED_STRIDE + CHUNK * dim)
    return np.empty(floats, np.float32), np.empty(CHUNK, np.int64)


@_inlined
def _score_floats(share, dim):
    return max(STRIP * CHUNK, share * KEYS, dim)  # dim: a query on its way to integers


@_inlined
def _divide(plan, share, dim, floats, addresses):
    """A thread's scratch and its softmax."""
    rows = -(-plan.rows // STRIP) * STRIP
    q, rest = floats[: rows * dim], floats[rows * dim :]
    scores = _score_floats(share, dim)
    s, rest = rest[:scores], rest[scores:]
    scales, rest = rest[: 2 * CHUNK], rest[2 * CHUNK :]
    q_scales, p_scales, rest = rest[:share], rest[share : 2 * share], rest[2 * share :]
    top, total, rest = rest[:rows], rest[rows : 2 * rows], rest[2 * rows :]
    acc, rest = rest[: rows * dim], rest[rows * dim :]
    turned = max(dim, 2 * LANES) * TURNED_STRIDE
    scratch = _Scratch(q, s, rest[:turned], rest[turned:], scales, q_scales, p_scales, addresses)
    return scratch, Softmax(top, total, acc)


@machine_code.entry(nogil=True, fastmath=_MATH, error_model="numpy")
def work(step, plan, partials, scratch, counters, out):
    """One thread's share of a plan: take parts until none is left. Any number of threads may do so at once.

    All is done when ``counters[FINISHED]`` is the number of parts: whoever needs the results of parts that others
    took may wait for that, as they were taken by threads that run.
    """
    step, plan, partials = Step(*step), Plan(*plan), Softmax(*partials)
    dim = step.dim
    scratch, own = _divide(plan, step.share, dim, scratch[0], scratch[1])
    while True:
        taken = fetch_add(counters, TAKEN)
        if taken >= len(plan.parts):
            return
        index, part = plan.parts[len(plan.parts) - 1 - taken]
        item = plan.items[index]
        rows = item[TOKENS] * step.share
        _load_queries(step, item, scratch)
        own.top[:rows], own.total[:rows], own.acc[: rows * dim] = -np.inf, 0.0, 0.0
        _walk(step, item, part, scratch, own)
        if item[PARTS] == 1:
            _store(step, item, own, 0, out)
        else:
            at = item[FIRST_ROW] + part * rows
            row_copy(own.top, 0, partials.top, at, rows)
            row_copy(own.total, 0, partials.total, at, rows)
            row_copy(own.acc, 0, partials.acc, at * dim, rows * dim)
            if fetch_add(counters, FIRST_ITEM + index) == item[PARTS] - 1:
                _merge(step, item, partials)
                _store(step, item, partials, item[FIRST_ROW], out)
        fetch_add(counters, FINISHED)


# --- entry point --------------------------------------------------------------------------------------------------


@machine_code.entry(parallel=True, nogil=True, fastmath=_MATH, error_model="numpy")
def attend(
    work_at, query, kv, scales, strides, cu, lens, tables, groups, head_group, head_slot, head_window, head_sink,
    scale, softcap, threads, out,
):  # fmt: skip
    """`AttentionKernels.attend` with at most ``threads`` threads; ``kv``, ``scales`` and ``strides`` as in `Step`.

    ``work_at`` is the address of `work` for this ``kv``.
    """
    share, dim = query.shape[1] // len(head_group), query.shape[2]
    if query.shape != out.shape or cu[len(lens)] > len(query) or share * len(head_group) != query.shape[1]:
        raise ValueError("query, out, cu_seqlens_q and the number of KV heads do not fit each other")
    if query.size > 0 and query.strides[2] != query.itemsize:
        raise ValueError("the query's rows must be contiguous")
    if strides[VALUE_OFFSET] < strides[BLOCK_SIZE] * dim:
        raise ValueError("the query's head_dim is larger than that of the block layout")
    plan = make_plan(cu, lens, head_window, head_sink, share, dim, threads)
    if len(plan.items) == 0:
        return
    partials, counters = new_partials(plan, dim), new_counters(plan)
    factor = np.float32(2.0 * scale * LOG2E / softcap) if softcap > 0 else np.float32(scale * LOG2E)
    # Numba's parallel loops take plain tuples only; `work` gives the fields their names.
    step = (
        query, kv, scales, strides, tables, groups, head_group, head_slot, head_window, head_sink, factor, softcap,
        share, dim,
    )  # fmt: skip
    rows = (partials.top, partials.total, partials.acc)
    what = (plan.items, plan.parts, plan.rows, plan.is_tiled, plan.partial_rows, plan.workers)
    before = use_threads(plan.workers)
    for _ in numba.prange(plan.workers):
        call_at(work_at, (step, what, rows, new_scratch(Plan(*what), share, dim), counters, out))
    use_threads(before)


def read_only(dtype: Any, dims: int, layout: str = "C") -> Any:
    """An array that compiled code does not write to: read-only ones may be given, too."""
    return types.Array(dtype, dims, layout, readonly=True)


INTS = read_only(types.int32, 1)
STRIDES = read_only(types.int64, 1)
BATCH = (INTS, INTS, read_only(types.int32, 2), types.int64)
"""Types of ``cu_seqlens_q``, ``seq_lens``, ``block_tables`` and ``groups``."""


def work_signature(kv: Any) -> Any:
    """The types of `work` for a cache of that dtype."""
    number, rows = types.int64, types.int64[:, ::1]
    step = (
        read_only(types.float32, 3, "A"), read_only(kv, 1), read_only(types.float32, 1), STRIDES, *BATCH[2:], INTS,
        INTS, INTS, INTS, types.float32, types.float32, number, number,
    )  # fmt: skip
    plan = (rows, rows, number, types.boolean, number, number)
    flat = types.float32[::1]
    scratch = (flat, types.int64[::1])
    return types.void(*map(types.Tuple, (step, plan, (flat,) * 3, scratch)), types.int64[::1], types.float32[:, :, ::1])


def attend_signature(kv: Any) -> Any:
    """The types of `attend` for a cache of that dtype."""
    return types.void(
        types.int64, read_only(types.float32, 3, "A"), read_only(kv, 1), read_only(types.float32, 1), STRIDES, *BATCH,
        INTS, INTS, INTS, INTS, types.float32, types.float32, types.int64, types.float32[:, :, ::1],
    )  # fmt: skip
