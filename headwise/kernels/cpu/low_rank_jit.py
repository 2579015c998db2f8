# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.low_rank`: what rows' adapters add to a product, by several threads.

Rows that follow one another and go by one adapter are a *group* of at most `MOST_ROWS`. A group is multiplied with its
own adapter's matrices and with no other's: first to as many numbers as the adapter has ranks, which are *between*, then
from these to what is added. A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import call_at, float_matrix_at, floats_at, ints_at, longs_at, record_at
from headwise.kernels.cpu.matmul_jit import PLAIN, TILE, finish
from headwise.kernels.cpu.matmul_kinds import PANEL
from headwise.kernels.cpu.records import ADAPTER, ADDING, LOW_RANK, UP
from headwise.kernels.cpu.simd import FLOAT, LANES, Emitter, element_bytes
from headwise.kernels.cpu.threads import fetch_add, take_item, wait_for

MOST_ROWS = 4 if LANES == 16 else 2
"""Rows of a group at most: their sums stay in registers."""

RANKS = LANES
"""Ranks that are computed side by side: a panel of ``down``."""

HALF = PANEL // 2
"""Outputs that are: a panel of ``up``. Where outputs are a gate and another factor, they alternate by as many."""

PIECE = 4
"""Panels of `PANEL` outputs that a thread takes at a time."""

CHAINS = 4
"""Sums of one number that are computed side by side: each addition waits for the one before it."""

AHEAD_BYTES = 4096
"""How far ahead matrices are prefetched. Each is read once in a step, in pieces too short for the processor to follow
them; of steps of few rows, which are of several adapters, that is most of the cost."""

DOWN_INTEGERS, UP_INTEGERS = 11, 16

_MATH = {"nsz", "arcp", "contract"}
_pasted = numba.njit(inline="always", fastmath=_MATH, nogil=True, error_model="numpy")
_low_rank_at, _adapter_at, _up_at, _adding_at = map(record_at, (LOW_RANK, ADAPTER, UP, ADDING))
_ADAPTER_BYTES, _UP_BYTES = ADAPTER.itemsize, UP.itemsize


def _row_product(rows: int, vectors: int, chains: int, *, is_narrow: bool) -> Any:
    """Make ``out[r] = x[r, :count] @ panel``, float32 ``[rows, vectors * LANES]``.

    Arguments: ``x, x_stride, panel, count, out, out_stride``: addresses, and strides in floats. is_narrow: the panel
    ``[count, vectors * LANES]`` is bfloat16
    """
    kind = ir.IntType(16) if is_narrow else FLOAT

    @intrinsic
    def product(typing, x, x_stride, panel, count, out, out_stride):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            x, x_stride, panel, count, out, out_stride = e.args
            x, out = (builder.inttoptr(place, FLOAT.as_pointer()) for place in (x, out))
            panel = builder.inttoptr(panel, kind.as_pointer())
            sums = [[e.variable(e.fill(0.0)) for _ in range(rows * vectors)] for _ in range(chains)]

            def add(at: Any, chain: Any) -> None:
                place = e.at(panel, e.times(at, vectors * LANES))
                columns = [e.load(e.at(place, at.type(vector * LANES))) for vector in range(vectors)]
                for row in range(rows):
                    number = e.fill(builder.load(e.at(x, e.times(x_stride, row), at)))
                    for total, column in zip(chain[row * vectors : (row + 1) * vectors], columns, strict=True):
                        e.update(total, e.multiply_add(number, column, e.value(total)))

            turns = builder.udiv(count, count.type(chains))
            with cgutils.for_range(builder, turns) as loop:
                first = e.times(loop.index, chains)
                _prefetch(e, e.at(panel, e.times(first, vectors * LANES)), chains * vectors * LANES)
                for place, chain in enumerate(sums):
                    add(builder.add(first, first.type(place)), chain)
            whole = e.times(turns, chains)
            with cgutils.for_range(builder, builder.sub(count, whole)) as loop:
                add(builder.add(whole, loop.index), sums[0])
            for index, parts in enumerate(zip(*sums, strict=True)):
                place = e.at(out, e.times(out_stride, index // vectors), count.type(index % vectors * LANES))
                e.store(_total(e, [e.value(part) for part in parts]), place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), emit

    return product


def _prefetch(e: Emitter, place: Any, count: int) -> None:
    """What lies `AHEAD_BYTES` behind these numbers."""
    each = element_bytes(place)
    for line in range(0, count * each, 64):
        e.prefetch(e.at(place, ir.IntType(64)((AHEAD_BYTES + line) // each)))


def _total(e: Emitter, parts: list[Any]) -> Any:
    """Two by two, in an order that does not depend on the rows beside."""
    while len(parts) > 1:
        parts = [e.add(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _by_rows(vectors: int, chains: int, *, is_narrow: bool) -> Any:
    """`_row_product` of a group, which has any number of rows up to `MOST_ROWS`."""
    products = [_row_product(rows, vectors, chains, is_narrow=is_narrow) for rows in range(1, MOST_ROWS + 1)]
    (one, two), (three, four) = products[:2], products[-2:]  # of two at most the last ones are the first ones again

    @_pasted
    def product(rows, x, x_stride, panel, count, out, out_stride):
        if rows == 1:
            one(x, x_stride, panel, count, out, out_stride)
        elif rows == 2:
            two(x, x_stride, panel, count, out, out_stride)
        elif rows == 3:
            three(x, x_stride, panel, count, out, out_stride)
        else:
            four(x, x_stride, panel, count, out, out_stride)

    return product


@_pasted
def down_items(low_rank, groups):
    """In how many items the numbers between of so many groups are cut."""
    return _low_rank_at(low_rank).rank_panels * groups


@_pasted
def up_items(low_rank, groups):
    """In how many items what is added to the rows of so many groups is."""
    return -(-_low_rank_at(low_rank).panels // PIECE) * groups


def _downs(*, is_narrow: bool) -> Any:
    """Make what computes the numbers between: one thread's share of them, items until none is left.

    All is given by addresses: low_rank: a `LOW_RANK`; x, between: float32 rows, so many floats apart; groups: int32
    ``[count, 3]``, adapter, first row and rows of each; counters: as those of a product, see `matmul_jit`
    """
    product, number_bytes = _by_rows(1, CHAINS, is_narrow=is_narrow), 2 if is_narrow else 4

    @_pasted
    def downs(low_rank, x, x_row, between, between_row, groups, count, counters, counter, thread, threads):
        own, items = _low_rank_at(low_rank), down_items(low_rank, count)
        groups, counters = ints_at(groups, 3 * count), longs_at(counters, counter + 1 + threads)
        panel_bytes = own.inputs * RANKS * number_bytes
        item, share = take_item(counters, counter + 1, thread, threads, items)
        while item < items:
            panel, group = item // count, item % count
            first, rows = np.int64(groups[3 * group + 1]), groups[3 * group + 2]
            its = _adapter_at(own.adapters + groups[3 * group] * _ADAPTER_BYTES)
            if panel < its.rank_panels:
                source, target = x + first * x_row * 4, between + (first * between_row + panel * RANKS) * 4
                product(rows, source, x_row, its.down + panel * panel_bytes, own.inputs, target, between_row)
            fetch_add(counters, counter)
            item, share = take_item(counters, counter + 1, share, threads, items)

    return downs


@_pasted
def _clear(tile, rows):
    for r in range(rows):
        half = floats_at(tile + r * PANEL * 4, HALF)
        for c in range(HALF):
            half[c] = 0.0


@_pasted
def _add_rows(source, source_row, target, target_row, rows, columns):
    """Add rows, so many floats apart, to others."""
    for r in range(rows):
        here, there = floats_at(source + r * source_row * 4, columns), floats_at(target + r * target_row * 4, columns)
        for c in range(columns):
            there[c] += here[c]


def _panel(*, is_narrow: bool) -> Any:
    """Make what computes a panel of what an adapter adds to a group, into a tile; returns whether that is anything."""
    product = _by_rows(HALF // LANES, 1, is_narrow=is_narrow)

    @_pasted
    def panel(ups, number, between, between_row, tile, rows):
        has_any = False
        for half in range(2):
            place = tile + half * HALF * 4
            up = _up_at(ups + (2 * number + half) * _UP_BYTES)
            if up.ranks > 0:
                has_any = True
                product(rows, between + up.first_rank * 4, between_row, up.matrix, up.ranks, place, PANEL)
            else:
                _clear(place, rows)
        return has_any

    return panel


def _ups(*, is_narrow: bool) -> Any:
    """Make what adds to a product what is made of the numbers between, and activates it: one thread's share.

    Arguments as those of `_downs`. made: the product ``[rows, columns]``, which is added to in place where there is no
    activation; else what comes out of that goes to ``out [rows, out_columns]``, and ``groups`` are of all rows. A group
    of a negative adapter has none
    """
    multiplied = _panel(is_narrow=is_narrow)

    @_pasted
    def ups(
        low_rank, between, between_row, made, columns, epilogue, out, out_columns, rows, groups, count, counters,
        counter, tile, thread, threads,
    ):  # fmt: skip
        own, items = _low_rank_at(low_rank), up_items(low_rank, count)
        groups, counters = ints_at(groups, 3 * count), longs_at(counters, counter + 1 + threads)
        sums, no_bias = floats_at(tile, MOST_ROWS * PANEL), floats_at(tile, 0)
        results = float_matrix_at(out, rows, out_columns)
        item, share = take_item(counters, counter + 1, thread, threads, items)
        while item < items:
            piece, group = item // count, item % count
            adapter, first, some = groups[3 * group], np.int64(groups[3 * group + 1]), groups[3 * group + 2]
            source, ups = between + first * between_row * 4, np.int64(0)
            if adapter >= 0:
                ups = _adapter_at(own.adapters + adapter * _ADAPTER_BYTES).ups
            for panel in range(piece * PIECE, min((piece + 1) * PIECE, own.panels)):
                here, width = made + (first * columns + panel * PANEL) * 4, min(PANEL, columns - panel * PANEL)
                has_any = ups != 0 and multiplied(ups, panel, source, between_row, tile, some)
                if epilogue == PLAIN:
                    if has_any:
                        _add_rows(tile, PANEL, here, columns, some, width)
                    continue
                if ups == 0:
                    _clear(tile, some)
                    _clear(tile + HALF * 4, some)
                _add_rows(here, columns, tile, PANEL, some, width)
                finish(sums, epilogue, no_bias, results, first, some, panel, False)
            fetch_add(counters, counter)
            item, share = take_item(counters, counter + 1, share, threads, items)

    return ups


_wide_downs, _narrow_downs = (_downs(is_narrow=is_narrow) for is_narrow in (False, True))
_wide_ups, _narrow_ups = (_ups(is_narrow=is_narrow) for is_narrow in (False, True))


def _down_float32(low_rank, x, x_row, between, between_row, groups, count, counters, counter, thread, threads):
    _wide_downs(low_rank, x, x_row, between, between_row, groups, count, counters, counter, thread, threads)


def _down_bfloat16(low_rank, x, x_row, between, between_row, groups, count, counters, counter, thread, threads):
    _narrow_downs(low_rank, x, x_row, between, between_row, groups, count, counters, counter, thread, threads)


def _up_float32(
    low_rank, between, between_row, made, columns, epilogue, out, out_columns, rows, groups, count, counters, counter,
    tile, thread, threads,
):  # fmt: skip
    _wide_ups(
        low_rank, between, between_row, made, columns, epilogue, out, out_columns, rows, groups, count, counters,
        counter, tile, thread, threads,
    )  # fmt: skip


def _up_bfloat16(
    low_rank, between, between_row, made, columns, epilogue, out, out_columns, rows, groups, count, counters, counter,
    tile, thread, threads,
):  # fmt: skip
    _narrow_ups(
        low_rank, between, between_row, made, columns, epilogue, out, out_columns, rows, groups, count, counters,
        counter, tile, thread, threads,
    )  # fmt: skip


@cache
def down_of(dtype: str) -> Any:
    """The compiled `_downs` of matrices kept in ``float32`` or ``bfloat16``, as a C function of `DOWN_INTEGERS`."""
    function = _down_float32 if dtype == "float32" else _down_bfloat16
    return machine_code.unit(function, DOWN_INTEGERS, fastmath=_MATH, error_model="numpy")


@cache
def up_of(dtype: str) -> Any:
    """The compiled `_ups`, as a C function of `UP_INTEGERS`."""
    function = _up_float32 if dtype == "float32" else _up_bfloat16
    return machine_code.unit(function, UP_INTEGERS, fastmath=_MATH, error_model="numpy")


def _add_in_place(address, thread):
    own = _adding_at(address)
    counters, ups = longs_at(own.counters, 2 * (1 + own.threads)), 1 + own.threads
    call_at(
        own.down,
        (
            own.low_rank, own.x, own.x_row, own.between, own.between_row, own.groups, own.adapted, own.counters,
            np.int64(0), thread, own.threads,
        ),
    )  # fmt: skip
    wait_for(counters, 0, down_items(own.low_rank, own.adapted))
    call_at(
        own.up,
        (
            own.low_rank, own.between, own.between_row, own.made, own.columns, np.int64(PLAIN), own.made, own.columns,
            own.rows, own.groups, own.adapted, own.counters, ups, own.tiles + thread * TILE * 4, thread, own.threads,
        ),
    )  # fmt: skip


@cache
def add_in_place() -> Any:
    """The compiled function of an `ADDING`'s address and a thread: its share of all that is added."""
    return machine_code.unit(_add_in_place, 2, error_model="numpy")
