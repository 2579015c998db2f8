# mypy: ignore-errors
"""Micro-kernels of attention: products, and what a softmax does to a row of scores.

All take arrays and offsets in elements. Where they do not read the cache themselves, they are given it as their
first argument, ``kv``, whose dtype alone they look at: products of a cache of fewer bits than float32 go by *pairs* of
bfloat16 where the CPU multiplies these (`is_paired`). Scratch arrays are float32; one float holds one pair.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.simd import ISA, LANES, Emitter, bit_reversed, element_bytes

COLUMNS = LANES // 4
"""Vectors per row in the widest `gemm` tile: 6 rows by this many accumulators stay in registers."""

_N = types.intp


def is_paired(kv: types.Array) -> bool:
    """Whether tiles of queries over this cache are multiplied as pairs of bfloat16."""
    return ISA.avx512bf16 and kv.dtype != types.float32


@intrinsic
def pair_size(typing, kv):
    """2 if `is_paired`, else 1: how many elements one float of a tile's scratch stands for."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(_N, 2 if is_paired(kv) else 1)

    return _N(kv), emit


@intrinsic
def is_quantised(typing, kv):
    """Whether keys and values have scales, known when compiling."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.boolean, kv.dtype == types.int8)

    return types.boolean(kv), emit


# --- products -----------------------------------------------------------------------------------------------------


def gemm(rows: int, columns: int, *, is_tile: bool = False, is_new: bool = False) -> Any:
    """Make ``c[r, j] += sum_t a[r, t] * b[t, j]`` for ``rows`` rows and ``columns`` vectors of columns.

    Arguments: ``kv, a, a_offset, a_stride, b, b_offset, b_stride, c, c_offset, c_stride, t_count, ahead``. A tile's
    ``a`` and ``b`` are pairs if `is_paired`. Without ``is_tile``, ``b`` may be of any dtype of a cache, and what lies
    ``ahead`` elements behind it is prefetched. ``is_new`` makes it ``c = ...``.
    """

    @intrinsic
    def product(typing, kv, a, ao, lda, b, bo, ldb, c, co, ldc, count, ahead):
        pairs = is_tile and is_paired(kv)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            _, a, ao, lda, b, bo, ldb, c, co, ldc, count, ahead = e.args
            a, b, c = e.at(a, ao), e.at(b, bo), e.at(c, co)
            read, combine = (e.load_words, e.multiply_add_pairs) if pairs else (e.load, e.multiply_add)
            if pairs:
                a = builder.bitcast(a, ir.IntType(32).as_pointer())
            cells = [
                e.at(c, e.times(ldc, row), ldc.type(column * LANES)) for row in range(rows) for column in range(columns)
            ]
            sums = [e.variable(e.fill(0.0) if is_new else e.load(cell)) for cell in cells]
            with cgutils.for_range(builder, count) as loop:
                b_row = e.at(b, builder.mul(loop.index, ldb))
                b_vectors = [read(e.at(b_row, ldb.type(column * LANES))) for column in range(columns)]
                if not is_tile:
                    for element in range(0, columns * LANES, 64 // element_bytes(b)):
                        e.prefetch(e.at(b_row, ahead, ldb.type(element)))
                for row in range(rows):
                    scalar = e.fill(builder.load(e.at(a, e.times(lda, row), loop.index)))
                    for column, vector in enumerate(b_vectors):
                        total = sums[row * columns + column]
                        e.update(total, combine(scalar, vector, e.value(total)))
            for cell, total in zip(cells, sums, strict=True):
                e.store(e.value(total), cell)
            return context.get_dummy_value()

        return types.void(kv, a, _N, _N, b, _N, _N, c, _N, _N, _N, _N), emit

    return product


def dots(rows: int) -> Any:
    """Make ``s[r, i] = q[r] . k[i]`` for ``rows`` rows and LANES keys, which lie one behind the other.

    Arguments: ``q, q_offset, k, k_offset, dim, s, s_offset, s_stride, count, ahead``. Only the first ``count`` keys are
    read; the others' columns hold the last one's product. What lies ``ahead`` elements behind is prefetched, unless
    that is 0.
    """

    @intrinsic
    def products(typing, q, qo, k, ko, dim, s, so, lds, count, ahead):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            q, qo, k, ko, dim, s, so, lds, count, ahead = e.args
            q, k, s = e.at(q, qo), e.at(k, ko), e.at(s, so)
            last = builder.sub(count, count.type(1))
            groups = []
            for first in range(0, LANES, 4):  # four keys at a time, that accumulators stay in registers
                keys = [builder.mul(e.smaller_int(count.type(first + key), last), dim) for key in range(4)]
                sums = [[e.variable(e.fill(0.0)) for _ in range(4)] for _ in range(rows)]
                e.prefetch_elements(e.at(k, e.times(dim, first), ahead), e.times(dim, 4))
                with cgutils.for_range(builder, builder.udiv(dim, dim.type(LANES))) as loop:
                    offset = e.times(loop.index, LANES)
                    k_vectors = [e.load(e.at(k, key, offset)) for key in keys]
                    for row in range(rows):
                        q_vector = e.load(e.at(q, e.times(dim, row), offset))
                        for total, k_vector in zip(sums[row], k_vectors, strict=True):
                            e.update(total, e.multiply_add(q_vector, k_vector, e.value(total)))
                leaves = [bit_reversed([e.value(total) for total in row]) for row in sums]
                groups.append([e.fold(row, e.add, until=LANES // 4) for row in leaves])
            for row in range(rows):
                total = e.fold(bit_reversed([group[row] for group in groups]), e.add, width=LANES // 4)
                e.store(total, e.at(s, e.times(lds, row)))
            return context.get_dummy_value()

        return types.void(q, _N, k, _N, _N, s, _N, _N, _N, _N), emit

    return products


# --- operands of a tile's products --------------------------------------------------------------------------------


@intrinsic
def load_query(typing, kv, row, factor, q, qo, dim):
    """``q[qo:] = row * factor``, as pairs if `is_paired`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        _, row, factor, q, qo, dim = e.args
        q, factor = e.at(q, qo), e.fill(factor)
        with cgutils.for_range(builder, builder.udiv(dim, dim.type(LANES))) as loop:
            scaled = builder.fmul(e.load(e.at(row, e.times(loop.index, LANES))), factor)
            if is_paired(kv):
                e.store(e.round_to_bfloat16(scaled), e.at(q, e.times(loop.index, LANES // 2)))
            else:
                e.store(scaled, e.at(q, e.times(loop.index, LANES)))
        return context.get_dummy_value()

    return types.void(kv, row, types.float32, q, _N, _N), emit


@intrinsic
def turn_keys(typing, kv, addresses, first, dim, turned, stride):
    """Columns ``first`` to ``first + LANES`` of ``turned [dim, stride]``: the keys at ``kv[addresses[column]]``.

    Of pairs there are half as many rows, each for two neighbouring dimensions.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        kv_pointer, addresses, first, dim, turned, stride = e.args
        per_word = 2 if is_paired(kv) else 1
        keys = [e.at(kv_pointer, builder.load(e.at(addresses, first, first.type(key)))) for key in range(LANES)]
        words = builder.udiv(dim, dim.type(per_word))
        # The last LANES words again where there is no whole vector left. A row of fewer is read beyond its end, which
        # is not beyond its block: values follow.
        last = builder.sub(words, words.type(LANES))
        last = builder.select(builder.icmp_signed("<", last, words.type(0)), words.type(0), last)
        with cgutils.for_range(builder, e.ceil_div(words, LANES)) as loop:
            word = e.smaller_int(e.times(loop.index, LANES), last)
            element = e.times(word, per_word)
            read = e.load_pairs if is_paired(kv) else lambda pointer: e.bits(e.load(pointer))
            rows = [read(e.at(key, element)) for key in keys]
            for row, column in enumerate(e.transpose(rows)):
                at = builder.mul(builder.add(word, word.type(row)), stride)
                e.store(column, e.at(turned, at, first))
        return context.get_dummy_value()

    return types.void(kv, addresses, _N, _N, turned, _N), emit


@intrinsic
def load_values(typing, kv, addresses, first, dim, values):
    """Rows ``first`` and ``first + 1`` of ``values [keys, dim]``; as pairs one row of both, ``values [keys / 2, dim]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        kv_pointer, addresses, first, dim, values = e.args
        low, high = (e.at(kv_pointer, builder.load(e.at(addresses, first, first.type(key)))) for key in range(2))
        row = builder.udiv(first, first.type(2)) if is_paired(kv) else first
        target = e.at(values, builder.mul(row, dim))
        with cgutils.for_range(builder, builder.udiv(dim, dim.type(LANES))) as loop:
            offset = e.times(loop.index, LANES)
            vectors = [e.load(e.at(low, offset)), e.load(e.at(high, offset))]
            if is_paired(kv):
                e.store(e.pair(*vectors), e.at(target, offset))
            else:
                e.store(vectors[0], e.at(target, offset))
                e.store(vectors[1], e.at(target, offset, dim))
        return context.get_dummy_value()

    return types.void(kv, addresses, _N, _N, values), emit


# --- rows of scores -----------------------------------------------------------------------------------------------


@intrinsic
def row_max(typing, s, so, count):
    """The largest of ``s[so:so + count]``; ``count`` is a positive multiple of LANES."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        s, so, count = e.args
        s = e.at(s, so)
        highest = e.variable(e.fill(-math.inf))
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            e.update(highest, e.larger(e.load(e.at(s, e.times(loop.index, LANES))), e.value(highest)))
        return builder.extract_element(e.fold([e.value(highest)], e.larger), ir.IntType(32)(0))

    return types.float32(s, _N, _N), emit


def row_exp2(*, is_tile: bool) -> Any:
    """Make ``s = 2 ** (s - shift) * scales`` in place over ``count`` (a multiple of LANES) floats.

    Arguments: ``kv, s, s_offset, count, shift, scales, scales_offset``. Returns the sum of the powers. ``scales`` are
    looked at only if `is_quantised`. A tile's results are pairs if `is_paired`, in the first half of their place.
    """

    @intrinsic
    def powers(typing, kv, s, so, count, shift, scales, scales_at):
        pairs = is_tile and is_paired(kv)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            _, s, so, count, shift, scales, scales_at = e.args
            s, shift, scales = e.at(s, so), e.fill(shift), e.at(scales, scales_at)
            total = e.variable(e.fill(0.0))
            with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
                offset = e.times(loop.index, LANES)
                power = e.exp2(builder.fsub(e.load(e.at(s, offset)), shift), degree=4 if pairs else 6)
                e.update(total, e.add(e.value(total), power))
                if kv.dtype == types.int8:
                    power = builder.fmul(power, e.load(e.at(scales, offset)))
                if pairs:
                    e.store(e.round_to_bfloat16(power), e.at(s, e.times(loop.index, LANES // 2)))
                else:
                    e.store(power, e.at(s, offset))
            return builder.extract_element(e.fold([e.value(total)], e.add), ir.IntType(32)(0))

        return types.float32(kv, s, _N, _N, types.float32, scales, _N), emit

    return powers


@intrinsic
def row_multiply(typing, s, so, count, by, by_at):
    """``s *= by`` over ``count`` (a multiple of LANES) floats."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        s, so, count, by, by_at = e.args
        s, by = e.at(s, so), e.at(by, by_at)
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            offset = e.times(loop.index, LANES)
            e.store(builder.fmul(e.load(e.at(s, offset)), e.load(e.at(by, offset))), e.at(s, offset))
        return context.get_dummy_value()

    return types.void(s, _N, _N, by, _N), emit


@intrinsic
def row_softcap(typing, s, so, count, cap):
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

    return types.void(s, _N, _N, types.float32), emit
