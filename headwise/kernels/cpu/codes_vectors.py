# mypy: ignore-errors
"""One row or two times a packed weight of integers, in vectors, to the sums of `codes_amx`: what is multiplied is
exact, so that these are equal to the bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.matmul_kinds import PANEL, Kind
from headwise.kernels.cpu.matmul_tiles import CODES_AHEAD, LINE, PlaceEmitter

_LONG = ir.IntType(64)

TOTAL_BYTES = PANEL * 4
"""From one row of an item's sums to the next."""


def in_vectors(kind: Kind, rows: int, vectors: int) -> Any:
    """Make the function that writes what some columns of a panel say of so many rows.

    kind: one whose numbers become floats

    Arguments, addresses and bytes: ``x``, floats, and ``x_stride`` from one row to the next; ``data``, of the first
    turn; ``units``, blocks of depth or halves of one, of so many ``turns``, of which a group has ``of_group``; behind
    every ``of_chunk`` a part ends; ``offset`` of the codes; ``scales``, ``minima`` (0: none); ``sums`` of the rows by
    group, and ``sums_stride`` from one row to the next; ``totals``, where it goes.
    """
    cells = [(row, v) for row in range(rows) for v in range(vectors)]

    @intrinsic
    def run(
        typing, x, x_stride, data, turns, units, of_group, of_chunk, offset, scales, minima, sums, sums_stride, totals
    ):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = PlaceEmitter(context, builder, signature, args)
            x, x_stride, data, turns, units, of_group, of_chunk, offset, scales, minima, *rest = e.args
            sums, sums_stride, totals = rest
            has_minima = builder.icmp_signed("!=", minima, minima.type(0))
            x, data, scales, minima, sums, totals = e.pointers(x, data, scales, minima, sums, totals)
            parts, own = [_zeros(e, len(cells)), _zeros(e, len(cells))]
            prepared = kind.prepare(e, offset)
            with cgutils.for_range(builder, units) as loop:
                first = builder.mul(loop.index, turns)
                of_unit = _sum_unit(e, kind, rows, vectors, (x, x_stride), data, turns, first, prepared)
                group, within = builder.udiv(loop.index, of_group), builder.urem(loop.index, of_group)
                in_chunk = builder.urem(loop.index, of_chunk)
                begins = _either_is(e, (within, in_chunk), (_LONG(0), _LONG(0)))
                for part, both in zip(parts, of_unit, strict=True):
                    e.update(part, builder.fadd(builder.select(begins, e.fill(0.0), e.value(part)), both))
                behind = [builder.add(number, _LONG(1)) for number in (within, in_chunk)]
                with builder.if_then(_either_is(e, behind, (of_group, of_chunk))):
                    at = e.times(group, PANEL * 2)
                    e.prefetch_factors(e.at(scales, at))
                    factors = [e.halves(e.at(scales, at), v) for v in range(vectors)]
                    for (_, v), part, total in zip(cells, parts, own, strict=True):
                        e.update(total, e.multiply_add(e.value(part), factors[v], e.value(total)))
                    is_first = builder.icmp_signed("<=", within, in_chunk)
                    with builder.if_then(builder.and_(has_minima, is_first)):
                        e.prefetch_factors(e.at(minima, at))
                        least = [e.halves(e.at(minima, at), v) for v in range(vectors)]
                        here = e.at(sums, e.times(group, 4))
                        for (row, v), total in zip(cells, own, strict=True):
                            of_row = e.number(e.at(here, e.times(sums_stride, row)))
                            e.update(total, e.multiply_add(of_row, least[v], e.value(total)))
            for (row, v), total in zip(cells, own, strict=True):
                e.store(e.value(total), e.at(totals, _LONG(row * TOTAL_BYTES + v * e.VECTOR_BYTES)))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 13), emit

    return run


def _sum_unit(
    e: PlaceEmitter,
    kind: Kind,
    rows: int,
    vectors: int,
    x: tuple[Any, Any],
    data: Any,
    turns: Any,
    first: Any,
    prepared: Any,
) -> list[Any]:
    """What a unit says, whose ``first`` turn has that number: all even and all odd products are summed, and then both.

    x: of the first row, and the bytes from there to the next
    """
    halves = _zeros(e, rows * vectors), _zeros(e, rows * vectors)
    with cgutils.for_range(e.builder, turns) as loop:
        turn = e.builder.add(first, loop.index)
        here, codes = e.at(x[0], e.times(turn, 4 * kind.x_per_turn)), e.at(data, e.times(turn, kind.turn_bytes))
        for line in range(0, kind.turn_bytes, LINE):
            e.prefetch(e.at(codes, _LONG(CODES_AHEAD + line)))
        for step, operands in kind.steps(e, codes, vectors, prepared):
            for row in range(rows):
                factor = e.number(e.at(here, _LONG(4 * step), e.times(x[1], row)))
                for v, operand in enumerate(operands):
                    total = halves[step % 2][row * vectors + v]
                    e.update(total, e.multiply_add(factor, operand, e.value(total)))
    return [e.builder.fadd(e.value(even), e.value(odd)) for even, odd in zip(*halves, strict=True)]


def _zeros(e: PlaceEmitter, count: int) -> list[Any]:
    """Variables that are 0 whenever code comes here again."""
    variables = [e.variable(e.fill(0.0)) for _ in range(count)]
    for variable in variables:
        e.update(variable, e.fill(0.0))
    return variables


def _either_is(e: PlaceEmitter, numbers: Any, others: Any) -> Any:
    """Whether one of two numbers is equal to its other."""
    return e.builder.or_(*(e.builder.icmp_signed("==", *both) for both in zip(numbers, others, strict=True)))
