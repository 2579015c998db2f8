# mypy: ignore-errors
"""Rows in bfloat16 times a packed weight of integers, in AMX's tiles.

Integers of up to 8 bits are exact in bfloat16. Some blocks of a panel's depth become tiles, which stay in the L1 cache
while all rows of an item are multiplied with them. What tiles sum up is of one group of inputs at most, and multiplied
with its scale when it leaves them. So an output is a sum over *parts*, one after the other: a group of inputs, cut
where every fourth block ends. Of each part there is added what `tiles` says of its blocks times the scale, and behind
a group's first part its minimum times the sum of a row's inputs. That is one order whatever rows and columns are
computed together.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.codes_vectors import TOTAL_BYTES, in_vectors
from headwise.kernels.cpu.matmul_kinds import PANEL, Kind
from headwise.kernels.cpu.matmul_rows import ROWS_IN_VECTORS, groups_of
from headwise.kernels.cpu.matmul_tiles import LINE, VECTORS_ALONE, PlaceEmitter
from headwise.kernels.cpu.simd import LANES
from headwise.kernels.cpu.tiles import BLOCK, HALVES, ROW_BYTES, SIDE, TILE_BYTES, configure, tile_call

_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")

_LONG = ir.IntType(64)

COLUMN_TILES = PANEL // SIDE

BLOCK_BYTES = COLUMN_TILES * TILE_BYTES
"""Of a panel's block of depth as tiles."""

BLOCKS = 4
"""Of depth that become tiles at once."""

_BUFFERS = 4
"""Tiles of sums that are on their way to be scaled: more than one, so that the next is not waited for."""

SCRATCH = (BLOCKS * BLOCK_BYTES + _BUFFERS * TILE_BYTES) // 4
"""Floats of a thread's own that this takes."""

VECTORS_OF_TWO = 2
"""Vectors of columns that two rows are multiplied with at once."""

_CODES_AHEAD = 4096
"""Bytes of codes that are prefetched ahead, as `matmul_tiles.CODES_AHEAD`."""

_X, _WEIGHTS = 4, (5, 6, 7, 5)
"""Tiles, by number; sums are those from 0 on."""


def _expansion(kind: Kind) -> Any:
    """Make the function that writes ``turns`` turns at ``data`` as tiles at ``out``: pairs of depth, block by block."""
    pairs = kind.x_per_turn

    @intrinsic
    def expand(typing, data, turns, offset, out):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = PlaceEmitter(context, builder, signature, args)
            data, turns, offset, out = e.args
            data, out = e.pointers(data, out)
            prepared = kind.prepare(e, offset)
            with cgutils.for_range(builder, turns) as loop:
                first = e.times(loop.index, pairs)
                block = e.times(builder.udiv(first, _LONG(SIDE)), BLOCK_BYTES)
                row = e.times(builder.urem(first, _LONG(SIDE)), ROW_BYTES)
                here = e.at(out, block, row)
                turn = e.at(data, e.times(loop.index, kind.turn_bytes))
                for line in range(0, kind.turn_bytes, LINE):
                    e.prefetch(e.at(turn, _LONG(_CODES_AHEAD + line)))
                for place, operands in kind.steps(e, turn, COLUMN_TILES, prepared):
                    for column, pairs_of in enumerate(operands):
                        e.store(pairs_of, e.at(here, _LONG(column * TILE_BYTES + place * ROW_BYTES)))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), emit

    return expand


def _of_parts(halves: bool) -> tuple[Any, Any]:
    """Make the functions that add to sums what ``parts`` parts of ``each`` steps of depth say.

    halves: whether a step is half a block, as of groups of 16

    Arguments, addresses and bytes: ``x``, of the first row's block, and ``x_step`` from there to the next block;
    ``step``, the first part's, of those whose tiles are ``weights``; ``scales``, ``minima`` (0: none) of the first
    part, and ``sums`` of the first row, and ``sums_stride``, from there to the next row's; ``buffers``; ``totals``, and
    ``fresh``: whether they begin at 0.
    """

    def place_of(e: PlaceEmitter, base: Any, step: Any, block_bytes: Any, half_bytes: int) -> Any:
        if not halves:
            return e.at(base, e.builder.mul(step, block_bytes))
        block, half = e.builder.lshr(step, _LONG(1)), e.builder.and_(step, _LONG(1))
        return e.at(base, e.builder.mul(block, block_bytes), e.times(half, half_bytes))

    def multiply(e: PlaceEmitter, x: Any, x_step: Any, weights: Any, first: Any, each: Any, columns: int) -> None:
        builder = e.builder
        for column in range(columns):
            tile_call(builder, "tilezero", column)
        with cgutils.for_range(builder, each) as loop:
            step = builder.add(first, loop.index)
            tile_call(builder, "tileloadd64", _X, place_of(e, x, step, x_step, ROW_BYTES // 2), _LONG(ROW_BYTES))
            here = place_of(e, weights, step, _LONG(BLOCK_BYTES), TILE_BYTES // 2)
            for column in range(columns):
                own = _WEIGHTS[column]
                tile_call(builder, "tileloadd64", own, e.at(here, _LONG(column * TILE_BYTES)), _LONG(ROW_BYTES))
                tile_call(builder, "tdpbf16ps", column, _X, own)

    @intrinsic
    def of_a_tile(
        typing, x, x_step, weights, step, parts, each, scales, minima, sums, sums_stride, buffers, totals, fresh
    ):
        """Of `SIDE` rows and `SIDE` columns, whose sums stay in registers."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = PlaceEmitter(context, builder, signature, args)
            x, x_step, weights, step, parts, each, scales, minima, sums, sums_stride, buffers, totals, fresh = e.args
            has_minima = builder.icmp_signed("!=", minima, minima.type(0))
            x, weights, scales, minima, sums, buffers, totals = e.pointers(
                x, weights, scales, minima, sums, buffers, totals
            )
            is_fresh = builder.icmp_signed("!=", fresh, fresh.type(0))
            places = [e.at(totals, _LONG(row * TOTAL_BYTES)) for row in range(SIDE)]
            own = [e.variable(builder.select(is_fresh, e.fill(0.0), e.floats(place))) for place in places]
            with cgutils.for_range(builder, parts) as loop:
                multiply(e, x, x_step, weights, builder.add(step, builder.mul(loop.index, each)), each, 1)
                buffer = e.at(buffers, e.times(builder.and_(loop.index, _LONG(_BUFFERS - 1)), TILE_BYTES))
                tile_call(builder, "tilestored64", 0, buffer, _LONG(ROW_BYTES))
                group = e.times(loop.index, PANEL * 2)
                scale = e.halves(e.at(scales, group), 0)
                for row, total in enumerate(own):
                    of_part = e.floats(e.at(buffer, _LONG(row * ROW_BYTES)))
                    e.update(total, e.multiply_add(of_part, scale, e.value(total)))
                with builder.if_then(has_minima):
                    minimum, here = e.halves(e.at(minima, group), 0), e.at(sums, e.times(loop.index, 4))
                    for row, total in enumerate(own):
                        of_row = e.number(e.at(here, e.times(sums_stride, row)))
                        e.update(total, e.multiply_add(of_row, minimum, e.value(total)))
            for place, total in zip(places, own, strict=True):
                e.store(e.value(total), place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 13), emit

    @intrinsic
    def of_few(
        typing, rows, x, x_step, weights, step, parts, each, scales, minima, sums, sums_stride, buffers, totals, fresh
    ):
        """Of fewer ``rows``, and all columns of a panel."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = PlaceEmitter(context, builder, signature, args)
            rows, x, x_step, weights, step, parts, each, scales, minima, sums, sums_stride, *rest = e.args
            has_minima = builder.icmp_signed("!=", minima, minima.type(0))
            x, weights, scales, minima, sums = e.pointers(x, weights, scales, minima, sums)
            (buffers, totals), fresh = e.pointers(*rest[:2]), rest[2]
            columns = [_LONG(column * ROW_BYTES) for column in range(COLUMN_TILES)]
            begun = builder.select(builder.icmp_signed("!=", fresh, fresh.type(0)), rows, rows.type(0))
            with cgutils.for_range(builder, begun) as row:
                for column in columns:
                    e.store(e.fill(0.0), e.at(totals, e.times(row.index, TOTAL_BYTES), column))
            with cgutils.for_range(builder, parts) as loop:
                first = builder.add(step, builder.mul(loop.index, each))
                multiply(e, x, x_step, weights, first, each, COLUMN_TILES)
                for tile, column in enumerate(columns):
                    tile_call(builder, "tilestored64", tile, e.at(buffers, column), _LONG(TOTAL_BYTES))
                group = e.times(loop.index, PANEL * 2)
                factors = [e.halves(e.at(scales, group), column) for column in range(COLUMN_TILES)]
                with cgutils.for_range(builder, rows) as row:
                    down = e.times(row.index, TOTAL_BYTES)
                    for column, scale in zip(columns, factors, strict=True):
                        place = e.at(totals, down, column)
                        e.store(e.multiply_add(e.floats(e.at(buffers, down, column)), scale, e.floats(place)), place)
                with builder.if_then(has_minima):
                    factors = [e.halves(e.at(minima, group), column) for column in range(COLUMN_TILES)]
                    with cgutils.for_range(builder, rows) as row:
                        of_row = e.number(e.at(sums, e.times(loop.index, 4), builder.mul(row.index, sums_stride)))
                        down = e.times(row.index, TOTAL_BYTES)
                        for column, minimum in zip(columns, factors, strict=True):
                            place = e.at(totals, down, column)
                            e.store(e.multiply_add(of_row, minimum, e.floats(place)), place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 14), emit

    return of_a_tile, of_few


_of_blocks, _of_halves = _of_parts(False), _of_parts(True)


def codes_in_tiles(kind: Kind, floats: Kind) -> Any:
    """Make the function that multiplies some rows with a panel, as `matmul_panels.grouped_rows` does.

    kind:   whose numbers are pairs of bfloat16
    floats: the same as floats
    """
    expand, pairs, turn_bytes = _expansion(kind), kind.x_per_turn, kind.turn_bytes
    column_bytes = kind.column_bytes
    one, two = in_vectors(floats, 1, VECTORS_ALONE), in_vectors(floats, 2, VECTORS_OF_TWO)
    (of_a_tile, of_few), (of_a_half, of_few_halves) = _of_blocks, _of_halves

    @_pasted
    def add(some, halves, x, x_step, weights, step, parts, each, scales, minima, sums, sums_stride, buffers, to, fresh):
        """What some parts say of up to `SIDE` rows."""
        if some < SIDE and halves:
            of_few_halves(
                some, x, x_step, weights, step, parts, each, scales, minima, sums, sums_stride, buffers, to, fresh
            )
        elif some < SIDE:
            of_few(some, x, x_step, weights, step, parts, each, scales, minima, sums, sums_stride, buffers, to, fresh)
        else:
            for column in range(COLUMN_TILES):
                own, beside, down = weights + column * TILE_BYTES, scales + column * LANES * 2, to + column * ROW_BYTES
                least = minima + column * LANES * 2 if minima != 0 else minima
                if halves:
                    of_a_half(x, x_step, own, step, parts, each, beside, least, sums, sums_stride, buffers, down, fresh)
                else:
                    of_a_tile(x, x_step, own, step, parts, each, beside, least, sums, sums_stride, buffers, down, fresh)

    @_pasted
    def of_one_or_two(weight, x, x_stride, data, scales, minima, sums, sums_stride, rows, to):
        """What a panel says of one row or two."""
        unit = _unit(weight)
        turns, units, of_group = unit * weight.turns // weight.depth, weight.depth // unit, _of_group(weight)
        of_chunk = BLOCKS * BLOCK // unit
        if rows == 1:
            one(
                x, x_stride, data, turns, units, of_group, of_chunk, weight.offset, scales, minima, sums, sums_stride,
                to,
            )  # fmt: skip
            return
        for column in range(0, PANEL, VECTORS_OF_TWO * LANES):
            least = minima + column * 2 if minima != 0 else minima
            two(
                x, x_stride, data + column * column_bytes, turns, units, of_group, of_chunk, weight.offset,
                scales + column * 2, least, sums, sums_stride, to + column * 4,
            )  # fmt: skip

    @_pasted
    def add_chunk(weight, block, beyond, some, x, tiles, scales, minima, sums, sums_stride, to):
        """What the blocks before ``beyond`` say of up to `SIDE` rows, whose first block lies at ``x``."""
        unit, of_group = _unit(weight), _of_group(weight)
        halves, first, end = unit < BLOCK, block * BLOCK // unit, beyond * BLOCK // unit
        step, x_step = first, ROW_BYTES * some
        while step < end:
            group, within = step // of_group, step % of_group
            parts, each = 1, min(of_group - within, end - step)
            if within == 0 and each == of_group:
                parts = (end - step) // of_group
            of_groups = group * PANEL * 2
            least = minima + of_groups if minima != 0 and within == 0 else 0
            add(
                some, halves, x + block * x_step, x_step, tiles, step - first, parts, each, scales + of_groups, least,
                sums + group * 4, sums_stride, tiles + BLOCKS * BLOCK_BYTES, to, step == 0,
            )  # fmt: skip
            step += parts * each

    @_pasted
    def run(weight, factors, stride, sums, row, rows, panel, turn, turns, tile, ahead):
        """Of all turns of a panel, whichever are asked for: `matmul_jit` asks for all."""
        if rows <= 0:  # the last blocks of a product may have none
            return
        groups = groups_of(weight)
        first, own, sums_stride = sums.ctypes.data + row * groups * 4, panel * groups * PANEL * 2, groups * 4
        scales, minima = weight.scales + own, weight.minima + own if weight.has_minima else 0
        data, x, to = weight.data + panel * weight.turns * turn_bytes, factors.ctypes.data, tile.ctypes.data
        if row == 0 and rows <= ROWS_IN_VECTORS:  # all that there are, or the first block would have more
            of_one_or_two(weight, x, 4 * stride, data, scales, minima, first, sums_stride, rows, to)
            return
        tiles, block, last, halves = to + (len(tile) - SCRATCH) * 4, 0, weight.depth // BLOCK, _unit(weight) < BLOCK
        shape = 0
        while block < last:
            beyond = min(block + BLOCKS, last)
            expand(data + block * SIDE // pairs * turn_bytes, (beyond - block) * SIDE // pairs, weight.offset, tiles)
            done = 0
            while done < rows:
                some = min(SIDE, rows - done)
                if some != shape:
                    configure(some + HALVES * halves)
                    shape = some
                add_chunk(
                    weight, block, beyond, some, x + 2 * weight.depth * (row + done), tiles, scales, minima,
                    first + done * sums_stride, sums_stride, to + done * TOTAL_BYTES,
                )  # fmt: skip
                done += some
            block = beyond

    return run


@_pasted
def _unit(weight):
    """Of depth: a block, or half of one where groups are no whole blocks."""
    return BLOCK // 2 if weight.depth // groups_of(weight) % BLOCK != 0 else BLOCK


@_pasted
def _of_group(weight):
    """Units of a group."""
    return weight.depth // groups_of(weight) // _unit(weight)
