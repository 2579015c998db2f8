# mypy: ignore-errors
"""Products of rows in bfloat16 in AMX's tiles.

A tile has up to 16 rows of 64 bytes: 16 rows of ``x``, each with 32 numbers of depth; or 16 pairs of depth of what they
are multiplied with, each of 16 columns; or 16 rows of 16 sums. `TDPBF16PS` multiplies the first with the second and
adds to the third, at eight times the rate of vectors. Few rows are no reason to use these instead: weights come no
faster from memory, and other sums would be rounded otherwise. Tiles whose rows lie side by side come fastest.

An output is the sum over blocks of 32 of depth, one after the other; in a block first all even and all odd products
are summed. That is one order whatever rows and columns are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.simd import ISA, Emitter

_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
_POINTER = _BYTE.as_pointer()

SIDE = 16
"""Rows of a tile at most, its columns of 32 bits, and pairs of depth."""

MOST_ROWS = 2 * SIDE
"""Rows that are multiplied at once."""

ROW_BYTES = 64
"""Bytes of a tile's row; and of a cache line."""

TILE_BYTES = SIDE * ROW_BYTES

BLOCK = 2 * SIDE
"""Numbers of depth that tiles multiply at once; with `HALVES` half as many."""

HALVES = MOST_ROWS + 1
"""Added to a number of rows: tiles are shaped for half a block."""

_X, _WEIGHTS = (4, 5), (6, 7)
"""Tiles, by number, where two of rows are multiplied with two of columns; sums are those from 0 on."""
_ONE_X, _SOME_WEIGHTS = 4, (5, 6, 7, 5)
"""The same where one of rows is multiplied with up to four of columns."""


def _configuration(rows: int) -> list[int]:
    """The 64 bytes that say what shape each tile has (palette 1), for so many rows of ``x``."""
    first, second = min(rows, SIDE), max(rows - SIDE, 0)
    of_rows = [first, first, second, second, first, second] if second else [first] * 5 + [SIDE]
    return _shapes([*of_rows, SIDE, SIDE], [ROW_BYTES] * 8)


def _halved(rows: int) -> list[int]:
    """The same where a tile of rows, and those that it is multiplied with, have half a block of depth."""
    pairs = SIDE // 2
    widths = [*[ROW_BYTES] * _ONE_X, ROW_BYTES // 2, *[ROW_BYTES] * 3]
    return _shapes([*[min(rows, SIDE)] * 5, pairs, pairs, pairs], widths)


def _shapes(heights: list[int], widths: list[int]) -> list[int]:
    return [1, *[0] * 15, *(byte for width in widths for byte in (width, 0)), *[0] * 16, *heights, *[0] * 8]


def tile_call(builder: Any, name: str, *args: Any) -> None:
    """Emit an instruction; tiles are given by their numbers."""
    _call(builder, name, *(_number(arg) if isinstance(arg, int) else arg for arg in args))


def _call(builder: Any, name: str, *args: Any) -> None:
    if not ISA.amx:  # nothing is emitted where callers never come here
        return
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _number(tile: int) -> Any:
    return ir.Constant(_BYTE, tile)


@intrinsic
def configure(typing, rows):
    """Shape all tiles for so many rows, 1 to `MOST_ROWS`: up to `SIDE` are multiplied by those of one tile of rows.

    With `HALVES` more, up to `SIDE` rows of half a block.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shapes = (of(max(1, rows)) for of in (_configuration, _halved) for rows in range(MOST_ROWS + 1))
        table = bytearray(byte for shape in shapes for byte in shape)
        place = cgutils.global_constant(builder, "headwise.tiles", cgutils.make_bytearray(table))
        first = builder.bitcast(place, _POINTER)
        _call(builder, "ldtilecfg", builder.gep(first, [builder.mul(args[0], args[0].type(ROW_BYTES))]))
        return context.get_dummy_value()

    return types.void(types.intp), emit


@intrinsic
def release(typing):
    """This thread needs its tiles no more: they are not saved when another one has its core."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), emit


def emit_stay_awake(builder: Any) -> None:
    """Multiply something, to no end, where sums are stored and others are not begun; tiles are configured.

    Where tiles have multiplied nothing for 0.4 us, their next products begin 0.3 us late (found on an Emerald Rapids).
    """
    _call(builder, "tdpbf16ps", _number(0), _number(_X[0]), _number(_WEIGHTS[0]))


@intrinsic
def stay_awake(typing):
    """`emit_stay_awake`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_stay_awake(builder)
        return context.get_dummy_value()

    return types.void(), emit


def tile_sums(x_tiles: Sequence[int], by_tiles: Sequence[int]) -> Any:
    """Make ``sums[r, j] (+)= x[r] . by[:, j]`` of as many rows and columns as these tiles have.

    Arguments, addresses and bytes: ``x``; from one of its rows to the next, ``x_stride``, and from a block of depth to
    the next, ``x_step``; ``x_beyond, beyond_step``, the same of rows beyond `SIDE`; ``by``, from a pair of depth to the
    next, ``by_stride``, from `SIDE` columns to the next ones, ``by_next``, and from a block of depth to the next,
    ``by_step``; ``blocks`` of `SIDE` pairs of depth; ``sums, sums_stride``, and ``fresh``: whether they begin at 0;
    ``ahead, lines``: so many lines are prefetched that lie so many bytes behind each block of ``by``.
    """

    @intrinsic
    def run(
        typing, x, x_stride, x_step, x_beyond, beyond_step, by, by_stride, by_next, by_step, blocks, sums, sums_stride,
        fresh, ahead, lines,
    ):  # fmt: skip
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            x, x_stride, x_step, x_beyond, beyond_step, by, by_stride, by_next, by_step, blocks, *rest = e.args
            sums, sums_stride, fresh, ahead, lines = rest
            x, x_beyond, by, sums = (builder.inttoptr(place, _POINTER) for place in (x, x_beyond, by, sums))
            x_rows = tuple(zip(x_tiles, (x, x_beyond), (x_step, beyond_step), strict=False))
            cells = [
                e.at(sums, e.times(sums_stride, SIDE * row), _LONG(column * ROW_BYTES))
                for row in range(len(x_tiles))
                for column in range(len(by_tiles))
            ]
            with builder.if_else(builder.icmp_signed("!=", fresh, fresh.type(0))) as (begin, go_on):
                with begin:
                    for tile in range(len(cells)):
                        _call(builder, "tilezero", _number(tile))
                with go_on:
                    for tile, cell in enumerate(cells):
                        _call(builder, "tileloadd64", _number(tile), cell, sums_stride)
            with cgutils.for_range(builder, blocks) as loop:
                at = e.at(by, builder.mul(loop.index, by_step))
                there = e.at(at, ahead)
                with cgutils.for_range(builder, lines) as line:
                    e.prefetch(e.at(there, e.times(line.index, ROW_BYTES)))
                for tile, rows, step in x_rows:
                    place = e.at(rows, builder.mul(loop.index, step))
                    _call(builder, "tileloadd64", _number(tile), place, x_stride)
                for column, own in enumerate(by_tiles):
                    _call(builder, "tileloadd64", _number(own), e.at(at, e.times(by_next, column)), by_stride)
                    for row, tile in enumerate(x_tiles):
                        total = row * len(by_tiles) + column
                        _call(builder, "tdpbf16ps", _number(total), _number(tile), _number(own))
            for tile, cell in enumerate(cells):
                _call(builder, "tilestored64", _number(tile), cell, sums_stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 15), emit

    return run


two_by_two = tile_sums(_X, _WEIGHTS)
"""Of more than `SIDE` rows, with 32 columns."""

one_by_four, one_by_two, one_by_one = (tile_sums((_ONE_X,), _SOME_WEIGHTS[:count]) for count in (4, 2, 1))
"""Of up to `SIDE` rows, with 64, 32 and 16 columns."""


@_pasted
def multiply_columns(x, x_stride, by, by_stride, blocks, sums, sums_stride, columns, fresh):
    """As `tile_sums`, of up to `SIDE` rows, for which tiles are configured, and any multiple of `SIDE` of columns.

    Rows of ``x`` and pairs of depth of ``by`` lie in rows, with so many bytes from one to the next.
    """
    column, step = 0, SIDE * by_stride
    while column < columns:
        left, here, to = columns - column, by + 4 * column, sums + 4 * column
        if left >= 4 * SIDE:
            one_by_four(
                x, x_stride, ROW_BYTES, 0, 0, here, by_stride, ROW_BYTES, step, blocks, to, sums_stride, fresh, 0, 0
            )
            column += 4 * SIDE
        elif left >= 2 * SIDE:
            one_by_two(
                x, x_stride, ROW_BYTES, 0, 0, here, by_stride, ROW_BYTES, step, blocks, to, sums_stride, fresh, 0, 0
            )
            column += 2 * SIDE
        else:
            one_by_one(
                x, x_stride, ROW_BYTES, 0, 0, here, by_stride, ROW_BYTES, step, blocks, to, sums_stride, fresh, 0, 0
            )
            column += SIDE
