# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.attention`: SIMD micro-kernels, the block walk, the work plan.

How `attend` works. The work is cut into *items*: one (sequence, KV head, tile of queries). All query heads of the
KV head are rows of the tile, so its KV is read once for all of them. An item whose share of the work is large is
cut again along its visible keys into *parts* (flash-decoding), each with a softmax of its own; whoever finishes
an item's last part merges them. Threads take parts from a shared counter. A part walks the two spans of positions
that its queries can see, segment by segment (keys side by side in one block), with an online softmax in base 2:
queries are scaled by ``scale * log2(e)`` once. For decode, while one segment is computed on, the next is prefetched:
blocks lie anywhere in memory, where the processor's own prefetching cannot follow.

Scratch arrays are flat ``float32``; micro-kernels take an array and an offset in elements.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.simd import LANES, Emitter, bit_reversed
from headwise.kernels.cpu.threads import fetch_add, use_threads

COLUMNS = LANES // 4
"""Vectors per row in the widest `_gemm` tile: 4 rows by this many accumulators stay in registers."""

KEYS = 64
"""Keys scored at a time; a multiple of LANES."""

TILE_ROWS = 192
"""Rows (query tokens times query heads of a KV head) of a prefill tile: scratch stays within the L2 cache."""

PART_KEYS = 256
"""A part of an item has at least this many keys: fewer, and merging costs more than it saves."""

PARTS_PER_THREAD = 6
"""Parts aimed at per thread, so that no thread is left with much more than its share."""

THREAD_COST = 250_000
"""Work, in the units of `_cost`, that is worth waking a thread for (about 10 us)."""

LOG2E = math.log2(math.e)

# Everything LLVM may assume of floats but for NaN and infinity: masked scores are -inf, and NaN must show.
_MATH = {"reassoc", "nsz", "arcp", "contract", "afn"}
_inlined = numba.njit(forceinline=True, fastmath=_MATH, nogil=True, error_model="numpy")
_compiled = numba.njit(fastmath=_MATH, nogil=True, error_model="numpy")

# --- micro-kernels -----------------------------------------------------------------------------------------------


def _gemm(rows: int, columns: int, prefetch: bool = False) -> Any:
    """Make ``c[r, j] += sum_t a[r, t] * b[t, j]`` for ``rows`` rows and ``columns`` vectors of columns.

    Arguments: ``a, a_offset, a_stride, b, b_offset, b_stride, c, c_offset, c_stride, t_count, ahead``.
    With ``prefetch``, what lies ``ahead`` floats behind each vector of ``b`` is prefetched.
    """

    @intrinsic
    def gemm(typing, a, ao, lda, b, bo, ldb, c, co, ldc, count, ahead):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            a, ao, lda, b, bo, ldb, c, co, ldc, count, ahead = e.args
            a, b, c = e.at(a, ao), e.at(b, bo), e.at(c, co)
            cells = [
                e.at(c, e.times(ldc, row), ldc.type(column * LANES)) for row in range(rows) for column in range(columns)
            ]
            sums = [e.variable(e.load(cell)) for cell in cells]
            with cgutils.for_range(builder, count) as loop:
                b_row = e.at(b, builder.mul(loop.index, ldb))
                b_vectors = [e.load(e.at(b_row, ldb.type(column * LANES))) for column in range(columns)]
                if prefetch:
                    for column in range(columns):
                        e.prefetch(e.at(b_row, ahead, ldb.type(column * LANES)))
                for row in range(rows):
                    scalar = e.fill(builder.load(e.at(a, e.times(lda, row), loop.index)))
                    for column, vector in enumerate(b_vectors):
                        total = sums[row * columns + column]
                        e.update(total, e.multiply_add(scalar, vector, e.value(total)))
            for cell, total in zip(cells, sums, strict=True):
                e.store(e.value(total), cell)
            return context.get_dummy_value()

        n = types.intp
        return types.void(a, n, n, b, n, n, c, n, n, n, n), emit

    return gemm


_gemm_4_wide, _gemm_4_narrow = _gemm(4, COLUMNS), _gemm(4, 1)
_gemm_1_wide, _gemm_1_narrow = _gemm(1, COLUMNS), _gemm(1, 1)
_gemm_4_ahead, _gemm_1_ahead = _gemm(4, COLUMNS, prefetch=True), _gemm(1, COLUMNS, prefetch=True)


def _dots(prefetch: bool) -> Any:
    """Make ``s[i] = q . k[i]`` for LANES consecutive rows ``k[i]`` of ``dim`` floats.

    Arguments: ``q, q_offset, k, k_offset, dim, s, s_offset, ahead``; ``prefetch`` as in `_gemm`.
    """

    @intrinsic
    def dots(typing, q, qo, k, ko, dim, s, so, ahead):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            q, qo, k, ko, dim, s, so, ahead = e.args
            q, k = e.at(q, qo), e.at(k, ko)
            vectors = builder.udiv(dim, dim.type(LANES))
            totals: list[Any] = []
            for first in range(0, LANES, 8):  # eight chains of additions hide their latency
                rows = [e.at(k, e.times(dim, first + row)) for row in range(8)]
                sums = [e.variable(e.fill(0.0)) for _ in rows]
                with cgutils.for_range(builder, vectors) as loop:
                    offset = e.times(loop.index, LANES)
                    q_vector = e.load(e.at(q, offset))
                    for row, total in zip(rows, sums, strict=True):
                        e.update(total, e.multiply_add(q_vector, e.load(e.at(row, offset)), e.value(total)))
                        if prefetch:
                            e.prefetch(e.at(row, offset, ahead))
                totals += [e.value(total) for total in sums]
            e.store(e.fold(bit_reversed(totals), e.add), e.at(s, so))
            return context.get_dummy_value()

        n = types.intp
        return types.void(q, n, k, n, n, s, n, n), emit

    return dots


_dots_plain, _dots_ahead = _dots(prefetch=False), _dots(prefetch=True)


@intrinsic
def _row_max(typing, s, so, count):
    """The largest of ``s[so:so + count]``; ``count`` is a positive multiple of LANES."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        s, so, count = e.args
        s = e.at(s, so)
        highest = e.variable(e.fill(-math.inf))
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            e.update(highest, e.larger(e.load(e.at(s, e.times(loop.index, LANES))), e.value(highest)))
        return builder.extract_element(e.fold([e.value(highest)], e.larger), ir.IntType(32)(0))

    return types.float32(s, types.intp, types.intp), emit


@intrinsic
def _row_exp2(typing, s, so, count, shift):
    """``s = 2 ** (s - shift)`` in place over ``count`` (a multiple of LANES) floats; returns their sum."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        s, so, count, shift = e.args
        s, shift = e.at(s, so), e.fill(shift)
        total = e.variable(e.fill(0.0))
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            cell = e.at(s, e.times(loop.index, LANES))
            power = e.exp2(builder.fsub(e.load(cell), shift))
            e.store(power, cell)
            e.update(total, e.add(e.value(total), power))
        return builder.extract_element(e.fold([e.value(total)], e.add), ir.IntType(32)(0))

    return types.float32(s, types.intp, types.intp, types.float32), emit


@intrinsic
def _row_softcap(typing, s, so, count, cap):
    """``s = cap * tanh(x)`` in place, given ``s = 2 * log2(e) * x``: ``tanh(x) = 1 - 2 / (2 ** s + 1)``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        s, so, count, cap = e.args
        s, cap = e.at(s, so), e.fill(cap)
        one, two, limit = e.fill(1.0), e.fill(2.0), e.fill(64.0)
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            cell = e.at(s, e.times(loop.index, LANES))
            x = e.load(cell)
            power = e.exp2(builder.select(builder.fcmp_ordered(">", x, limit), limit, x))
            tanh = builder.fsub(one, builder.fdiv(two, builder.fadd(power, one)))
            e.store(builder.fmul(tanh, cap), cell)
        return context.get_dummy_value()

    return types.void(s, types.intp, types.intp, types.float32), emit


@_inlined
def _dot(q, qo, k, ko, dim):
    total = np.float32(0.0)
    for d in range(dim):
        total += q[qo + d] * k[ko + d]
    return total


@_inlined
def _scale_row(row, offset, count, factor):
    for i in range(offset, offset + count):
        row[i] *= factor


@_compiled
def _multiply(a, ao, lda, b, bo, ldb, c, co, ldc, rows, count, width, ahead):
    """``c[rows, width] += a[rows, count] @ b[count, width]``, prefetching ``ahead`` of ``b`` unless it is 0.

    Three rows are done as four: ``a`` and ``c`` must have room for a multiple of four rows.
    """
    wide = COLUMNS * LANES
    row = 0
    while row < rows:
        four, first = rows - row > 2, row == 0 and ahead != 0
        ar, cr, column = ao + row * lda, co + row * ldc, 0
        while width - column >= wide:
            if four and first:
                _gemm_4_ahead(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count, ahead)
            elif four:
                _gemm_4_wide(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count, 0)
            elif first:
                _gemm_1_ahead(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count, ahead)
            else:
                _gemm_1_wide(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count, 0)
            column += wide
        while column < width:
            if four:
                _gemm_4_narrow(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count, 0)
            else:
                _gemm_1_narrow(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count, 0)
            column += LANES
        row += 4 if four else 1


# --- what the stages pass on --------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """All that stays the same during one call. Strides are in floats; ``share`` is query heads per KV head."""

    query: Any
    kv: Any
    block_stride: Any
    slot_stride: Any
    value_offset: Any
    block_size: Any
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


class _Scratch(NamedTuple):
    """A thread's own: queries ``[rows, dim]``, scores ``[rows, KEYS]``, keys turned to ``[dim, KEYS]``."""

    q: Any
    s: Any
    turned: Any


class _Softmax(NamedTuple):
    """A softmax under way: each row's maximum and sum so far, and weighted values ``acc [rows, dim]``."""

    top: Any
    total: Any
    acc: Any


SEQUENCE, HEAD, TOKEN, TOKENS, POSITION, SINK_END, WINDOW_START, WINDOW_END, PARTS, FIRST_PARTIAL = range(10)
"""Fields of an item. It sees the positions ``[0, SINK_END)`` and ``[WINDOW_START, WINDOW_END)``.

TOKEN is the row of its first token in the batch, POSITION that token's position. FIRST_PARTIAL is the index of its
first partial result, where it has more than one part. Row ``r`` of an item is query head ``r % share`` of its token
``r // share``.
"""

# --- the plan: items and their parts ------------------------------------------------------------------------------


@_inlined
def _tile_tokens(queries, share):
    return min(queries, max(2, TILE_ROWS // share)) if queries > 1 else 1


@_inlined
def _keys_seen(item):
    return item[SINK_END] + item[WINDOW_END] - item[WINDOW_START]


@_inlined
def _cost(item, share, dim):
    # Reading a key and its value costs as much as the arithmetic of about twelve rows.
    return _keys_seen(item) * (item[TOKENS] * share + 12) * dim


@_compiled
def _plan_items(cu, lens, windows, sinks, share):
    """All items of the batch, ``int64 [items, fields]``, not yet cut into parts."""
    heads, count = len(windows), 0
    for sequence in range(len(lens)):
        queries = cu[sequence + 1] - cu[sequence]
        if queries > 0:
            count += heads * -(-queries // _tile_tokens(queries, share))
    items = np.zeros((count, FIRST_PARTIAL + 1), np.int64)
    at = 0
    for sequence in range(len(lens)):
        queries = cu[sequence + 1] - cu[sequence]
        for head in range(heads):
            done = 0
            while done < queries:
                item = items[at]
                item[SEQUENCE], item[HEAD], item[TOKEN] = sequence, head, cu[sequence] + done
                item[TOKENS] = min(_tile_tokens(queries, share), queries - done)
                item[POSITION] = lens[sequence] - queries + done
                item[WINDOW_END] = item[POSITION] + item[TOKENS]
                if windows[head] > 0:
                    item[WINDOW_START] = max(0, item[POSITION] - windows[head] + 1)
                    item[SINK_END] = min(sinks[head], item[WINDOW_START])
                done += item[TOKENS]
                at += 1
    return items


@_compiled
def _plan_parts(items, share, dim, threads):
    """Cut items into parts: ``(parts int64 [n, 2] of (item, part), number of partial results, total cost)``."""
    cost = 0
    for item in items:
        cost += _cost(item, share, dim)
    goal = max(1, cost // (PARTS_PER_THREAD * threads))
    count = partials = 0
    for item in items:
        wanted = -(-_cost(item, share, dim) // goal) if threads > 1 else 1
        item[PARTS] = max(1, min(wanted, _keys_seen(item) // PART_KEYS))
        item[FIRST_PARTIAL] = partials
        count += item[PARTS]
        partials += item[PARTS] if item[PARTS] > 1 else 0
    parts = np.empty((count, 2), np.int64)
    at = 0
    for index in range(len(items)):
        for part in range(items[index][PARTS]):
            parts[at, 0], parts[at, 1] = index, part
            at += 1
    return parts, partials, cost


# --- one segment --------------------------------------------------------------------------------------------------


@_compiled
def _score_one_token(step, scratch, keys_at, count, ahead):
    """Scores of one token's rows: the keys are read where they lie, by every row while they are in L1."""
    dim, q, s, kv = step.dim, scratch.q, scratch.s, step.kv
    for row in range(step.share):
        i = 0
        while i + LANES <= count:
            if row == 0 and ahead != 0:
                _dots_ahead(q, 0, kv, keys_at + i * dim, dim, s, i, ahead)
            else:
                _dots_plain(q, row * dim, kv, keys_at + i * dim, dim, s, row * KEYS + i, 0)
            i += LANES
        while i < count:
            s[row * KEYS + i] = _dot(q, row * dim, kv, keys_at + i * dim, dim)
            i += 1


@_compiled
def _score_tile(step, scratch, keys_at, count, rows):
    """Scores of many rows, as a matrix product with the keys turned to ``[dim, KEYS]``."""
    dim, s, turned = step.dim, scratch.s, scratch.turned
    for i in range(count):
        for d in range(dim):
            turned[d * KEYS + i] = step.kv[keys_at + i * dim + d]
    width = -(-count // LANES) * LANES
    for row in range(rows):
        for i in range(width):
            s[row * KEYS + i] = 0.0
    _multiply(scratch.q, 0, dim, turned, 0, KEYS, s, 0, KEYS, rows, dim, width, 0)


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


@_compiled
def _attend_segment(step, item, scratch, softmax, keys_at, first, count, ahead):
    """Take ``count`` keys, the first at position ``first``, into the softmax of the item's rows."""
    s, share, dim, softcap = scratch.s, step.share, step.dim, step.softcap
    top, total, acc = softmax
    rows, position = item[TOKENS] * share, item[POSITION]
    window, sink = step.head_window[item[HEAD]], step.head_sink[item[HEAD]]
    if item[TOKENS] == 1:
        _score_one_token(step, scratch, keys_at, count, ahead)
    else:
        _score_tile(step, scratch, keys_at, count, rows)
    width = -(-count // LANES) * LANES
    for row in range(rows):
        at = row * KEYS
        if softcap > 0:
            _row_softcap(s, at, width, softcap * LOG2E)
        _mask_row(s, at, first, count, width, position + row // share, window, sink)
        highest = max(top[row], _row_max(s, at, width))
        if highest > top[row]:
            shrink = np.exp2(top[row] - highest)
            total[row] *= shrink
            _scale_row(acc, row * dim, dim, shrink)
            top[row] = highest
        # Where nothing was seen yet, -inf must not be taken from -inf.
        total[row] += _row_exp2(s, at, width, highest if highest > -np.inf else 0.0)
    _multiply(s, 0, KEYS, step.kv, keys_at + step.value_offset, dim, acc, 0, dim, rows, count, dim, ahead)


# --- one part -----------------------------------------------------------------------------------------------------


@_compiled
def _load_queries(step, item, q):
    head, dim = item[HEAD] * step.share, step.dim
    for token in range(item[TOKENS]):
        for h in range(step.share):
            row = (token * step.share + h) * dim
            for d in range(dim):
                q[row + d] = step.query[item[TOKEN] + token, head + h, d] * step.factor


@_inlined
def _address(step, item, position):
    """Where the key at ``position`` lies in the arena, in floats; -1 if its block is not mapped."""
    row = item[SEQUENCE] * step.groups + step.head_group[item[HEAD]]
    block = np.int64(step.tables[row, position // step.block_size])
    if block < 0:
        return -1
    slot = np.int64(step.head_slot[item[HEAD]])
    return block * step.block_stride + slot * step.slot_stride + position % step.block_size * step.dim


@_compiled
def _walk(step, item, part, scratch, softmax):
    """Attend to the part's share of the item's two spans, stepping over blocks that are not mapped."""
    seen = _keys_seen(item)
    # Parts begin on multiples of KEYS so that segments stay whole.
    each = -(-seen // (item[PARTS] * KEYS)) * KEYS
    begin, end = min(part * each, seen), min((part + 1) * each, seen)
    shift = item[WINDOW_START] - item[SINK_END]
    for span in range(2):
        if span == 0:
            first, last = begin, min(end, item[SINK_END])
        else:
            first, last = max(begin, item[SINK_END]) + shift, end + shift
        while first < last:
            in_block = first % step.block_size
            count = min(last - first, step.block_size - in_block, KEYS - in_block % KEYS)
            keys_at = _address(step, item, first)
            if keys_at >= 0:
                ahead = 0
                if item[TOKENS] == 1 and first + count < last:
                    ahead = max(_address(step, item, first + count), 0) - keys_at
                _attend_segment(step, item, scratch, softmax, keys_at, first, count, ahead)
            first += count


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
            for d in range(dim):
                out[item[TOKEN] + token, head + h, d] = softmax.acc[row * dim + d] * inverse


@_compiled
def _merge(step, item, partials, stride):
    """Merge the partial results of all parts of an item into its first one."""
    top, total, acc = partials
    dim, into = step.dim, item[FIRST_PARTIAL] * stride
    for part in range(1, item[PARTS]):
        for row in range(item[TOKENS] * step.share):
            a, b = into + row, into + part * stride + row
            if total[b] == 0.0:
                continue
            highest = max(top[a], top[b])
            keep, take = np.exp2(top[a] - highest), np.exp2(top[b] - highest)
            top[a] = highest
            total[a] = total[a] * keep + total[b] * take
            for d in range(dim):
                acc[a * dim + d] = acc[a * dim + d] * keep + acc[b * dim + d] * take


@_compiled
def _work(step, items, parts, stride, partials, counters, out):
    """One thread: take parts until none is left. ``counters`` are parts taken, then parts finished per item."""
    step, partials = _Step(*step), _Softmax(*partials)
    dim = step.dim
    zeros = np.zeros((dim + stride) * KEYS + stride * dim, np.float32)
    q, rest = zeros[: stride * dim], zeros[stride * dim :]
    scratch = _Scratch(q, rest[: stride * KEYS], rest[stride * KEYS :])
    own = _Softmax(np.empty(stride, np.float32), np.empty(stride, np.float32), np.empty(stride * dim, np.float32))
    while True:
        taken = fetch_add(counters, 0)
        if taken >= len(parts):
            return
        index, part = parts[taken]
        item = items[index]
        rows = item[TOKENS] * step.share
        _load_queries(step, item, scratch.q)
        own.top[:], own.total[:], own.acc[:] = -np.inf, 0.0, 0.0
        _walk(step, item, part, scratch, own)
        if item[PARTS] == 1:
            _store(step, item, own, 0, out)
            continue
        at = (item[FIRST_PARTIAL] + part) * stride
        partials.top[at : at + rows], partials.total[at : at + rows] = own.top[:rows], own.total[:rows]
        partials.acc[at * dim : (at + rows) * dim] = own.acc[: rows * dim]
        if fetch_add(counters, 1 + index) == item[PARTS] - 1:
            _merge(step, item, partials, stride)
            _store(step, item, partials, item[FIRST_PARTIAL] * stride, out)


# --- entry points -------------------------------------------------------------------------------------------------


def _read(dtype: Any, dims: int) -> Any:
    return types.Array(dtype, dims, "C", readonly=True)


_INTS = _read(types.int32, 1)
_STRIDES = types.UniTuple(types.int64, 4)
_BATCH = (_INTS, _INTS, _read(types.int32, 2), types.int64)
_HEADS = (_INTS, _INTS)


@machine_code.entry(
    types.void(
        _read(types.float32, 3), _read(types.uint8, 1), _STRIDES, *_BATCH, *_HEADS, *_HEADS, types.float32,
        types.float32, types.int64, types.float32[:, :, ::1],
    ),
    parallel=True, nogil=True, fastmath=_MATH, error_model="numpy",
)  # fmt: skip
def attend(
    query, arena, strides, cu, lens, tables, groups, head_group, head_slot, head_window, head_sink, scale, softcap,
    threads, out,
):  # fmt: skip
    """`AttentionKernels.attend` with at most ``threads`` threads.

    ``strides`` are (block, slot, keys to values: in floats; block_size in tokens).
    """
    share, dim = query.shape[1] // len(head_group), query.shape[2]
    if query.shape != out.shape or cu[len(lens)] > len(query) or share * len(head_group) != query.shape[1]:
        raise ValueError("query, out, cu_seqlens_q and the number of KV heads do not fit each other")
    if strides[2] < strides[3] * dim:
        raise ValueError("the query's head_dim is larger than that of the block layout")
    items = _plan_items(cu, lens, head_window, head_sink, share)
    if len(items) == 0:
        return
    parts, partial_count, cost = _plan_parts(items, share, dim, threads)
    stride = 0
    for index in range(len(items)):
        stride = max(stride, items[index, TOKENS] * share)
    stride = (stride + 3) // 4 * 4
    top, total = np.empty(partial_count * stride, np.float32), np.empty(partial_count * stride, np.float32)
    partials = (top, total, np.empty(partial_count * stride * dim, np.float32))
    counters = np.zeros(1 + len(items), np.int64)
    factor = np.float32(2.0 * scale * LOG2E / softcap) if softcap > 0 else np.float32(scale * LOG2E)
    # Numba's parallel loops take plain tuples only; `_work` gives the fields their names.
    step = (
        query, arena.view(np.float32), strides[0], strides[1], strides[2], strides[3], tables, groups, head_group,
        head_slot, head_window, head_sink, factor, softcap, share, dim,
    )  # fmt: skip
    workers = max(1, min(threads, len(parts), cost // THREAD_COST))
    before = use_threads(workers)
    for _ in numba.prange(workers):
        _work(step, items, parts, stride, partials, counters, out)
    use_threads(before)


@machine_code.entry(
    types.void(_read(types.float32, 3), _read(types.float32, 3), types.uint8[::1], _STRIDES, *_BATCH, *_HEADS),
    nogil=True, error_model="numpy",
)  # fmt: skip
def write_kv(key, value, arena, strides, cu, lens, tables, groups, head_group, head_slot):
    """`AttentionKernels.write_kv`; ``strides`` as in `attend`. Not parallel: it is bound by memory."""
    kv = arena.view(np.float32)
    block_stride, slot_stride, value_offset, block_size = strides
    dim = key.shape[2]
    if key.shape != value.shape or cu[len(lens)] > len(key) or len(head_group) != key.shape[1]:
        raise ValueError("key, value, cu_seqlens_q and the number of KV heads do not fit each other")
    if value_offset < block_size * dim:
        raise ValueError("the keys' head_dim is larger than that of the block layout")
    for sequence in range(len(lens)):
        begin, end = cu[sequence], cu[sequence + 1]
        for head in range(len(head_group)):
            row = sequence * groups + head_group[head]
            for token in range(begin, end):
                position = lens[sequence] - end + token
                block = np.int64(tables[row, position // block_size])
                if block < 0:
                    continue
                at = block * block_stride + head_slot[head] * slot_stride + position % block_size * dim
                for d in range(dim):
                    kv[at + d] = key[token, head, d]
                for d in range(dim):
                    kv[at + value_offset + d] = value[token, head, d]
