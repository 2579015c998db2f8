# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.attention`: the block walk, the softmax, and what threads do.

How `attend` works. The work is planned (`attention_plan`), and threads take its parts from a shared counter; whoever
finishes an item's last part merges them. A part walks the two spans of positions that its queries can see, with an
online softmax in base 2: queries are scaled by ``scale * log2(e)`` once.

An item of one token (decode), or of a few, is bound by memory. It goes segment by segment (keys side by side in one
block), whose keys and values are read where they lie, once for up to four rows, the next ones from the L1 cache. While
one segment is computed on, the next is prefetched: blocks lie anywhere in memory, where the processor's own prefetching
cannot follow.

A tile of more tokens is bound by arithmetic. It goes by chunks of CHUNK keys, which are turned and laid out for
the products once for all rows, then by strips of `strip_size` rows: scores, softmax and weighted values of a strip,
while its scores are in the L1 cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import (
    array_at,
    bytes_from,
    floats_from,
    halves_from,
    int8s_from,
    ints_from,
    layer_at,
    long_matrix_at,
    longs_at,
    longs_from,
    pass_at,
    plan_at,
    shorts_from,
)
from headwise.kernels.cpu.attention_micro import (
    TILED_STRIP,
    VECTOR_STRIP,
    exp2,
    is_integer,
    is_quantised,
    is_tiled,
    load_query,
    load_values,
    pair_size,
    row_add,
    row_copy,
    row_times,
    row_to_int16,
    token_pair_size,
    turn_keys,
)
from headwise.kernels.cpu.attention_plan import FEW_ROWS, ITEM, KEYS, has_partials, keys_seen, span_of_part
from headwise.kernels.cpu.attention_products import CHUNK, MATH, STRIP_ROOM, TURNED_STRIDE
from headwise.kernels.cpu.attention_softmax import (
    LOG2E,
    Scratch,
    Softmax,
    Step,
    attend_chunk,
    attend_segment,
    behind,
    expand_keys,
    load_scales,
    values_behind,
)
from headwise.kernels.cpu.int4 import CODES, expanded_from, is_int4, scales_of_row
from headwise.kernels.cpu.matmul_rows import tiled_row
from headwise.kernels.cpu.memory import CACHE_LINE
from headwise.kernels.cpu.records import HEAD_GROUP, HEAD_SINK, HEAD_SLOT, HEAD_WINDOW, PLAN
from headwise.kernels.cpu.simd import LANES
from headwise.kernels.cpu.threads import fetch_add
from headwise.kernels.cpu.tiles import SIDE, configure, release, stay_awake

_items_at = array_at(numba.from_dtype(ITEM))
_PLAN_BYTES = PLAN.itemsize
_pasted = numba.njit(inline="always", fastmath=MATH, nogil=True, error_model="numpy")
_compiled = numba.njit(fastmath=MATH, nogil=True, error_model="numpy")
LARGEST_POWER = np.float32(126.0)
"""Of 2, that a float32 holds: a sink so much above all scores leaves nothing of their values."""

_load_token_query, _load_tile_query = load_query(is_tile=False), load_query(is_tile=True)

# --- one part -----------------------------------------------------------------------------------------------------


@_pasted
def _query_row(step, row, head):
    return floats_from(step.query + (row * step.query_row + head * step.query_head) * 4)


@_compiled
def _load_queries(step, item, scratch):
    head, dim, kv, q = item.head * step.share, step.dim, step.kv, scratch.q
    in_place = item.in_place
    words = dim // (token_pair_size(kv) if in_place else pair_size(kv))
    for token in range(item.tokens):
        for h in range(step.share):
            row, query = token * step.share + h, _query_row(step, item.token + token, head + h)
            if not in_place:
                _load_tile_query(kv, query, step.factor, q, row * words, dim)
            elif is_integer(kv):
                _load_token_query(kv, query, step.factor, scratch.s, 0, dim)
                scratch.q_scales[row] = row_to_int16(scratch.s, 0, dim)
                row_copy(scratch.s, 0, q, row * words, words)
            else:
                _load_token_query(kv, query, step.factor, q, row * words, dim)
                scratch.q_scales[row] = 1.0


@_pasted
def _block_of(step, item, position):
    row = item.sequence * step.groups + step.head_group[item.head]
    return np.int64(step.tables[row * step.table_columns + position // step.cache.block_size])


@_pasted
def _address(step, item, block, position):
    """Where the key at ``position`` lies in the arena, in elements."""
    cache, slot = step.cache, np.int64(step.head_slot[item.head])
    row = step.dim // CODES if is_int4(step.codes) else step.dim
    return block * cache.block_stride + slot * cache.slot_stride + position % cache.block_size * row


@_pasted
def _scale_address(step, item, block, position):
    """Where the scale of the key at ``position`` lies in the arena, in floats; in float16s that of its first group."""
    cache, slot = step.cache, np.int64(step.head_slot[item.head])
    scales = scales_of_row(step.dim) if is_int4(step.codes) else 1
    within = slot * cache.slot_scales + cache.key_scales + position % cache.block_size * scales
    return block * cache.block_scales + within


@_compiled
def _walk_in_place(step, item, scratch, softmax, first, last, beyond):
    """Attend to the positions ``[first, last)``, stepping over blocks that are not mapped.

    beyond: where the first key behind them lies that this thread attends to, in elements; -1: unknown
    """
    block_size = step.cache.block_size
    while first < last:
        in_block = first % block_size
        count = min(last - first, block_size - in_block, KEYS - in_block % KEYS)
        block = _block_of(step, item, first)
        if block >= 0:
            keys_at, ahead = _address(step, item, block, first), 0
            if first + count < last:
                following = max(_block_of(step, item, first + count), 0)
                ahead = _address(step, item, following, first + count) - keys_at
            elif beyond >= 0:
                ahead = beyond - keys_at
            scales_at = _scale_address(step, item, block, first)
            attend_segment(step, item, scratch, softmax, keys_at, scales_at, first, count, ahead)
        first += count


@_compiled
def _walk_tile(step, item, scratch, softmax, first, last):
    """The same for a tile, chunk by chunk."""
    block_size, addresses = step.cache.block_size, scratch.addresses
    if is_tiled(step.kv):
        configure(SIDE)
    while first < last:
        count, chunk = 0, min(last - first, CHUNK)
        while count < chunk:
            position = first + count
            block = _block_of(step, item, position)
            if block < 0:
                break
            some = min(chunk - count, block_size - position % block_size)
            address = _address(step, item, block, position)
            if is_int4(step.codes):
                expand_keys(step, address, _scale_address(step, item, block, position), position, count, some, 0)
                address = count * step.dim
            for i in range(some):
                addresses[count + i] = address + i * step.dim
            if is_quantised(step.kv):
                load_scales(step, scratch, _scale_address(step, item, block, position), count, some, CHUNK)
            count += some
        if count > 0:
            _lay_out(step, scratch, first, count)
            attend_chunk(step, item, scratch, softmax, first, count)
            first += count
        else:
            first += block_size - first % block_size


@_compiled
def _lay_out(step, scratch, first, count):
    """Keys and values of the chunk's addresses, the first at position ``first``, as its products take them. The last
    key fills the last vectors."""
    addresses, dim, value_dim = scratch.addresses, step.dim, step.value_dim
    for i in range(count, CHUNK):
        addresses[i] = addresses[count - 1]
    for i in range(0, -(-count // (2 * LANES)) * (2 * LANES), LANES):
        turn_keys(step.kv, addresses, i, dim, scratch.turned, TURNED_STRIDE)
        if is_tiled(step.kv):
            stay_awake()
    for i in range(CHUNK):
        if is_int4(step.codes):
            addresses[i] = CHUNK * dim + min(i, count - 1) * value_dim
        else:
            addresses[i] += values_behind(step, first + min(i, count - 1))
    for i in range(0, -(-count // (2 * SIDE)) * (2 * SIDE) if is_tiled(step.kv) else count, 2):
        load_values(step.kv, addresses, i, value_dim, scratch.values)
        if is_tiled(step.kv) and i % LANES == 0:
            stay_awake()


@_pasted
def _place(item, key):
    """The position of an item's ``key``-th visible key."""
    return key if key < item.sink_end else key + item.window_start - item.sink_end


@_pasted
def _first_address(step, item, part):
    """Where the first key of a part lies in the arena, in elements; somewhere in it if that is not mapped."""
    position = _place(item, min(span_of_part(item, part)[0], keys_seen(item) - 1))  # a part may be empty
    return _address(step, item, max(_block_of(step, item, position), 0), position)


@_pasted
def _walk(step, item, part, scratch, softmax, beyond):
    """Attend to the part's share of the item's two spans; ``beyond`` as in `_walk_in_place`."""
    begin, end = span_of_part(item, part)
    shift = item.window_start - item.sink_end
    for span in range(2):
        if span == 0:
            first, last = begin, min(end, item.sink_end)
        else:
            first, last = max(begin, item.sink_end) + shift, end + shift
        if item.in_place:
            _walk_in_place(step, item, scratch, softmax, first, last, beyond)
        else:
            _walk_tile(step, item, scratch, softmax, first, last)


@_compiled
def _store(step, item, softmax, first):
    """Write the item's output, from the softmax's rows ``first`` on; zeros where nothing was seen."""
    head, dim = item.head * step.share, step.value_dim
    for token in range(item.tokens):
        for h in range(step.share):
            row = first + token * step.share + h
            inverse = np.float32(0.0)
            if softmax.total[row] != 0.0:
                total = softmax.total[row]
                if step.has_sink_logits:
                    sink = step.sink_logits[head + h] * np.float32(LOG2E) - softmax.top[row]
                    total += exp2(min(sink, LARGEST_POWER))
                inverse = np.float32(1.0) / total
            place = item.token + token
            if step.lse != 0:
                lse = np.float32(-np.inf)
                if inverse != 0.0:
                    lse = softmax.top[row] + np.float32(np.log2(softmax.total[row]))
                floats_from(step.lse + (place * (step.out_row // dim) + head + h) * 4)[0] = lse
            if step.out_words > 0:
                row_times(softmax.acc, row * dim, softmax.acc, row * dim, dim, inverse)
                seen, out = behind(softmax.acc, row * dim), floats_from(step.out)
                blocks = dim // (2 * SIDE)
                tiled_row(seen, out, place, step.rows, step.out_words, (head + h) * blocks, blocks)
            else:
                out = floats_from(step.out + (place * step.out_row + (head + h) * dim) * 4)
                row_times(softmax.acc, row * dim, out, 0, dim, inverse)


@_compiled
def _merge(step, item, partials):
    """Merge the partial results of all parts of an item into its first one, or into what it was handed; the first row
    of what comes of it."""
    top, total, acc = partials
    dim, rows, into, first = step.value_dim, item.tokens * step.share, item.first_row, 1
    if item.handed >= 0:
        into, first = item.handed, 0
    for part in range(first, item.parts):
        for row in range(rows):
            a, b = into + row, item.first_row + part * rows + row
            if total[b] == 0.0:
                continue
            highest = max(top[a], top[b])
            keep, take = exp2(top[a] - highest), exp2(top[b] - highest)
            top[a] = highest
            total[a] = total[a] * keep + total[b] * take
            row_times(acc, a * dim, acc, a * dim, dim, keep)
            row_add(acc, b * dim, acc, a * dim, dim, take)
    return into


@_pasted
def _is_last_of(items, index, counters):
    """Count what an item waits for: a part of its own, or what it is handed; whether that was all of it."""
    item = items[index]
    return fetch_add(counters, FIRST_ITEM + index) == item.parts - (0 if item.handed >= 0 else 1)


@_compiled
def _finish(step, items, index, partials, counters):
    """A part of an item is among the partial results: if that was the last one, merge them, and hand on or write what
    comes of it."""
    if not _is_last_of(items, index, counters):
        return
    item = items[index]
    first = _merge(step, item, partials)
    if item.heirs == 0:
        _store(step, item, partials, first)
    for heir in range(index + 1, index + 1 + item.heirs):
        if _is_last_of(items, heir, counters):
            _store(step, items[heir], partials, _merge(step, items[heir], partials))


# --- threads ------------------------------------------------------------------------------------------------------

TAKEN, FINISHED, FIRST_ITEM = range(3)
"""Counters, int64 that are 0: parts taken, parts finished (with their merging), then of each item parts finished, and
what it goes on from."""


def scratch_floats(rows: int, is_tiled: bool, share: int, dim: int, expands: bool) -> int:
    """Floats that one thread needs, for items of at most ``rows`` rows, some of which are laid out for if ``is_tiled``.

    expands: the cache is one of four bits
    """
    few, rows = _most_in_place.py_func(rows, share), _whole_strips.py_func(rows)
    floats = 2 * CHUNK + 2 * rows * dim + _score_floats.py_func(few, dim) + _small_floats.py_func(rows, few)
    floats += expanded_floats.py_func(dim) if expands else 0
    floats += _turned_floats.py_func(dim) + CHUNK * dim if is_tiled else 0
    return -(-4 * floats // CACHE_LINE) * CACHE_LINE // 4  # the next thread's begins with a line, whatever a vector has


@_pasted
def _most_in_place(rows, share):
    """Rows of an item that is in place, where none has more than ``rows``."""
    return max(share, min(rows, FEW_ROWS))


@_pasted
def _whole_strips(rows):
    """Rows that there is room for: strips are multiplied whole, of either size."""
    return max(-(-rows // VECTOR_STRIP) * VECTOR_STRIP, -(-rows // TILED_STRIP) * TILED_STRIP)


@_pasted
def expanded_floats(dim):
    """Floats at the end of a thread's scratch for keys and values of int4, a chunk of each."""
    return 2 * CHUNK * dim


@_pasted
def _score_floats(few, dim):
    return max(STRIP_ROOM * CHUNK, few * KEYS, dim)  # dim: a query on its way to integers


@_pasted
def _small_floats(rows, few):
    """Of scales, and of a softmax but for its weighted values; all else begins where a cache line does."""
    return -(-(2 * CHUNK + 2 * rows + 2 * few) // LANES) * LANES


@_pasted
def _turned_floats(dim):
    return max(dim, 2 * LANES) * TURNED_STRIDE


@_pasted
def _divide(rows, share, dim, at):
    """A thread's scratch and its softmax, in the `scratch_floats` at an address."""
    few, rows = _most_in_place(rows, share), _whole_strips(rows)
    s_at = at + 8 * CHUNK + 4 * rows * dim
    acc_at = s_at + 4 * _score_floats(few, dim)
    scales_at = acc_at + 4 * rows * dim
    q_scales_at = scales_at + 8 * CHUNK
    top_at = q_scales_at + 8 * few
    turned_at = scales_at + 4 * _small_floats(rows, few)
    values_at = turned_at + 4 * _turned_floats(dim)
    scratch = Scratch(
        floats_from(at + 8 * CHUNK), floats_from(s_at), floats_from(turned_at), floats_from(values_at),
        floats_from(scales_at), floats_from(q_scales_at), floats_from(q_scales_at + 4 * few), longs_from(at),
    )  # fmt: skip
    softmax = Softmax(floats_from(top_at), floats_from(top_at + 4 * rows), floats_from(acc_at))
    return scratch, softmax


@_pasted
def _step_of(kv, codes, own, layer, plan):
    dim, heads = own.dim, layer.heads
    return Step(
        own.query, own.query_row, own.query_head, own.out, own.q_heads * own.value_dim, layer.out_words, own.rows, kv,
        codes, floats_from(own.cache.arena), own.cache, ints_from(own.tables), own.table_columns, own.groups,
        ints_from(heads[HEAD_GROUP, 0]), ints_from(heads[HEAD_SLOT, 0]), ints_from(heads[HEAD_WINDOW, 0]),
        ints_from(heads[HEAD_SINK, 0]), floats_from(layer.sink_logits[0]), layer.sink_logits[1] > 0, own.lse,
        plan.sees, own.factor, own.softcap, own.q_heads // own.kv_heads, dim, own.value_dim,
    )  # fmt: skip


@_pasted
def _attend(kv, codes, own, layer, counters_at, thread):
    """One thread's share of a layer's attention: take parts until none is left.

    Any number of threads may do so at once. All is done when ``counters[FINISHED]`` is the number of parts: whoever
    needs the results of parts that others took may wait for that, as they were taken by threads that run.
    """
    plan = plan_at(own.plans + layer.plan * _PLAN_BYTES)
    step = _step_of(kv, codes, own, layer, plan)
    share, dim, room = step.share, step.value_dim, own.partial_rows
    items, parts = _items_at(plan.items, plan.item_count), long_matrix_at(plan.parts, plan.part_count, 2)
    counters = longs_at(counters_at, FIRST_ITEM + plan.item_count)
    at = own.partials
    partials = Softmax(floats_from(at), floats_from(at + 4 * room), floats_from(at + 8 * room))
    scratch, softmax = _divide(plan.rows, share, step.dim, own.scratch + thread * own.scratch_floats * 4)
    taken = fetch_add(counters, TAKEN)
    while taken < plan.part_count:
        index, part = parts[plan.part_count - 1 - taken, 0], parts[plan.part_count - 1 - taken, 1]
        item, beyond = items[index], np.int64(-1)
        rows, in_place = item.tokens * share, item.in_place
        if in_place:  # bound by memory: the next one is taken beforehand, to be prefetched
            taken = fetch_add(counters, TAKEN)
            if taken < plan.part_count:
                following = plan.part_count - 1 - taken
                beyond = _first_address(step, items[parts[following, 0]], parts[following, 1])
        _load_queries(step, item, scratch)
        for row in range(rows):
            softmax.top[row], softmax.total[row] = -np.inf, 0.0
        for i in range(rows * dim):
            softmax.acc[i] = 0.0
        _walk(step, item, part, scratch, softmax, beyond)
        if has_partials(item):
            at = item.first_row + part * rows
            row_copy(softmax.top, 0, partials.top, at, rows)
            row_copy(softmax.total, 0, partials.total, at, rows)
            row_copy(softmax.acc, 0, partials.acc, at * dim, rows * dim)
            _finish(step, items, index, partials, counters)
        else:
            _store(step, item, softmax, 0)
        fetch_add(counters, FINISHED)
        if not in_place:
            taken = fetch_add(counters, TAKEN)
    if is_tiled(kv):
        release()


# --- entry points -------------------------------------------------------------------------------------------------


def _attend_float32(own, layer, counters, thread):
    own = pass_at(own)
    kv = floats_from(own.cache.arena)
    _attend(kv, kv, own, layer_at(layer), counters, thread)


def _attend_bfloat16(own, layer, counters, thread):
    own = pass_at(own)
    kv = halves_from(own.cache.arena)
    _attend(kv, kv, own, layer_at(layer), counters, thread)


def _attend_int8(own, layer, counters, thread):
    own = pass_at(own)
    kv = int8s_from(own.cache.arena)
    _attend(kv, kv, own, layer_at(layer), counters, thread)


def _attend_float8(own, layer, counters, thread):
    own = pass_at(own)
    kv = bytes_from(own.cache.arena)
    _attend(kv, kv, own, layer_at(layer), counters, thread)


def _attend_int4(own, layer, counters, thread):
    own = pass_at(own)
    behind = own.scratch + (thread + 1) * own.scratch_floats * 4
    kv, codes = expanded_from(behind - expanded_floats(own.dim) * 4), shorts_from(own.cache.arena)
    _attend(kv, codes, own, layer_at(layer), counters, thread)


_ATTENDS = {
    "float32": _attend_float32,
    "bfloat16": _attend_bfloat16,
    "int8": _attend_int8,
    "float8_e4m3fn": _attend_float8,
    "int4": _attend_int4,
}


@cache
def attend_of(kv_dtype: str) -> Any:
    """The compiled attention over a cache of that dtype, as a C function.

    Its integers are addresses of a `PASS`, a `LAYER` and counters; and which thread it runs on.
    """
    return machine_code.unit(_ATTENDS[kv_dtype], 4, fastmath=MATH, error_model="numpy")
