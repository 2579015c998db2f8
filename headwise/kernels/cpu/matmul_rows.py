# mypy: ignore-errors
"""Rows, as `matmul_tiles` multiply them: floats, bfloat16, or integers with a scale for each part of a row."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from headwise.kernels.cpu.addresses import floats_at, ints_at, record_at
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.matmul_kinds import (
    BFLOAT,
    BFLOAT16,
    FLOAT32,
    INT8,
    INTEGERS,
    NATIVE,
    TILES,
    constant,
)
from headwise.kernels.cpu.records import WEIGHT
from headwise.kernels.cpu.simd import LANES, Emitter
from headwise.kernels.cpu.tiles import SIDE

_MATH = {"nsz", "arcp", "contract"}
_pasted = numba.njit(inline="always", fastmath=_MATH, nogil=True, error_model="numpy")

_FLOAT_LANES, _INT_LANES = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32)))
_I16, _I32 = ir.IntType(16), ir.IntType(32)

ROWS_IN_VECTORS = 2
"""Rows that are multiplied with integers in vectors where there are tiles, too: these would come half as fast."""

weight_at = record_at(WEIGHT)


@_pasted
def groups_of(weight):
    """Groups of a row's inputs that have a scale."""
    return weight.turns // weight.group_turns


@register_jitable
def _is_pairs(kind: int) -> bool:
    """Whether rows become pairs of bfloat16, to be multiplied with a weight of this kind."""
    return (NATIVE and kind != FLOAT32) or (TILES and kind == BFLOAT16)


@register_jitable
def row_factors(kind: int, depth: int) -> int:
    """32-bit numbers that a row becomes, to be multiplied with a weight of this kind and depth."""
    return depth // 2 if _is_pairs(kind) or (INTEGERS and kind >= INT8) else depth


@register_jitable
def row_sums(kind: int, depth: int, groups: int) -> int:
    """Floats that go with them: sums by group of inputs, or what `matmul_tiles.integer_tile` takes of each part."""
    if kind < INT8:
        return 0
    return 3 * (depth // part_depth(depth, groups)) if INTEGERS else groups


@_pasted
def factor_stride(weight):
    """`row_factors` of a weight."""
    return row_factors(weight.kind, weight.depth)


@_pasted
def sums_stride(weight):
    """`row_sums` of a weight."""
    return row_sums(weight.kind, weight.depth, groups_of(weight))


@numba.njit(fastmath={*_MATH, "reassoc"}, nogil=True, error_model="numpy")
def _sum_rounded(values, first, count):
    """The sum of some, each rounded to bfloat16 before."""
    total = np.float32(0.0)
    some = floats_at(values.ctypes.data + 4 * first, count)
    for i in range(count):
        total += _rounded(some[i])
    return total


@_pasted
def _prepare_integers(values, weight, row, factors, sums):
    each = part_depth(weight.depth, groups_of(weight))
    parts = weight.depth // each
    stride, first = factor_stride(weight), row * 3 * parts
    begins = ints_at(sums.ctypes.data + 4 * (first + parts), parts)
    for part in range(parts):
        at = part * each
        total = row_integers(values, at, factors, row * stride + at // 2, each, sums, first + part)
        begins[part] = -weight.offset * total
        sums[first + 2 * parts + part] = np.float32(total) * sums[first + part]


@_pasted
def tiled_row(values, factors, row, rows, stride, block, blocks):
    """Values as a row's ``blocks`` from number ``block`` on, as `prepare_row` has rows of ``stride`` words in tiles."""
    first = row // SIDE * SIDE
    step = min(SIDE, rows - first) * SIDE
    _paired_blocks(values, factors, first * stride + (row - first) * SIDE + block * step, step, blocks)


@_pasted
def tiled_panel(values, factors, row, rows, stride, panel, width):
    """``width`` values, which a panel of a weight has made, as that part of a row; of the last panel what a row has."""
    each = width // (2 * SIDE)
    first = panel * each
    tiled_row(values, factors, row, rows, stride, first, min(each, stride // SIDE - first))


@_pasted
def prepare_row(values, weight, row, rows, factors, sums):
    """``weight.depth`` of ``values``, padded with zeros, as factors of the weight, and what goes with them.

    row: its number of the ``rows`` that the weight is multiplied with at once. Where that is done in tiles (with
    integers of more than `ROWS_IN_VECTORS`), a tile's rows lie side by side: [groups of up to `SIDE` rows,
    depth / 2 / SIDE, rows of the group, SIDE] pairs of depth.
    """
    stride = factor_stride(weight)
    if weight.kind == FLOAT32:
        row_copy(values, 0, factors, row * stride, stride)
        return
    if INTEGERS and weight.kind >= INT8:
        _prepare_integers(values, weight, row, factors, sums)
        return
    words = weight.depth // 2
    if TILES and (weight.kind == BFLOAT16 or rows > ROWS_IN_VECTORS):
        tiled_row(values, factors, row, rows, words, 0, words // SIDE)
    elif _is_pairs(weight.kind):
        _paired_row(values, 0, factors, row * stride, weight.depth)
    else:
        _rounded_row(values, 0, factors, row * stride, weight.depth)
    if weight.has_minima:
        groups = groups_of(weight)
        each = weight.depth // groups
        for group in range(groups):
            sums[row * groups + group] = _sum_rounded(values, group * each, each)


# --- rows, as the tiles multiply them ------------------------------------------------------------------------------


@intrinsic
def _paired_row(typing, x, xa, out, oa, count):
    """``count`` (a multiple of LANES) floats rounded to bfloat16."""

    def store(e: Emitter, value: Any, target: Any, at: Any) -> None:
        narrow = ir.VectorType(BFLOAT, LANES)
        place = e.builder.bitcast(e.at(target, e.times(at, LANES // 2)), narrow.as_pointer())
        e.builder.store(e.builder.fptrunc(value, narrow), place, align=4)

    return _of_vectors(store, x, out)


@intrinsic
def _paired_blocks(typing, x, out, oa, step, blocks):
    """Floats rounded to bfloat16: `SIDE` pairs, and the next ones ``step`` words behind these, ``blocks`` times."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not TILES:  # callers never come here
            return context.get_dummy_value()
        e = Emitter(context, builder, signature, args)
        x, out, oa, step, blocks = e.args
        target = e.at(out, oa)
        with cgutils.for_range(builder, blocks) as loop:
            low = e.at(x, e.times(loop.index, 2 * SIDE))
            pairs = e.bfloat16_of_two(e.load(low), e.load(e.at(low, step.type(LANES))))
            e.store(pairs, e.at(target, builder.mul(loop.index, step)))
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, out, n, n, n), emit


@intrinsic
def _rounded_row(typing, x, xa, out, oa, count):
    """The same as float32, where those are multiplied."""

    def store(e: Emitter, value: Any, target: Any, at: Any) -> None:
        place = e.builder.bitcast(e.at(target, e.times(at, LANES)), _FLOAT_LANES.as_pointer())
        e.builder.store(_rounded_lanes(e, value), place, align=4)

    return _of_vectors(store, x, out)


def _of_vectors(store: Any, x: Any, out: Any) -> Any:
    """What an intrinsic returns that has ``store(emitter, vector, target, its number)`` called for each of a row."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        x, xa, out, oa, count = e.args
        source, target = e.at(x, xa), e.at(out, oa)
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            store(e, e.load(e.at(source, e.times(loop.index, LANES))), target, loop.index)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, out, n, n), emit


def _rounded_lanes(e: Emitter, value: Any) -> Any:
    """A vector rounded to bfloat16, by integers: LLVM has no instruction for it where the CPU has none."""
    words = e.builder.zext(e.bfloat16_bits(value), _INT_LANES)
    return e.builder.bitcast(e.builder.shl(words, ir.Constant(_INT_LANES, [16] * LANES)), _FLOAT_LANES)


@intrinsic
def _rounded(typing, value):
    """A float rounded to bfloat16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if NATIVE:
            return builder.fpext(builder.fptrunc(args[0], BFLOAT), ir.FloatType())
        e = Emitter(context, builder, signature, args)
        return builder.extract_element(_rounded_lanes(e, e.fill(e.args[0])), ir.IntType(32)(0))

    return types.float32(types.float32), emit


# --- as integers ---------------------------------------------------------------------------------------------------

LARGEST = 32767
"""Of the integers that rows become."""

_LEAST, _LEAST_INVERSE = 1e-33, 1e-38
"""Of a part's largest magnitude, so that neither its scale nor the scale's inverse is 0 or infinite; of the inverse,
so that of numbers with an infinite one among them that one stays."""


@register_jitable
def part_depth(depth: int, groups: int) -> int:
    """Numbers of a row that share a scale where rows become integers: a *part*, of which groups of inputs have some."""
    return 32 if depth // groups % 32 == 0 else 16


@intrinsic
def row_integers(typing, x, xa, out, oa, count, scales, sa):
    """``count`` (a multiple of LANES) floats as int16, rounded half to even, of a scale, which goes to ``scales[sa]``.

    Returns the integers' sum. Where one of the floats is NaN, the scale is; where one is infinite, the scale is, and
    all but the infinite ones are 0.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        x, xa, out, oa, count, scales, sa = e.args
        source, target = e.at(x, xa), builder.bitcast(e.at(out, oa), _I16.as_pointer())
        vectors = builder.udiv(count, count.type(LANES))
        largest = e.absmax(source, vectors)
        small = builder.fcmp_ordered("<", largest, largest.type(_LEAST))
        largest = builder.select(small, largest.type(_LEAST), largest)
        builder.store(builder.fdiv(largest, largest.type(LARGEST)), e.at(scales, sa))
        inverse = builder.fdiv(largest.type(LARGEST), largest)
        none = builder.fcmp_ordered("<", inverse, largest.type(_LEAST_INVERSE))
        inverse = e.fill(builder.select(none, largest.type(_LEAST_INVERSE), inverse))
        low, high, total = e.fill(-float(LARGEST)), e.fill(float(LARGEST)), e.variable(constant(_INT_LANES, 0))
        with cgutils.for_range(builder, vectors) as loop:
            at = e.times(loop.index, LANES)
            number = e.larger(builder.fmul(e.load(e.at(source, at)), inverse), low)
            number = builder.select(builder.fcmp_ordered("<", number, high), number, high)
            integers = e.round_to_int16(number)
            e.store(integers, e.at(target, at))
            e.update(total, builder.add(e.value(total), builder.sext(integers, _INT_LANES)))
        return builder.extract_element(e.fold([e.value(total)], builder.add), _I32(0))

    n = types.intp
    return types.int32(x, n, out, n, n, scales, n), emit
