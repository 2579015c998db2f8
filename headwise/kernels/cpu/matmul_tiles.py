# mypy: ignore-errors
"""The inner loops of `matmul_jit`: some rows times some columns of a packed weight, in registers.

A *turn* is one round of an inner loop: as much depth as one vector of the packed weight holds. A weight's kind says
what that is, and how it becomes operands of a product (`matmul_kinds.Kind`).

Whatever the number of rows and columns of a tile, an output is summed in the same order: what a row gives does not
depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.matmul_kinds import PANEL, Kind, constant, load_integer, load_vector, splat
from headwise.kernels.cpu.simd import ISA, LANES, Emitter

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_I32, LANES)

TILE_ROWS = (6, 4, 3, 2, 1) if ISA.avx512f else (4, 3, 2, 1)
"""Rows of a tile: with its columns, what fits in the registers."""

ROW_STEP = 12
"""Rows that are a whole number of tiles, of either kind."""

VECTORS, FEW_VECTORS = (4, 2) if ISA.avx512f else (2, 2)
"""Vectors of columns of a tile; the fewer where scales need registers, too."""

VECTORS_ALONE = PANEL // LANES
"""Vectors of one row's tile: all of a panel, which is read in the order that it lies in memory."""

LINE = 64
"""Bytes of a cache line."""

FEW_ROWS = 4
"""Rows that are multiplied with a weight in less time than it takes to read that from memory, or about as much."""

CODES_AHEAD = 8192
"""Bytes of codes that are prefetched ahead of few rows. A processor's own prefetching ends with each page of 4 KiB, and
of codes, which take long to compute with, it asks for too little at a time; of numbers it does as well."""

FACTORS_AHEAD = CODES_AHEAD // 8
"""Of scales, and of minima: as far ahead, of groups of 32 codes of 4 bits, and farther of others."""


class PlaceEmitter(Emitter):
    """With what lies at addresses."""

    VECTOR_BYTES = 4 * LANES

    def pointers(self, *addresses: Any) -> list[Any]:
        """To bytes."""
        return [self.builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in addresses]

    def floats(self, place: Any) -> Any:
        """The vector of floats at a pointer."""
        return self.load(self.builder.bitcast(place, ir.FloatType().as_pointer()))

    def halves(self, place: Any, vector: int) -> Any:
        """Vector number ``vector`` of the finite float16 numbers at a pointer, as floats."""
        place = self.at(place, ir.IntType(64)(vector * LANES * 2))
        return _widened_halves(self, load_vector(self, place, ir.VectorType(_I16, LANES)))

    def prefetch_factors(self, place: Any) -> None:
        """A panel's of the group that is `FACTORS_AHEAD` of that at a pointer to bytes."""
        for line in range(0, PANEL * 2, LINE):
            self.prefetch(self.at(place, ir.IntType(64)(FACTORS_AHEAD + line)))

    def number(self, place: Any) -> Any:
        """A vector of the float at a pointer."""
        return self.fill(self.builder.load(self.builder.bitcast(place, ir.FloatType().as_pointer())))


def plain_tile(kind: Kind, rows: int, vectors: int, lines: int = 0) -> Any:
    """Make ``tile[r, j] (+)= x[r] . weight[:, j]`` of a weight without scales.

    Arguments: ``x, x_at, x_stride`` (in 32-bit numbers), ``weight, weight_at`` (bytes, of the first turn and column),
    ``turns``, ``tile, tile_at, fresh``: whether the tile begins at 0; ``ahead``: so many ``lines`` are prefetched that
    lie so many bytes behind each turn. Rows of a tile are `PANEL` apart.
    """

    @intrinsic
    def run(typing, x, xa, xs, w, wa, turns, tile, ta, fresh, ahead):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            x, xa, xs, w, wa, turns, tile, ta, fresh, ahead = e.args
            x_rows, w = [e.at(x, xa, e.times(xs, row)) for row in range(rows)], e.at(w, wa)
            cells = _cells(e, e.at(tile, ta), rows, vectors)
            is_fresh = builder.icmp_signed("!=", fresh, fresh.type(0))
            sums = [e.variable(builder.select(is_fresh, e.fill(0.0), e.load(cell))) for cell in cells]
            _sum_turns(e, kind, x_rows, w, turns, sums, vectors, None, ahead, lines)
            for cell, total in zip(cells, sums, strict=True):
                e.store(e.value(total), cell)
            return context.get_dummy_value()

        n = types.intp
        return types.void(x, n, n, w, n, n, tile, n, n, n), emit

    return run


def grouped_tile(kind: Kind, rows: int, vectors: int) -> Any:
    """As `plain_tile`, of a weight with a scale, and perhaps a minimum, per column and group of turns.

    Further arguments: ``offset`` of the codes, ``scales, minima`` (float16), ``scales_at`` (of the first group and
    column), ``sums, sums_at, sums_stride`` (of ``x`` by group, where there are minima), ``groups``, ``group_turns``,
    ``has_minima``. Of ``parts`` and ``part_turns`` only `integer_tile` makes use.
    """

    def emit(e: Emitter, a: _Grouped) -> None:
        totals = _totals(e, a, rows, vectors)
        sums = [e.variable(e.fill(0.0)) for _ in totals]
        prepared = kind.prepare(e, a.offset)
        with cgutils.for_range(e.builder, a.groups) as loop:
            for total in sums:
                e.update(total, e.fill(0.0))
            x_rows, w = a.turns_from(e, kind, rows, e.builder.mul(loop.index, a.group_turns))
            _sum_turns(e, kind, x_rows, w, a.group_turns, sums, vectors, prepared, *_of_codes(kind, rows, vectors))
            at = e.builder.add(a.sa, e.times(loop.index, PANEL))
            a.prefetch_factors(e, rows, vectors, at)
            for cell, total in enumerate(totals):
                scale = _half_vector(e, a.scales, at, cell % vectors)
                e.update(total, e.multiply_add(e.value(sums[cell]), scale, e.value(total)))
            with e.builder.if_then(e.builder.icmp_signed("!=", a.has_min, a.has_min.type(0))):
                for cell, total in enumerate(totals):
                    minimum = _half_vector(e, a.minima, at, cell % vectors)
                    row_sum = e.fill(e.builder.load(e.at(a.xsum, a.ga, e.times(a.gs, cell // vectors), loop.index)))
                    e.update(total, e.multiply_add(row_sum, minimum, e.value(total)))
        _put(e, a, totals, rows, vectors)

    return _grouped_intrinsic(emit)


def integer_tile(kind: Kind, rows: int, vectors: int) -> Any:
    """As `grouped_tile`, of rows that are integers with a scale for each ``part_turns`` of a group's turns.

    ``sums`` have three numbers of each of a row's ``parts``, ``parts`` apart: that scale, the int32 that a sum of
    integers begins with (what is taken off the codes), and what is multiplied with minima. Sums of integers are
    exact: a part's is rounded once, as it is multiplied with the scales.
    """

    def emit(e: Emitter, a: _Grouped) -> None:
        totals, builder = _totals(e, a, rows, vectors), e.builder
        sums = [e.variable(ir.Constant(_INTS, [0] * LANES)) for _ in totals]
        parts = builder.udiv(a.group_turns, a.part_turns)
        with cgutils.for_range(builder, a.groups) as group:
            at, first = builder.add(a.sa, e.times(group.index, PANEL)), builder.mul(group.index, parts)
            a.prefetch_factors(e, rows, vectors, at)
            scales = [_half_vector(e, a.scales, at, v) for v in range(vectors)]
            with cgutils.for_range(builder, parts) as loop:
                part = builder.add(first, loop.index)
                own = [e.at(a.xsum, a.ga, e.times(a.gs, row), part) for row in range(rows)]
                begins = [splat(e, load_integer(e, e.at(place, a.parts))) for place in own]
                for cell, total in enumerate(sums):
                    e.update(total, begins[cell // vectors])
                x_rows, w = a.turns_from(e, kind, rows, builder.mul(part, a.part_turns))
                _sum_turns(e, kind, x_rows, w, a.part_turns, sums, vectors, None, *_of_codes(kind, rows, vectors))
                factors = [e.fill(builder.load(place)) for place in own]
                for cell, total in enumerate(totals):
                    each = builder.fmul(builder.sitofp(e.value(sums[cell]), _FLOATS), factors[cell // vectors])
                    e.update(total, e.multiply_add(each, scales[cell % vectors], e.value(total)))
                with builder.if_then(builder.icmp_signed("!=", a.has_min, a.has_min.type(0))):
                    minima = [_half_vector(e, a.minima, at, v) for v in range(vectors)]
                    row_sums = [e.fill(builder.load(e.at(place, e.times(a.parts, 2)))) for place in own]
                    for cell, total in enumerate(totals):
                        e.update(
                            total, e.multiply_add(row_sums[cell // vectors], minima[cell % vectors], e.value(total))
                        )
        _put(e, a, totals, rows, vectors)

    return _grouped_intrinsic(emit)


class _Grouped(NamedTuple):
    """Arguments of `grouped_tile`, emitted."""

    x: Any
    xa: Any
    xs: Any
    w: Any
    wa: Any
    offset: Any
    scales: Any
    minima: Any
    sa: Any
    xsum: Any
    ga: Any
    gs: Any
    groups: Any
    group_turns: Any
    parts: Any
    part_turns: Any
    has_min: Any
    tile: Any
    ta: Any
    fresh: Any

    def prefetch_factors(self, e: Emitter, rows: int, vectors: int, at: Any) -> None:
        """Of few rows, the scales and minima that lie `FACTORS_AHEAD` bytes behind those of ``vectors`` at ``at``."""
        ahead = range(FACTORS_AHEAD, FACTORS_AHEAD + vectors * LANES * 2, LINE) if rows <= FEW_ROWS else ()
        for byte in ahead:
            for factors in (self.scales, self.minima):  # where there are no minima, what lies there is harmless
                e.prefetch(e.at(factors, at, at.type(byte // 2)))

    def turns_from(self, e: Emitter, kind: Kind, rows: int, turn: Any) -> tuple[list[Any], Any]:
        """Where all rows, and the weight, are at a turn."""
        x_at = e.builder.add(self.xa, e.times(turn, kind.x_per_turn))
        x_rows = [e.at(self.x, x_at, e.times(self.xs, row)) for row in range(rows)]
        return x_rows, e.at(self.w, self.wa, e.times(turn, kind.turn_bytes))


def _grouped_intrinsic(emit: Any) -> Any:
    """An intrinsic of the arguments `_Grouped`, which ``emit(e, a)`` emits."""

    @intrinsic
    def run(
        typing, x, xa, xs, w, wa, offset, scales, minima, sa, xsum, ga, gs, groups, group_turns, parts, part_turns,
        has_min, tile, ta, fresh,
    ):  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            emit(e, _Grouped(*e.args))
            return context.get_dummy_value()

        n = types.intp
        signature = types.void(x, n, n, w, n, n, scales, minima, n, xsum, n, n, n, n, n, n, n, tile, n, n)
        return signature, code

    return run


def _totals(e: Emitter, a: _Grouped, rows: int, vectors: int) -> list[Any]:
    """A tile's cells, in variables: 0 if it is fresh."""
    is_fresh = e.builder.icmp_signed("!=", a.fresh, a.fresh.type(0))
    cells = _cells(e, e.at(a.tile, a.ta), rows, vectors)
    return [e.variable(e.builder.select(is_fresh, e.fill(0.0), e.load(cell))) for cell in cells]


def _put(e: Emitter, a: _Grouped, totals: list[Any], rows: int, vectors: int) -> None:
    for cell, total in zip(_cells(e, e.at(a.tile, a.ta), rows, vectors), totals, strict=True):
        e.store(e.value(total), cell)


def _cells(e: Emitter, tile: Any, rows: int, vectors: int) -> list[Any]:
    n = ir.IntType(64)
    return [e.at(tile, n(row * PANEL + v * LANES)) for row in range(rows) for v in range(vectors)]


def _of_codes(kind: Kind, rows: int, vectors: int) -> tuple[Any, int]:
    """What `_sum_turns` prefetches: of few rows, the lines that they come to later."""
    lines = -(-vectors * LANES * kind.column_bytes // LINE) if rows <= FEW_ROWS else 0
    return ir.IntType(64)(CODES_AHEAD), lines


def _sum_turns(
    e: Emitter,
    kind: Kind,
    x_rows: list[Any],
    w: Any,
    turns: Any,
    sums: list[Any],
    vectors: int,
    prepared: Any,
    ahead: Any = None,
    lines: int = 0,
) -> None:
    """Add ``turns`` turns to the variables ``sums``, ``vectors`` for each row; ``ahead, lines`` as in `plain_tile`."""
    with cgutils.for_range(e.builder, turns) as loop:
        pointer = e.at(w, e.times(loop.index, kind.turn_bytes))
        for line in range(lines):
            e.prefetch(e.at(pointer, ahead, ahead.type(line * LINE)))
        at = e.times(loop.index, kind.x_per_turn)
        for step, operands in kind.steps(e, pointer, vectors, prepared):
            for row, x in enumerate(x_rows):
                factor = kind.factor(e, e.at(x, at, at.type(step)))
                for v, operand in enumerate(operands):
                    total = sums[row * vectors + v]
                    e.update(total, kind.product(e, e.value(total), factor, operand))


def _half_vector(e: Emitter, array: Any, at: Any, vector: int) -> Any:
    """A vector of finite float16 numbers, as float32."""
    return _widened_halves(e, load_vector(e, e.at(array, at, at.type(vector * LANES)), ir.VectorType(_I16, LANES)))


def _widened_halves(e: Emitter, bits: Any) -> Any:
    """A vector of finite float16 numbers, given as their bits, as float32."""
    if ISA.f16c:
        return e.builder.fpext(e.builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)
    # By integers: LLVM would call a function for it, which is not there. Exponents are 112 apart.
    words = e.builder.zext(bits, _INTS)
    sign = e.builder.shl(e.builder.and_(words, constant(_INTS, 0x8000)), constant(_INTS, 16))
    rest = e.builder.shl(e.builder.and_(words, constant(_INTS, 0x7FFF)), constant(_INTS, 13))
    return e.builder.fmul(e.builder.bitcast(e.builder.or_(sign, rest), _FLOATS), e.fill(2.0**112))


@intrinsic
def widened_half(typing, bits):
    """A finite float16 number, given as its bits, as float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        first = builder.insert_element(ir.Constant(ir.VectorType(_I16, LANES), ir.Undefined), e.args[0], _I32(0))
        return builder.extract_element(_widened_halves(e, first), _I32(0))

    return types.float32(types.uint16), emit
