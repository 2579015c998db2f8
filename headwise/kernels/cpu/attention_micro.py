# mypy: ignore-errors
"""Micro-kernels of attention: products, and what a softmax does to a row of scores.

All take arrays and offsets in elements. Where they do not read the cache themselves, they are given it as their
first argument, ``kv``, whose dtype alone they look at: products of a cache of fewer bits than float32 go by *pairs* of
bfloat16 where the CPU multiplies these (`is_paired`), those of several tokens in AMX's tiles where it has them. Scratch
arrays are float32; one float holds one pair.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.float8 import FLOAT8, FLOAT8_UNIT, Float8Emitter
from headwise.kernels.cpu.simd import FLOAT, INT, INT_VECTOR, ISA, LANES, VECTOR, Emitter, bit_reversed, element_bytes
from headwise.kernels.cpu.tiles import SIDE

COLUMNS = LANES // 4
"""Vectors per row of the widest product: 6 rows by this many accumulators stay in registers."""

_N = types.intp

QUANTISED = (types.int8, FLOAT8)
"""Dtypes of a cache whose keys and values have scales."""


def is_paired(kv: types.Array) -> bool:
    """Whether several tokens' queries over this cache are multiplied as pairs of bfloat16."""
    return (ISA.avx512bf16 or ISA.amx) and kv.dtype != types.float32


@intrinsic
def is_tiled(typing, kv):
    """Whether that is in AMX's tiles, known when compiling."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.boolean, ISA.amx and is_paired(kv))

    return types.boolean(kv), emit


VECTOR_STRIP, TILED_STRIP = 6, SIDE
"""Rows that a product takes: as many as their accumulators fit in registers, or in AMX's tiles."""


@intrinsic
def strip_size(typing, kv):
    """Rows of a tile's strip: `TILED_STRIP` if `is_tiled`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(_N, TILED_STRIP if ISA.amx and is_paired(kv) else VECTOR_STRIP)

    return _N(kv), emit


def reader(kv: types.Array) -> type[Emitter]:
    """The emitter that reads this cache."""
    return Float8Emitter if kv.dtype == FLOAT8 else Emitter


FLOATS, BFLOATS, INTEGERS = "float32", "pairs of bfloat16", "pairs of int16"


def token_kind(kv: types.Array) -> str:
    """What one token's queries and probabilities are multiplied as with this cache, which is read where it lies.

    Integers are exact but for the queries and probabilities, which get 15 bits of their row's largest.
    """
    if kv.dtype in (types.uint16, FLOAT8) and ISA.avx512bf16:
        return BFLOATS
    return INTEGERS if kv.dtype == types.int8 and (ISA.avx512bw or ISA.avx2) else FLOATS


@intrinsic
def is_integer(typing, kv):
    """Whether `token_kind` is INTEGERS, known when compiling."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.boolean, token_kind(kv) == INTEGERS)

    return types.boolean(kv), emit


@intrinsic
def pair_size(typing, kv):
    """2 if `is_paired`, else 1: how many elements one float of a tile's scratch stands for."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(_N, 2 if is_paired(kv) else 1)

    return _N(kv), emit


@intrinsic
def token_pair_size(typing, kv):
    """The same of one token's queries and probabilities: 1 if `token_kind` is FLOATS."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(_N, 1 if token_kind(kv) == FLOATS else 2)

    return _N(kv), emit


@intrinsic
def is_quantised(typing, kv):
    """Whether keys and values have scales, known when compiling."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.boolean, kv.dtype in QUANTISED)

    return types.boolean(kv), emit


@intrinsic
def stored_unit(typing, kv):
    """What keys and values are to be multiplied with besides their scales."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return FLOAT(FLOAT8_UNIT if kv.dtype == FLOAT8 else 1.0)

    return types.float32(kv), emit


# --- products -----------------------------------------------------------------------------------------------------


def tile_product(rows: int, columns: int, *, is_new: bool) -> Any:
    """Make ``c[r, j] += sum_t a[r, t] * b[t, j]`` for ``rows`` rows and ``columns`` vectors of columns.

    Arguments: ``kv, a, a_offset, a_stride, b, b_offset, b_stride, c, c_offset, c_stride, t_count``. ``a`` and ``b``
    are pairs if `is_paired`. ``is_new`` makes it ``c = ...``.
    """

    @intrinsic
    def product(typing, kv, a, ao, lda, b, bo, ldb, c, co, ldc, count):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            _, a, ao, lda, b, bo, ldb, c, co, ldc, count = e.args
            a, b, c = e.at(a, ao), e.at(b, bo), e.at(c, co)
            read, combine = (e.load, e.multiply_add)
            if is_paired(kv):
                read, combine, a = e.load_words, e.multiply_add_pairs, builder.bitcast(a, INT.as_pointer())
            cells = _cells(e, c, ldc, rows, columns)
            sums = [e.variable(e.fill(0.0) if is_new else e.load(cell)) for cell in cells]
            with cgutils.for_range(builder, count) as loop:
                b_row = e.at(b, builder.mul(loop.index, ldb))
                b_vectors = [read(e.at(b_row, ldb.type(column * LANES))) for column in range(columns)]
                _accumulate(e, e.at(a, loop.index), lda, b_vectors, sums, combine)
            for cell, total in zip(cells, sums, strict=True):
                e.store(e.value(total), cell)
            return context.get_dummy_value()

        return types.void(kv, a, _N, _N, b, _N, _N, c, _N, _N, _N), emit

    return product


def token_product(rows: int, columns: int) -> Any:
    """Make ``c[r, j] += f[r] * sum_t a[r, t] * b[t, j]`` for values ``b`` of a cache, which are read where they lie.

    Arguments: ``a, a_offset, a_stride, b, b_offset, b_stride, c, c_offset, c_stride, t_count, ahead, f, f_offset``.
    ``a`` is what `token_kind` says; ``f`` is looked at only if that is integers. What lies ``ahead`` elements behind
    the values is prefetched.
    """

    @intrinsic
    def product(typing, a, ao, lda, b, bo, ldb, c, co, ldc, count, ahead, f, fo):
        kind, emitter = token_kind(b), reader(b)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = emitter(context, builder, signature, args)
            a, ao, lda, b, bo, ldb, c, co, ldc, count, ahead, f, fo = e.args
            a, b, c, f = e.at(a, ao), e.at(b, bo), e.at(c, co), e.at(f, fo)
            cells = _cells(e, c, ldc, rows, columns)
            if kind == FLOATS:
                sums, combine, per_turn = [e.variable(e.load(cell)) for cell in cells], e.multiply_add, 1
            else:
                a, per_turn = builder.bitcast(a, INT.as_pointer()), 2
                if kind == BFLOATS:
                    sums, combine = [e.variable(e.load(cell)) for cell in cells], e.multiply_add_pairs
                else:
                    zero = ir.Constant(INT_VECTOR, [0] * LANES)
                    sums, combine = [e.variable(zero) for _ in cells], e.multiply_add_integers
            last = builder.sub(count, count.type(1))
            with cgutils.for_range(builder, e.ceil_div(count, per_turn)) as loop:
                first = e.times(loop.index, per_turn)
                # Where keys are odd in number the last one goes with itself, times zero.
                keys = [e.smaller_int(builder.add(first, first.type(key)), last) for key in range(per_turn)]
                b_rows = [e.at(b, builder.mul(key, ldb)) for key in keys]
                for b_row in b_rows:
                    for element in range(0, columns * LANES, 64 // element_bytes(b)):
                        e.prefetch(e.at(b_row, ahead, ldb.type(element)))
                if kind == FLOATS:
                    b_vectors = [e.load(e.at(b_rows[0], ldb.type(column * LANES))) for column in range(columns)]
                else:
                    b_vectors = e.interleaved(*b_rows, columns)
                _accumulate(e, e.at(a, loop.index), lda, b_vectors, sums, combine)
            factors = [e.fill(builder.load(e.at(f, fo.type(row)))) for row in range(rows)]
            for index, (cell, total) in enumerate(zip(cells, sums, strict=True)):
                result = e.value(total)
                if kind == INTEGERS:
                    result = e.multiply_add(builder.sitofp(result, VECTOR), factors[index // columns], e.load(cell))
                e.store(result, cell)
            return context.get_dummy_value()

        return types.void(a, _N, _N, b, _N, _N, c, _N, _N, _N, _N, f, _N), emit

    return product


def _cells(e: Emitter, c: Any, ldc: Any, rows: int, columns: int) -> list[Any]:
    """Where a product's results lie, row by row."""
    return [e.at(c, e.times(ldc, row), ldc.type(column * LANES)) for row in range(rows) for column in range(columns)]


def _accumulate(e: Emitter, a: Any, lda: Any, b_vectors: list[Any], sums: list[Any], combine: Any) -> None:
    """Take one column of ``a`` times one row of ``b`` into ``sums``."""
    for row in range(len(sums) // len(b_vectors)):
        scalar = e.fill(e.builder.load(e.at(a, e.times(lda, row))))
        for column, vector in enumerate(b_vectors):
            total = sums[row * len(b_vectors) + column]
            e.update(total, combine(scalar, vector, e.value(total)))


def token_scores(rows: int) -> Any:
    """Make ``s[r, i] = q[r] . k[i]`` for ``rows`` rows and LANES keys, which lie one behind the other.

    Arguments: ``q, q_offset, k, k_offset, dim, s, s_offset, s_stride, count, ahead``. ``q`` is what `token_kind` says.
    Only the first ``count`` keys are read; the others' columns hold the last one's product. What lies ``ahead``
    elements behind the keys is prefetched.
    """

    @intrinsic
    def products(typing, q, qo, k, ko, dim, s, so, lds, count, ahead):
        kind, emitter = token_kind(k), reader(k)
        per_word = 1 if kind == FLOATS else 2

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = emitter(context, builder, signature, args)
            q, qo, k, ko, dim, s, so, lds, count, ahead = e.args
            q, k, s = e.at(q, qo), e.at(k, ko), e.at(s, so)
            q_read, k_read, combine = {
                FLOATS: (e.load, e.load, e.multiply_add),
                BFLOATS: (e.load_words, e.load_pairs, e.multiply_add_pairs),
                INTEGERS: (e.load_words, e.load_int16, e.multiply_add_integers),
            }[kind]
            zero = ir.Constant(INT_VECTOR, [0] * LANES) if kind == INTEGERS else e.fill(0.0)
            q_stride, last = builder.udiv(dim, dim.type(per_word)), builder.sub(count, count.type(1))
            whole = builder.udiv(dim, dim.type(per_word * LANES))
            groups = []
            for first in range(0, LANES, 4):  # four keys at a time, that accumulators stay in registers
                keys = [e.at(k, builder.mul(e.smaller_int(count.type(first + key), last), dim)) for key in range(4)]
                sums = [[e.variable(zero) for _ in range(4)] for _ in range(rows)]
                e.prefetch_elements(e.at(k, e.times(dim, first), ahead), e.times(dim, 4))

                def take(word: Any, *partly: bool, keys: Any = keys, sums: Any = sums) -> None:
                    k_vectors = [k_read(e.at(key, e.times(word, per_word)), *partly) for key in keys]
                    for row in range(rows):
                        q_vector = q_read(e.at(q, e.times(q_stride, row), word), *partly)
                        for total, k_vector in zip(sums[row], k_vectors, strict=True):
                            e.update(total, combine(q_vector, k_vector, e.value(total)))

                with cgutils.for_range(builder, whole) as loop:
                    take(e.times(loop.index, LANES))
                if kind != FLOATS:  # half a vector of keys is left where dim is odd in vectors
                    half = builder.icmp_unsigned("<", e.times(whole, per_word * LANES), dim)
                    with builder.if_then(half):
                        take(e.times(whole, LANES), True)
                leaves = [[e.value(total) for total in row] for row in sums]
                if kind == INTEGERS:
                    leaves = [[builder.sitofp(leaf, VECTOR) for leaf in row] for row in leaves]
                groups.append([e.fold(bit_reversed(row), e.add, until=LANES // 4) for row in leaves])
            for row in range(rows):
                total = e.fold(bit_reversed([group[row] for group in groups]), e.add, width=LANES // 4)
                e.store(total, e.at(s, e.times(lds, row)))
            return context.get_dummy_value()

        return types.void(q, _N, k, _N, _N, s, _N, _N, _N, _N), emit

    return products


# --- operands of a tile's products --------------------------------------------------------------------------------


def load_query(*, is_tile: bool) -> Any:
    """Make ``q[q_offset:] = row * factor``: pairs of bfloat16 for a tile if `is_paired`, for one token by `token_kind`.

    Arguments: ``kv, row, factor, q, q_offset, dim``. What shall become integers stays as it is, see `row_to_int16`.
    """

    @intrinsic
    def scaled(typing, kv, row, factor, q, qo, dim):
        pairs = is_paired(kv) if is_tile else token_kind(kv) == BFLOATS

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            _, row, factor, q, qo, dim = e.args
            q, factor = e.at(q, qo), e.fill(factor)
            with cgutils.for_range(builder, builder.udiv(dim, dim.type(LANES))) as loop:
                value = builder.fmul(e.load(e.at(row, e.times(loop.index, LANES))), factor)
                if pairs:
                    e.store(e.round_to_bfloat16(value), e.at(q, e.times(loop.index, LANES // 2)))
                else:
                    e.store(value, e.at(q, e.times(loop.index, LANES)))
            return context.get_dummy_value()

        return types.void(kv, row, types.float32, q, _N, _N), emit

    return scaled


@intrinsic
def turn_keys(typing, kv, addresses, first, dim, turned, stride):
    """Columns ``first`` to ``first + LANES`` of ``turned [dim, stride]``: the keys at ``kv[addresses[column]]``.

    Of pairs there are half as many rows, each for two neighbouring dimensions.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = reader(kv)(context, builder, signature, args)
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
    """Rows ``first`` and ``first + 1`` of ``values [keys, dim]``; as pairs one row of ``values [keys / 2, dim]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = reader(kv)(context, builder, signature, args)
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

    Arguments: ``kv, s, s_offset, count, shift, scales, scales_offset, factor``. Returns the sum of the powers.
    ``scales`` are looked at only if `is_quantised`. A tile's results are pairs of bfloat16 if `is_paired`; one token's
    are what `token_kind` says, integers after being multiplied by ``factor``. Pairs lie in the first half of their
    place.
    """

    @intrinsic
    def powers(typing, kv, s, so, count, shift, scales, scales_at, factor):
        tile_kind = BFLOATS if is_paired(kv) else FLOATS
        kind = tile_kind if is_tile else token_kind(kv)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            _, s, so, count, shift, scales, scales_at, factor = e.args
            s, shift, scales, factor = e.at(s, so), e.fill(shift), e.at(scales, scales_at), e.fill(factor)
            total = e.variable(e.fill(0.0))
            with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
                offset, half = e.times(loop.index, LANES), e.times(loop.index, LANES // 2)
                power = e.exp2(builder.fsub(e.load(e.at(s, offset)), shift), degree=4 if kind == BFLOATS else 6)
                e.update(total, e.add(e.value(total), power))
                if kv.dtype in QUANTISED:
                    power = builder.fmul(power, e.load(e.at(scales, offset)))
                if kv.dtype == FLOAT8:
                    power = builder.fmul(power, e.fill(FLOAT8_UNIT))
                if kind == BFLOATS:
                    e.store(e.round_to_bfloat16(power), e.at(s, half))
                elif kind == INTEGERS:
                    e.store(e.round_to_int16(builder.fmul(power, factor)), e.at(s, half))
                else:
                    e.store(power, e.at(s, offset))
            return builder.extract_element(e.fold([e.value(total)], e.add), INT(0))

        return types.float32(kv, s, _N, _N, types.float32, scales, _N, types.float32), emit

    return powers


@intrinsic
def exp2(typing, x):
    """``2 ** x``, as `row_exp2` has it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        return builder.extract_element(e.exp2(e.fill(e.args[0])), INT(0))

    return types.float32(types.float32), emit


@intrinsic
def row_multiply(typing, s, so, count, by, by_at, factor):
    """``s *= by * factor`` over ``count`` (a multiple of LANES) floats."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        s, so, count, by, by_at, factor = e.args
        s, by, factor = e.at(s, so), e.at(by, by_at), e.fill(factor)
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            offset = e.times(loop.index, LANES)
            scale = builder.fmul(e.load(e.at(by, offset)), factor)
            e.store(builder.fmul(e.load(e.at(s, offset)), scale), e.at(s, offset))
        return context.get_dummy_value()

    return types.void(s, _N, _N, by, _N, types.float32), emit


LARGEST_INT16 = 32767.0


@intrinsic
def row_to_int16(typing, s, so, count):
    """``count`` (a multiple of LANES) floats as integers, pairs in the first half of their place; returns their scale.

    The largest magnitude becomes LARGEST_INT16. Of a NaN the scale is NaN.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        s, so, count = e.args
        s, vectors = e.at(s, so), builder.udiv(count, count.type(LANES))
        absmax = e.absmax(s, vectors)
        none = builder.fcmp_ordered("==", absmax, FLOAT(0.0))
        scale = builder.select(none, FLOAT(1.0), builder.fdiv(absmax, FLOAT(LARGEST_INT16)))
        with cgutils.for_range(builder, vectors) as loop:
            value = builder.fdiv(e.load(e.at(s, e.times(loop.index, LANES))), e.fill(scale))
            e.store(e.round_to_int16(value), e.at(s, e.times(loop.index, LANES // 2)))
        return scale

    return types.float32(s, _N, _N), emit


@intrinsic
def row_times(typing, source, so, target, to, count, factor):
    """``target = source * factor`` over ``count`` (a multiple of LANES) floats.

    Loops that Numba compiles allow for negative indices, which makes gathers of what should be vector loads.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        source, so, target, to, count, factor = e.args
        source, target, factor = e.at(source, so), e.at(target, to), e.fill(factor)
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            offset = e.times(loop.index, LANES)
            e.store(builder.fmul(e.load(e.at(source, offset)), factor), e.at(target, offset))
        return context.get_dummy_value()

    return types.void(source, _N, target, _N, _N, types.float32), emit


@intrinsic
def row_add(typing, source, so, target, to, count, factor):
    """``target += source * factor`` over ``count`` (a multiple of LANES) floats."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        source, so, target, to, count, factor = e.args
        source, target, factor = e.at(source, so), e.at(target, to), e.fill(factor)
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            cell = e.at(target, e.times(loop.index, LANES))
            e.store(e.multiply_add(e.load(e.at(source, e.times(loop.index, LANES))), factor, e.load(cell)), cell)
        return context.get_dummy_value()

    return types.void(source, _N, target, _N, _N, types.float32), emit


@intrinsic
def row_copy(typing, source, so, target, to, count):
    """``target[to : to + count] = source[so : so + count]`` of floats, any number of them."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        source, so, target, to, count = e.args
        cgutils.raw_memcpy(builder, e.at(target, to), e.at(source, so), count, 4)
        return context.get_dummy_value()

    return types.void(source, _N, target, _N, _N), emit


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
