"""The compiled half of `headwise.kernels.cpu`: SIMD micro-kernels, the block walk, the work plan.

All compiled code is in this one file on purpose: Numba's disk cache looks at the file of the entry function
alone, so a helper elsewhere could change without the cached machine code noticing.

How `attend` works. The work is cut into *items*: one (sequence, KV head, tile of queries). All query heads of the
KV head are rows of the tile, so its KV is read once for all of them. An item whose share of the work is large is
cut again along its visible keys into *parts* (flash-decoding), each with a softmax of its own; whoever finishes
an item's last part merges them. Threads take parts from a shared counter. A part walks the two spans of positions
that its queries can see, block by block, with an online softmax in base 2 (queries are scaled by
``scale * log2(e)`` once).

Scratch arrays are flat ``float32``; micro-kernels take an array and an offset in elements.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
"""Floats in a vector. The wider one halves the instructions; LLVM splits vectors the machine lacks."""

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
_EXP2 = np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)

# Everything LLVM may assume of floats but for NaN and infinity: masked scores are -inf, and NaN must show.
_MATH = {"reassoc", "nsz", "arcp", "contract", "afn"}
_inlined = numba.njit(forceinline=True, fastmath=_MATH, nogil=True, error_model="numpy")
_compiled = numba.njit(fastmath=_MATH, nogil=True, error_model="numpy")

# --- micro-kernels -----------------------------------------------------------------------------------------------

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT_VECTOR = ir.VectorType(ir.IntType(32), LANES)
_FLAGS = ("contract", "nsz")


class _Emitter:
    """LLVM IR for one intrinsic: array arguments as pointers, vectors in and out of memory, arithmetic."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self.args = [
            context.make_array(kind)(context, builder, arg).data if isinstance(kind, types.Array) else arg
            for kind, arg in zip(signature.args, args, strict=True)
        ]

    def load(self, pointer: Any) -> Any:
        return self.builder.load(self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def at(self, pointer: Any, *offsets: Any) -> Any:
        for offset in offsets:
            pointer = self.builder.gep(pointer, [offset])
        return pointer

    def times(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, value.type(factor))

    def fill(self, scalar: Any) -> Any:
        """A vector of one scalar: a Python number or an LLVM float."""
        if not isinstance(scalar, ir.Value):
            return ir.Constant(_VECTOR, [float(scalar)] * LANES)
        first = self.builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
        zeros = ir.Constant(_INT_VECTOR, [0] * LANES)
        return self.builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), zeros)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FLAGS), c, flags=_FLAGS)

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def variable(self, value: Any) -> Any:
        """A value that a loop changes; LLVM turns it into a register."""
        return cgutils.alloca_once_value(self.builder, value)

    def update(self, variable: Any, value: Any) -> None:
        self.builder.store(value, variable)

    def value(self, variable: Any) -> Any:
        return self.builder.load(variable)

    def fold(self, vectors: list[Any], combine: Any) -> Any:
        """Reduce LANES vectors to one whose lane ``i`` combines all lanes of ``vectors[i]`` (fewer: repeated)."""
        width = LANES
        while width > 1:
            width //= 2
            if len(vectors) == 1:
                vectors = vectors * 2
            pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
            vectors = [self._fold_pair(a, b, width, combine) for a, b in pairs]
        return vectors[0]

    def _fold_pair(self, a: Any, b: Any, width: int, combine: Any) -> Any:
        # Lanes come in runs of 2 * width that belong together; fold each run's halves, a's results before b's.
        runs = [run for source in (0, LANES) for run in range(source, source + LANES, 2 * width)]
        low = [run + lane for run in runs for lane in range(width)]
        high = [lane + width for lane in low]
        shuffled = [self.builder.shuffle_vector(a, b, ir.Constant(_INT_VECTOR, lanes)) for lanes in (low, high)]
        return combine(*shuffled)

    def add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=_FLAGS)

    def exp2(self, x: Any) -> Any:
        """``2 ** x`` for ``x <= 126``; exactly 0 below -126, NaN for NaN. Relative error about 1e-7."""
        lowest = self.fill(-126.0)
        whole = self._round(self.larger(x, lowest))
        rest = self.builder.fsub(x, whole)
        *coefficients, power = [float(c) for c in _EXP2.coef]
        result = self.fill(power)
        for coefficient in reversed(coefficients):
            result = self.multiply_add(result, rest, self.fill(coefficient))
        bits = self.builder.add(self.builder.fptosi(whole, _INT_VECTOR), ir.Constant(_INT_VECTOR, [127] * LANES))
        factor = self.builder.bitcast(self.builder.shl(bits, ir.Constant(_INT_VECTOR, [23] * LANES)), _VECTOR)
        kept = self.builder.fcmp_unordered(">", x, lowest)
        return self.builder.select(kept, self.builder.fmul(result, factor), self.fill(0.0))

    def _round(self, x: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.rint.v{LANES}f32")
        return self.builder.call(function, [x])


def _gemm(rows: int, columns: int) -> Any:
    """Make ``c[r, j] += sum_t a[r, t] * b[t, j]`` for ``rows`` rows and ``columns`` vectors of columns.

    Arguments: ``a, a_offset, a_stride, b, b_offset, b_stride, c, c_offset, c_stride, t_count``.
    """

    @intrinsic
    def gemm(typing, a, ao, lda, b, bo, ldb, c, co, ldc, count):  # type: ignore[no-untyped-def]
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = _Emitter(context, builder, signature, args)
            a, ao, lda, b, bo, ldb, c, co, ldc, count = e.args
            a, b, c = e.at(a, ao), e.at(b, bo), e.at(c, co)
            cells = [
                e.at(c, e.times(ldc, row), ldc.type(column * LANES)) for row in range(rows) for column in range(columns)
            ]
            sums = [e.variable(e.load(cell)) for cell in cells]
            with cgutils.for_range(builder, count) as loop:
                b_row = e.at(b, builder.mul(loop.index, ldb))
                b_vectors = [e.load(e.at(b_row, ldb.type(column * LANES))) for column in range(columns)]
                for row in range(rows):
                    scalar = e.fill(builder.load(e.at(a, e.times(lda, row), loop.index)))
                    for column, vector in enumerate(b_vectors):
                        total = sums[row * columns + column]
                        e.update(total, e.multiply_add(scalar, vector, e.value(total)))
            for cell, total in zip(cells, sums, strict=True):
                e.store(e.value(total), cell)
            return context.get_dummy_value()

        n = types.intp
        return types.void(a, n, n, b, n, n, c, n, n, n), emit

    return gemm


_gemm_4_wide, _gemm_4_narrow = _gemm(4, COLUMNS), _gemm(4, 1)
_gemm_1_wide, _gemm_1_narrow = _gemm(1, COLUMNS), _gemm(1, 1)


@intrinsic
def _dots(typing, q, qo, k, ko, dim, s, so):  # type: ignore[no-untyped-def]
    """``s[i] = q . k[i]`` for LANES consecutive rows ``k[i]`` of ``dim`` floats."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = _Emitter(context, builder, signature, args)
        q, qo, k, ko, dim, s, so = e.args
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
            totals += [e.value(total) for total in sums]
        e.store(e.fold(_bit_reversed(totals), e.add), e.at(s, so))
        return context.get_dummy_value()

    n = types.intp
    return types.void(q, n, k, n, n, s, n), emit


def _bit_reversed(items: list[Any]) -> list[Any]:
    """Order in which `_Emitter.fold` must be given vectors for lane ``i`` to be item ``i``."""
    if len(items) == 1:
        return items
    return _bit_reversed(items[0::2]) + _bit_reversed(items[1::2])


@intrinsic
def _row_max(typing, s, so, count):  # type: ignore[no-untyped-def]
    """The largest of ``s[so:so + count]``; ``count`` is a positive multiple of LANES."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = _Emitter(context, builder, signature, args)
        s, so, count = e.args
        s = e.at(s, so)
        highest = e.variable(e.fill(-math.inf))
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            e.update(highest, e.larger(e.load(e.at(s, e.times(loop.index, LANES))), e.value(highest)))
        return builder.extract_element(e.fold([e.value(highest)], e.larger), ir.IntType(32)(0))

    return types.float32(s, types.intp, types.intp), emit


@intrinsic
def _row_exp2(typing, s, so, count, shift):  # type: ignore[no-untyped-def]
    """``s = 2 ** (s - shift)`` in place over ``count`` (a multiple of LANES) floats; returns their sum."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = _Emitter(context, builder, signature, args)
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
def _row_softcap(typing, s, so, count, cap):  # type: ignore[no-untyped-def]
    """``s = cap * tanh(x)`` in place, given ``s = 2 * log2(e) * x``: ``tanh(x) = 1 - 2 / (2 ** s + 1)``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = _Emitter(context, builder, signature, args)
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


@intrinsic
def _fetch_add(typing, counters, index):  # type: ignore[no-untyped-def]
    """Add 1 to ``counters[index]`` (int64), as one atomic step ordered with all memory; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counters, index = _Emitter(context, builder, signature, args).args
        return builder.atomic_rmw("add", builder.gep(counters, [index]), ir.IntType(64)(1), "acq_rel")

    return types.int64(counters, types.intp), emit


@intrinsic
def _use_threads(typing, count):  # type: ignore[no-untyped-def]
    """Run this thread's parallel loops on ``count`` threads; returns what it was before.

    `numba.set_num_threads` does this too, but compiled code that calls it cannot be cached.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c_int, module = ir.IntType(32), builder.module
        # Numba's own loops declare this one as returning a word; a module may declare it one way only.
        get = cgutils.get_or_insert_function(module, ir.FunctionType(cgutils.intp_t, []), "get_num_threads")
        set_ = cgutils.get_or_insert_function(module, ir.FunctionType(ir.VoidType(), [c_int]), "set_num_threads")
        before = builder.trunc(builder.call(get, []), c_int)
        builder.call(set_, args)
        return before

    return types.int32(types.int32), emit


@_inlined
def _dot(q, qo, k, ko, dim):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for d in range(dim):
        total += q[qo + d] * k[ko + d]
    return total


@_inlined
def _scale_row(row, offset, count, factor):  # type: ignore[no-untyped-def]
    for i in range(offset, offset + count):
        row[i] *= factor


@_compiled
def _multiply(a, ao, lda, b, bo, ldb, c, co, ldc, rows, count, width):  # type: ignore[no-untyped-def]
    """``c[rows, width] += a[rows, count] @ b[count, width]``; ``c`` and ``a`` are padded to four rows if over two."""
    wide = COLUMNS * LANES
    row = 0
    while row < rows:
        four = rows - row > 2
        ar, cr, column = ao + row * lda, co + row * ldc, 0
        while column < width:
            if width - column >= wide:
                if four:
                    _gemm_4_wide(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count)
                else:
                    _gemm_1_wide(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count)
                column += wide
            else:
                if four:
                    _gemm_4_narrow(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count)
                else:
                    _gemm_1_narrow(a, ar, lda, b, bo + column, ldb, c, cr + column, ldc, count)
                column += LANES
        row += 4 if four else 1


# --- one segment: keys that lie side by side in one block ---------------------------------------------------------


@_compiled
def _score_one_token(q, kv, keys_at, count, share, dim, s):  # type: ignore[no-untyped-def]
    """``s[r, i] = q[r] . key[i]``: the keys are read where they lie, by all ``share`` heads while in L1."""
    for row in range(share):
        i = 0
        while i + LANES <= count:
            _dots(q, row * dim, kv, keys_at + i * dim, dim, s, row * KEYS + i)
            i += LANES
        while i < count:
            s[row * KEYS + i] = _dot(q, row * dim, kv, keys_at + i * dim, dim)
            i += 1


@_compiled
def _score_tile(q, kv, keys_at, count, rows, dim, turned, s):  # type: ignore[no-untyped-def]
    """``s[r, i] = q[r] . key[i]`` as a matrix product with the keys turned to ``[dim, KEYS]``."""
    for i in range(count):
        for d in range(dim):
            turned[d * KEYS + i] = kv[keys_at + i * dim + d]
    width = -(-count // LANES) * LANES
    for row in range(rows):
        for i in range(width):
            s[row * KEYS + i] = 0.0
    _multiply(q, 0, dim, turned, 0, KEYS, s, 0, KEYS, rows, dim, width)


@_inlined
def _mask_row(s, at, first, count, width, position, window, sink):  # type: ignore[no-untyped-def]
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
def _attend_segment(  # type: ignore[no-untyped-def]
    kv, keys_at, values_at, first, count, q, rows, share, position, window, sink, dim, softcap, turned, s, top, total, acc
):
    """Take ``count`` keys, the first at position ``first``, into the rows' running softmax.

    Row ``r`` is query head ``r % share`` of the token at ``position + r // share``. ``top`` and ``total``
    are the running maximum and sum of each row, ``acc [rows, dim]`` the running weighted values.
    """
    if rows == share:
        _score_one_token(q, kv, keys_at, count, share, dim, s)
    else:
        _score_tile(q, kv, keys_at, count, rows, dim, turned, s)
    width = -(-count // LANES) * LANES
    for row in range(rows):
        at = row * KEYS
        if softcap > 0:
            _row_softcap(s, at, width, softcap * LOG2E)
        _mask_row(s, at, first, count, width, position + row // share, window, sink)
        highest = max(top[row], _row_max(s, at, width))
        if highest == -np.inf:
            for i in range(width):
                s[at + i] = 0.0
            continue
        if highest > top[row]:
            shrink = np.exp2(top[row] - highest)
            total[row] *= shrink
            _scale_row(acc, row * dim, dim, shrink)
            top[row] = highest
        total[row] += _row_exp2(s, at, width, highest)
    _multiply(s, 0, KEYS, kv, values_at, dim, acc, 0, dim, rows, count, dim)


# --- the plan: items and their parts ------------------------------------------------------------------------------

SEQUENCE, HEAD, TOKEN, TOKENS, POSITION, SINK_END, WINDOW_START, WINDOW_END, PARTS, FIRST_PARTIAL = range(10)
"""Fields of an item. It sees the positions ``[0, SINK_END)`` and ``[WINDOW_START, WINDOW_END)``.

TOKEN is the row of its first token in the batch, POSITION that token's position. FIRST_PARTIAL is the index of its
first partial result, where it has more than one part.
"""


@_inlined
def _tile_tokens(queries, share):  # type: ignore[no-untyped-def]
    return min(queries, max(2, TILE_ROWS // share)) if queries > 1 else 1


@_inlined
def _keys_seen(item):  # type: ignore[no-untyped-def]
    return item[SINK_END] + item[WINDOW_END] - item[WINDOW_START]


@_inlined
def _cost(item, share, dim):  # type: ignore[no-untyped-def]
    # Reading a key and its value costs as much as the arithmetic of about twelve rows.
    return _keys_seen(item) * (item[TOKENS] * share + 12) * dim


@_compiled
def _plan_items(cu, lens, windows, sinks, share):  # type: ignore[no-untyped-def]
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
def _plan_parts(items, share, dim, threads):  # type: ignore[no-untyped-def]
    """Cut items into parts: ``(parts int64 [n, 2] of (item, part), partial results, total cost)``."""
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


# --- one part -----------------------------------------------------------------------------------------------------


@_compiled
def _load_queries(query, item, share, dim, factor, q):  # type: ignore[no-untyped-def]
    head = item[HEAD] * share
    for token in range(item[TOKENS]):
        for h in range(share):
            row = (token * share + h) * dim
            for d in range(dim):
                q[row + d] = query[item[TOKEN] + token, head + h, d] * factor


@_compiled
def _walk(  # type: ignore[no-untyped-def]
    kv, strides, row, item, part, slot, window, sink, share, dim, softcap, q, turned, s, top, total, acc
):
    """Attend to the part's share of the item's two spans. ``-1`` blocks are stepped over, never looked up."""
    block_stride, slot_stride, value_offset, block_size = strides
    rows, seen = item[TOKENS] * share, _keys_seen(item)
    # Parts begin on multiples of KEYS so that segments stay whole.
    each = -(-seen // (item[PARTS] * KEYS)) * KEYS
    begin, end = min(part * each, seen), min((part + 1) * each, seen)
    for span in range(2):
        if span == 0:
            first, last = begin, min(end, item[SINK_END])
        else:
            shift = item[WINDOW_START] - item[SINK_END]
            first, last = max(begin, item[SINK_END]) + shift, end + shift
        while first < last:
            in_block = first % block_size
            count = min(last - first, block_size - in_block, KEYS - in_block % KEYS)
            block = np.int64(row[first // block_size])
            if block >= 0:
                keys_at = block * block_stride + slot * slot_stride + in_block * dim
                _attend_segment(
                    kv, keys_at, keys_at + value_offset, first, count, q, rows, share, item[POSITION], window, sink,
                    dim, softcap, turned, s, top, total, acc,
                )  # fmt: skip
            first += count


@_compiled
def _store(item, share, dim, top, total, acc, first, out):  # type: ignore[no-untyped-def]
    """Write the item's output: rows of ``acc`` from row ``first`` over their sums; zeros if nothing was seen."""
    head = item[HEAD] * share
    for token in range(item[TOKENS]):
        for h in range(share):
            row = first + token * share + h
            inverse = np.float32(0.0)
            if top[row] != -np.inf:
                inverse = np.float32(1.0) / total[row]
            for d in range(dim):
                out[item[TOKEN] + token, head + h, d] = acc[row * dim + d] * inverse


@_compiled
def _merge(item, share, dim, stride, tops, totals, accs):  # type: ignore[no-untyped-def]
    """Merge the partial results of all parts of an item into its first one."""
    into = item[FIRST_PARTIAL] * stride
    for part in range(1, item[PARTS]):
        source = into + part * stride
        for row in range(item[TOKENS] * share):
            a, b = into + row, source + row
            highest = max(tops[a], tops[b])
            if tops[b] == -np.inf:
                continue
            keep, take = np.exp2(tops[a] - highest), np.exp2(tops[b] - highest)
            tops[a] = highest
            totals[a] = totals[a] * keep + totals[b] * take
            for d in range(dim):
                accs[a * dim + d] = accs[a * dim + d] * keep + accs[b * dim + d] * take


@_compiled
def _work(  # type: ignore[no-untyped-def]
    query, kv, strides, tables, groups, head_group, head_slot, head_window, head_sink, factor, softcap, share, dim,
    items, parts, stride, tops, totals, accs, counters, out,
):  # fmt: skip
    """One thread: take parts until none is left. ``counters`` are parts taken, then parts finished per item."""
    q = np.zeros(stride * dim, np.float32)
    acc = np.empty(stride * dim, np.float32)
    s = np.zeros(stride * KEYS, np.float32)
    turned = np.zeros(dim * KEYS, np.float32)
    top, total = np.empty(stride, np.float32), np.empty(stride, np.float32)
    while True:
        taken = _fetch_add(counters, 0)
        if taken >= len(parts):
            return
        index, part = parts[taken]
        item = items[index]
        head = item[HEAD]
        rows = item[TOKENS] * share
        _load_queries(query, item, share, dim, factor, q)
        acc[: (rows + 3) // 4 * 4 * dim] = 0.0
        top[:rows] = -np.inf
        total[:rows] = 0.0
        _walk(
            kv, strides, tables[item[SEQUENCE] * groups + head_group[head]], item, part, head_slot[head],
            head_window[head], head_sink[head], share, dim, softcap, q, turned, s, top, total, acc,
        )  # fmt: skip
        if item[PARTS] == 1:
            _store(item, share, dim, top, total, acc, 0, out)
            continue
        at = (item[FIRST_PARTIAL] + part) * stride
        tops[at : at + rows], totals[at : at + rows] = top[:rows], total[:rows]
        accs[at * dim : (at + rows) * dim] = acc[: rows * dim]
        if _fetch_add(counters, 1 + index) == item[PARTS] - 1:
            _merge(item, share, dim, stride, tops, totals, accs)
            _store(item, share, dim, tops, totals, accs, item[FIRST_PARTIAL] * stride, out)


# --- entry points -------------------------------------------------------------------------------------------------


def _read(dtype: Any, dims: int) -> Any:
    return types.Array(dtype, dims, "C", readonly=True)


_INTS = _read(types.int32, 1)
_STRIDES = types.UniTuple(types.int64, 4)
_BATCH = (_INTS, _INTS, _read(types.int32, 2), types.int64)
_HEADS = (_INTS, _INTS)


@numba.njit(
    types.void(
        _read(types.float32, 3), _read(types.uint8, 1), _STRIDES, *_BATCH, *_HEADS, *_HEADS, types.float32,
        types.float32, types.int64, types.float32[:, :, ::1],
    ),
    parallel=True, cache=True, nogil=True, fastmath=_MATH, error_model="numpy",
)  # fmt: skip
def attend(  # type: ignore[no-untyped-def]
    query, arena, strides, cu, lens, tables, groups, head_group, head_slot, head_window, head_sink, scale, softcap,
    threads, out,
):  # fmt: skip
    """`AttentionKernels.attend` with at most ``threads`` threads.

    ``strides`` are (block, slot, keys to values: in floats; block_size in tokens).
    """
    kv = arena.view(np.float32)
    share, dim = query.shape[1] // len(head_group), query.shape[2]
    items = _plan_items(cu, lens, head_window, head_sink, share)
    if len(items) == 0:
        return
    parts, partials, cost = _plan_parts(items, share, dim, threads)
    stride = 0
    for index in range(len(items)):
        stride = max(stride, items[index, TOKENS] * share)
    stride = (stride + 3) // 4 * 4
    tops, totals = np.empty(partials * stride, np.float32), np.empty(partials * stride, np.float32)
    accs = np.empty(partials * stride * dim, np.float32)
    counters = np.zeros(1 + len(items), np.int64)
    factor = np.float32(scale * LOG2E)
    if softcap > 0:
        factor = np.float32(2.0 * scale * LOG2E / softcap)
    workers = max(1, min(threads, len(parts), cost // THREAD_COST))
    before = _use_threads(workers)
    for _ in numba.prange(workers):
        _work(
            query, kv, strides, tables, groups, head_group, head_slot, head_window, head_sink, factor, softcap,
            share, dim, items, parts, stride, tops, totals, accs, counters, out,
        )  # fmt: skip
    _use_threads(before)


@numba.njit(
    types.void(
        _read(types.float32, 3), _read(types.float32, 3), types.uint8[::1], _STRIDES, *_BATCH, *_HEADS,
    ),
    cache=True, nogil=True, error_model="numpy",
)  # fmt: skip
def write_kv(key, value, arena, strides, cu, lens, tables, groups, head_group, head_slot):  # type: ignore[no-untyped-def]
    """`AttentionKernels.write_kv`; ``strides`` as in `attend`. Not parallel: it is bound by memory."""
    kv = arena.view(np.float32)
    block_stride, slot_stride, value_offset, block_size = strides
    dim = key.shape[2]
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
