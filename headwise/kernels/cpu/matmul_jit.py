# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.matmul`: products of some rows with a packed weight, by several threads.

One packed copy of a weight serves one row and thousands. The work is cut into *items*: a panel of columns times a
block of rows. Threads take items from a counter; an item is computed in tiles that stay in registers
(`matmul_tiles`), into a scratch of the thread's own, from where an epilogue writes it: with a bias, or as the product
of a gated MLP's two halves.

Before that, the rows become what the tiles multiply (bfloat16, mostly), by the same threads: whoever is through with
the one waits until all of it is done, and goes on with the other. Nobody waits for a thread, only for work that some
thread has taken: so it does not matter how many there really are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.matmul_tiles import (
    BFLOAT,
    NARROW,
    NATIVE,
    PANEL,
    TILE_ROWS,
    WIDE,
    Bfloat16,
    Float32,
    Int4,
    Int8,
    Kind,
    grouped_tile,
    plain_tile,
)
from headwise.kernels.cpu.simd import LANES, Emitter
from headwise.kernels.cpu.threads import fetch_add, use_threads, wait_for

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
"""Kinds of packed weights."""

ROW_BLOCK = 96
"""Rows of an item: they stay in the L2 cache beside a panel."""

DEPTH_BYTES = 1 << 18
"""Bytes of a panel that are multiplied with all rows of an item before the next ones are: they stay in the L2 cache."""

THREAD_FLOPS = 400_000
"""Multiplications that are worth waking a thread for, where weights come from caches."""

THREAD_BYTES = 1 << 17
"""Bytes of weights that are."""

PLAIN, SILU, GELU = range(3)
"""Epilogues: as it is; or ``act(gate) * up``, where a panel is half gate, half up."""

_MATH = {"nsz", "arcp", "contract"}
_inlined = numba.njit(forceinline=True, fastmath=_MATH, nogil=True, error_model="numpy")
_compiled = numba.njit(fastmath=_MATH, nogil=True, error_model="numpy")

_FLOAT_LANES = ir.VectorType(ir.FloatType(), LANES)


class Weight(NamedTuple):
    """A packed weight. ``data`` are bytes, ``scales`` and ``minima`` float16 ``[panels, groups, PANEL]`` as their bits.

    kind:        `FLOAT32` to `INT4`
    columns:     of the weight; the last panel may have more
    depth:       numbers of a row that it multiplies, padded to whole turns
    turns:       of a panel
    group_turns: that share a scale
    offset:      taken off each code
    """

    kind: Any
    data: Any
    scales: Any
    minima: Any
    columns: Any
    depth: Any
    turns: Any
    group_turns: Any
    has_minima: Any
    offset: Any


# --- rows, as the tiles multiply them ------------------------------------------------------------------------------


@intrinsic
def _narrow_row(typing, x, xa, out, oa, count):
    """``count`` (a multiple of LANES) floats rounded to bfloat16: as such, or as float32 where those are multiplied."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        x, xa, out, oa, count = e.args
        source, target = e.at(x, xa), e.at(out, oa)
        narrow = ir.VectorType(BFLOAT, LANES)
        with cgutils.for_range(builder, builder.udiv(count, count.type(LANES))) as loop:
            value = builder.fptrunc(e.load(e.at(source, e.times(loop.index, LANES))), narrow)
            if NATIVE:
                place = e.at(target, e.times(loop.index, LANES // 2))
                builder.store(value, builder.bitcast(place, narrow.as_pointer()), align=4)
            else:
                place = builder.bitcast(e.at(target, e.times(loop.index, LANES)), _FLOAT_LANES.as_pointer())
                builder.store(builder.fpext(value, _FLOAT_LANES), place, align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, out, n, n), emit


@intrinsic
def _rounded(typing, value):
    """A float rounded to bfloat16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.fptrunc(args[0], BFLOAT), ir.FloatType())

    return types.float32(types.float32), emit


@_compiled
def _prepare_row(x, row, weight, factors, stride, sums, scratch):
    """Row ``row`` of ``x`` as the factors of a narrow weight, and its sums by group."""
    count = x.shape[1]
    scratch[:count] = x[row]
    scratch[count:] = 0.0
    _narrow_row(scratch, 0, factors, row * stride, len(scratch))
    if weight.has_minima:
        groups = weight.turns // weight.group_turns
        each = weight.depth // groups
        for group in range(groups):
            total = np.float32(0.0)
            for i in range(group * each, (group + 1) * each):
                total += _rounded(scratch[i])
            sums[row * groups + group] = total


# --- epilogues ------------------------------------------------------------------------------------------------------


@intrinsic
def _gate(typing, tile, gate_at, up_at, is_gelu):
    """``tile[gate_at:] = act(tile[gate_at:]) * tile[up_at:]`` for LANES numbers.

    ``silu(g) = g / (1 + exp(-g))``; gelu with the tanh approximation is ``g / (1 + exp(-2 z))``,
    ``z = sqrt(2 / pi) * (g + 0.044715 * g ** 3)``.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        tile, gate_at, up_at, is_gelu = e.args
        place = e.at(tile, gate_at)
        gate, up = e.load(place), e.load(e.at(tile, up_at))
        scaled = e.fill(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
        cube = e.multiply_add(builder.fmul(builder.fmul(gate, gate), gate), e.fill(0.044715), gate)
        is_gelu = builder.icmp_signed("!=", is_gelu, is_gelu.type(0))
        exponent = builder.select(is_gelu, builder.fmul(cube, scaled), builder.fmul(gate, e.fill(-math.log2(math.e))))
        limit = e.fill(126.0)
        exponent = builder.select(builder.fcmp_ordered(">", exponent, limit), limit, exponent)
        result = builder.fdiv(gate, builder.fadd(e.fill(1.0), e.exp2(exponent)))
        e.store(builder.fmul(result, up), place)
        return context.get_dummy_value()

    n = types.intp
    return types.void(tile, n, n, n), emit


@_compiled
def _finish(weight, tile, epilogue, bias, out, row, rows, column, width):
    """Write the columns ``column`` to ``column + width`` of a panel, which are in ``tile``, to ``out``."""
    half = PANEL // 2
    panel, within = column // PANEL, column % PANEL
    if len(bias) > 0:
        for r in range(rows):
            for c in range(within, within + width):
                tile[r * PANEL + c] += bias[panel * PANEL + c]
    first, wide = column, width
    if epilogue != PLAIN:
        for r in range(rows):
            for c in range(0, half, LANES):
                _gate(tile, r * PANEL + c, r * PANEL + half + c, epilogue == GELU)
        first, wide = panel * half, half
    wide = min(wide, out.shape[1] - first)
    for r in range(rows):
        for c in range(wide):
            out[row + r, first + c] = tile[r * PANEL + within + c]


# --- items ----------------------------------------------------------------------------------------------------------


def _rows_of(kind: Kind, is_grouped: bool) -> Any:
    """Make the function that computes some rows of a panel's part for weights of ``kind``."""
    make = grouped_tile if is_grouped else plain_tile
    tiles = {(rows, vectors): make(kind, rows, vectors) for rows in TILE_ROWS for vectors in {WIDE, NARROW}}
    most = TILE_ROWS[0]
    six, six_narrow = tiles[most, WIDE], tiles[most, NARROW]
    four, four_narrow = tiles[4, WIDE], tiles[4, NARROW]
    two, two_narrow = tiles[2, WIDE], tiles[2, NARROW]
    one, one_narrow = tiles[1, WIDE], tiles[1, NARROW]
    turn_bytes, column_bytes, x_per_turn = kind.turn_bytes, kind.column_bytes, kind.x_per_turn
    if not is_grouped:

        @_compiled
        def run(weight, factors, stride, sums, row, rows, panel, column, width, turn, turns, tile):
            at = (panel * weight.turns + turn) * turn_bytes + column * column_bytes
            fresh, done = turn == 0, 0
            while done < rows:
                x_at, t_at = (row + done) * stride + turn * x_per_turn, done * PANEL + column
                left, c = rows - done, 0
                step = most if left >= most else 4 if left >= 4 else 2 if left >= 2 else 1
                while c < width:
                    a, t = at + c * column_bytes, t_at + c
                    if width - c >= WIDE * LANES:
                        if step == most:
                            six(factors, x_at, stride, weight.data, a, turns, tile, t, fresh)
                        elif step == 4:
                            four(factors, x_at, stride, weight.data, a, turns, tile, t, fresh)
                        elif step == 2:
                            two(factors, x_at, stride, weight.data, a, turns, tile, t, fresh)
                        else:
                            one(factors, x_at, stride, weight.data, a, turns, tile, t, fresh)
                        c += WIDE * LANES
                    else:
                        if step == most:
                            six_narrow(factors, x_at, stride, weight.data, a, turns, tile, t, fresh)
                        elif step == 4:
                            four_narrow(factors, x_at, stride, weight.data, a, turns, tile, t, fresh)
                        elif step == 2:
                            two_narrow(factors, x_at, stride, weight.data, a, turns, tile, t, fresh)
                        else:
                            one_narrow(factors, x_at, stride, weight.data, a, turns, tile, t, fresh)
                        c += NARROW * LANES
                done += step

        return run

    # Scales take as many registers as sums: only one row is done with the wide tiles.
    @_compiled
    def run_grouped(weight, factors, stride, sums, row, rows, panel, column, width, turn, turns, tile):
        at = (panel * weight.turns + turn) * turn_bytes + column * column_bytes
        all_groups = weight.turns // weight.group_turns
        group, groups = turn // weight.group_turns, turns // weight.group_turns
        s_at = (panel * all_groups + group) * PANEL + column
        fresh, done = turn == 0, 0
        while done < rows:
            x_at, t_at = (row + done) * stride + turn * x_per_turn, done * PANEL + column
            g_at = (row + done) * all_groups + group
            left, c = rows - done, 0
            step = most if left >= most else 4 if left >= 4 else 2 if left >= 2 else 1
            while c < width:
                a, s, t = at + c * column_bytes, s_at + c, t_at + c
                if step == 1 and width - c >= WIDE * LANES:
                    one(factors, x_at, stride, weight.data, a, weight.offset, weight.scales, weight.minima, s, sums,
                        g_at, all_groups, groups, weight.group_turns, weight.has_minima, tile, t, fresh)  # fmt: skip
                    c += WIDE * LANES
                    continue
                if step == most:
                    six_narrow(factors, x_at, stride, weight.data, a, weight.offset, weight.scales, weight.minima, s,
                               sums, g_at, all_groups, groups, weight.group_turns, weight.has_minima, tile, t,
                               fresh)  # fmt: skip
                elif step == 4:
                    four_narrow(factors, x_at, stride, weight.data, a, weight.offset, weight.scales, weight.minima, s,
                                sums, g_at, all_groups, groups, weight.group_turns, weight.has_minima, tile, t,
                                fresh)  # fmt: skip
                elif step == 2:
                    two_narrow(factors, x_at, stride, weight.data, a, weight.offset, weight.scales, weight.minima, s,
                               sums, g_at, all_groups, groups, weight.group_turns, weight.has_minima, tile, t,
                               fresh)  # fmt: skip
                else:
                    one_narrow(factors, x_at, stride, weight.data, a, weight.offset, weight.scales, weight.minima, s,
                               sums, g_at, all_groups, groups, weight.group_turns, weight.has_minima, tile, t,
                               fresh)  # fmt: skip
                c += NARROW * LANES
            done += step

    return run_grouped


_float32_rows = _rows_of(Float32(), False)
_bfloat16_rows = _rows_of(Bfloat16(), False)
_int8_rows = _rows_of(Int8(), True)
_int4_rows = _rows_of(Int4(), True)


@_compiled
def _panel_rows(weight, factors, stride, sums, row, rows, panel, column, width, tile):
    """Rows of a panel's columns ``column`` to ``column + width``, into ``tile``."""
    turn_bytes = len(weight.data) // (-(-weight.columns // PANEL) * weight.turns)
    each = weight.turns
    if rows > TILE_ROWS[0]:
        each = max(1, DEPTH_BYTES // turn_bytes // weight.group_turns) * weight.group_turns
    turn = 0
    while turn < weight.turns:
        turns = min(each, weight.turns - turn)
        if weight.kind == FLOAT32:
            _float32_rows(weight, factors, stride, sums, row, rows, panel, column, width, turn, turns, tile)
        elif weight.kind == BFLOAT16:
            _bfloat16_rows(weight, factors, stride, sums, row, rows, panel, column, width, turn, turns, tile)
        elif weight.kind == INT8:
            _int8_rows(weight, factors, stride, sums, row, rows, panel, column, width, turn, turns, tile)
        else:
            _int4_rows(weight, factors, stride, sums, row, rows, panel, column, width, turn, turns, tile)
        turn += turns


@_compiled
def _work(x, weight, bias, epilogue, out, factors, stride, sums, threads, counters):
    """One thread: prepare rows and compute items until none is left."""
    weight = Weight(*weight)
    rows, depth = x.shape[0], weight.depth
    if weight.kind != FLOAT32:
        scratch = np.empty(-(-depth // LANES) * LANES, np.float32)
        row = fetch_add(counters, 0)
        while row < rows:
            _prepare_row(x, row, weight, factors, stride, sums, scratch[:depth])
            fetch_add(counters, 1)
            row = fetch_add(counters, 0)
        wait_for(counters, 1, rows)
    tile = np.empty(ROW_BLOCK * PANEL, np.float32)
    panels, blocks = -(-weight.columns // PANEL), -(-rows // ROW_BLOCK)
    # Few panels are shared out more evenly by halves.
    cuts = 2 if epilogue == PLAIN and panels * blocks < 8 * threads else 1
    width = PANEL // cuts
    while True:
        item = fetch_add(counters, 2)
        if item >= panels * blocks * cuts:
            return
        row, panel_part = item % blocks * ROW_BLOCK, item // blocks
        panel, column = panel_part // cuts, panel_part % cuts * width
        count = min(ROW_BLOCK, rows - row)
        _panel_rows(weight, factors, stride, sums, row, count, panel, column, width, tile)
        _finish(weight, tile, epilogue, bias, out, row, count, panel * PANEL + column, width)


# --- entry points ----------------------------------------------------------------------------------------------------


def _read(dtype: Any, dims: int) -> Any:
    return types.Array(dtype, dims, "C", readonly=True)


_BYTES, _HALVES = types.Array(types.uint8, 1, "C", readonly=True), types.Array(types.uint16, 1, "C", readonly=True)
WEIGHT = types.Tuple((types.int64, _BYTES, _HALVES, _HALVES, *(types.int64,) * 6))
"""Numba's type of a `Weight` as a plain tuple."""

_FLOATS = types.float32[::1]


@machine_code.entry(
    types.void(
        _read(types.float32, 2), WEIGHT, _read(types.float32, 1), types.int64, types.float32[:, ::1], types.uint32[::1],
        _FLOATS, types.int64,
    ),
    parallel=True, nogil=True, fastmath=_MATH, error_model="numpy",
)  # fmt: skip
def matmul(x, weight, bias, epilogue, out, factors, sums, threads):
    """``out [rows, n] = epilogue(x [rows, k] @ weight + bias)`` on at most ``threads`` threads.

    ``factors`` and ``sums`` are room for what becomes of ``x``: `factors_per_row` numbers a row, and one float a row
    and group. Of a float32 weight, whose tiles multiply ``x`` itself, ``factors`` is ``x``.
    """
    rows, kind, columns, depth = len(x), weight[0], weight[4], weight[5]
    counters = np.zeros(3, np.int64)
    stride = depth // 2 if NATIVE and kind != FLOAT32 else depth
    by_flops, by_bytes = rows * columns * depth // THREAD_FLOPS, len(weight[1]) // THREAD_BYTES
    workers = max(1, min(threads, max(by_flops, by_bytes)))
    if workers == 1:
        _work(x, weight, bias, epilogue, out, factors, stride, sums, 1, counters)
        return
    before = use_threads(workers)
    for _ in numba.prange(workers):
        _work(x, weight, bias, epilogue, out, factors, stride, sums, workers, counters)
    use_threads(before)
