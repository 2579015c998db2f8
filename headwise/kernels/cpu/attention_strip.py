# mypy: ignore-errors
"""The softmax of a strip of 16 rows at once, whose scores AMX's tiles give faster than row by row can use them.

One row's maximum and sum take a tree of shuffles, and so do those of LANES rows, of which each is a lane at the end.
Where there are no such tiles, callers never come here, and nothing is emitted.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.attention_micro import QUANTISED, TILED_STRIP
from headwise.kernels.cpu.float8 import FLOAT8, FLOAT8_UNIT
from headwise.kernels.cpu.simd import ISA, LANES, Emitter, bit_reversed
from headwise.kernels.cpu.tiles import emit_stay_awake

_N, _LONG = types.intp, ir.IntType(64)

ROWS_AT_ONCE = 4
"""Rows whose powers are computed side by side: what each waits for leaves time for the others."""


@intrinsic
def raise_tops(typing, s, stride, width, top, total, shifts, shrinks):
    """Take rows' new maxima into their softmax: ``top``, and ``total`` shrunk by it; whether any has changed.

    s:       pointer to scores ``[TILED_STRIP, width]``, rows of ``stride`` floats; ``width`` is a multiple of LANES
    shifts:  gets what their powers are to be lowered by: 0 where nothing was seen yet, else the maximum
    shrinks: gets what all that was summed so far is to be multiplied with
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not ISA.amx:
            return context.get_constant(types.boolean, False)
        e = Emitter(context, builder, signature, args)
        s, stride, width, top, total, shifts, shrinks = e.args
        rows = [e.at(s, e.times(stride, row)) for row in range(TILED_STRIP)]
        highest = [e.variable(e.fill(-math.inf)) for _ in rows]
        with cgutils.for_range(builder, builder.udiv(width, width.type(LANES))) as loop:
            at = e.times(loop.index, LANES)
            for row, most in zip(rows, highest, strict=True):
                e.update(most, e.larger(e.load(e.at(row, at)), e.value(most)))
        emit_stay_awake(builder)
        found = e.fold(bit_reversed([e.value(most) for most in highest]), e.larger)
        before = e.load(top)
        after, nothing, none = e.larger(found, before), e.fill(-math.inf), e.fill(0.0)
        shift = builder.select(builder.fcmp_ordered(">", after, nothing), after, none)
        rose = builder.fcmp_ordered(">", after, before)
        shrink = builder.select(rose, e.exp2(builder.fsub(before, shift)), e.fill(1.0))
        for value, place in (
            (after, top), (shift, shifts), (shrink, shrinks), (builder.fmul(e.load(total), shrink), total)
        ):  # fmt: skip
            e.store(value, place)
        lanes = builder.bitcast(rose, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, lanes.type(0))

    return types.boolean(s, _N, _N, top, total, shifts, shrinks), emit


@intrinsic
def strip_powers(typing, kv, s, stride, width, shifts, scales, total):
    """``s = 2 ** (s - shifts[row]) * scales`` in place, as pairs of bfloat16; ``total`` takes the sums of the powers.

    As `attention_micro.row_exp2`, of `TILED_STRIP` rows. ``width`` is a multiple of ``2 * LANES``.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not ISA.amx:
            return context.get_dummy_value()
        e = Emitter(context, builder, signature, args)
        _, s, stride, width, shifts, scales, total = e.args
        sums = []
        for first in range(0, TILED_STRIP, ROWS_AT_ONCE):
            numbers = range(first, first + ROWS_AT_ONCE)
            rows = [e.at(s, e.times(stride, row)) for row in numbers]
            lowered = [e.fill(builder.load(e.at(shifts, _LONG(row)))) for row in numbers]
            own = [e.variable(e.fill(0.0)) for _ in numbers]
            with cgutils.for_range(builder, builder.udiv(width, width.type(2 * LANES))) as loop:
                offsets = [builder.add(e.times(loop.index, 2 * LANES), width.type(half * LANES)) for half in range(2)]
                factors = [_factor(e, kv, e.at(scales, offset)) for offset in offsets]
                for row, shift, each in zip(rows, lowered, own, strict=True):
                    powers = [e.quick_exp2(builder.fsub(e.load(e.at(row, at)), shift)) for at in offsets]
                    e.update(each, e.add(e.value(each), e.add(*powers)))
                    if factors[0] is not None:
                        powers = [builder.fmul(*both) for both in zip(powers, factors, strict=True)]
                    e.store(e.bfloat16_of_two(*powers), e.at(row, e.times(loop.index, LANES)))
            sums += [e.value(each) for each in own]
            emit_stay_awake(builder)
        e.store(e.add(e.load(total), e.fold(bit_reversed(sums), e.add)), total)
        return context.get_dummy_value()

    return types.void(kv, s, _N, _N, shifts, scales, total), emit


def _factor(e: Emitter, kv: Any, place: Any) -> Any:
    """What a vector of powers is multiplied with: the scales of its values, where they have some."""
    if kv.dtype not in QUANTISED:
        return None
    scale = e.load(place)
    return e.builder.fmul(scale, e.fill(FLOAT8_UNIT)) if kv.dtype == FLOAT8 else scale
