# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.matmul`: products of some rows with a packed weight, by several threads.

One packed copy of a weight serves one row and thousands. The work is cut into *items*: a panel of columns times a
block of rows. Each thread begins with a run of items of its own, and helps with the others' when it is through
(`threads.take_item`); an item is computed in tiles that stay in registers
(`matmul_tiles`), into a scratch of the thread's own, from where an epilogue writes it: with a bias, with an MLP's
activation, or as the product of a gated MLP's two halves.

Before that, the rows become what the tiles multiply (bfloat16, mostly), by the same threads: whoever is through with
the one waits until all of it is done, and goes on with the other. Nobody waits for a thread, only for work that some
thread has taken: so it does not matter how many there really are.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import (
    call_at,
    float_matrix_at,
    floats_at,
    longs_at,
    record_at,
    words_at,
)
from headwise.kernels.cpu.attention_micro import row_times
from headwise.kernels.cpu.codes_amx import SCRATCH, codes_in_tiles
from headwise.kernels.cpu.matmul_amx import rows_in_tiles
from headwise.kernels.cpu.matmul_kinds import (
    FLOAT32,
    INT8,
    INTEGERS,
    PANEL,
    TILES,
    Bfloat16,
    Codes,
    Float32,
    Int8,
    IntegersOfCodes,
    IntegersOfInt8,
)
from headwise.kernels.cpu.matmul_panels import grouped_rows, plain_rows
from headwise.kernels.cpu.matmul_rows import (
    ROWS_IN_VECTORS,
    factor_stride,
    prepare_row,
    sums_stride,
    tiled_panel,
    weight_at,
)
from headwise.kernels.cpu.matmul_tiles import (
    ROW_STEP,
    TILE_ROWS,
)
from headwise.kernels.cpu.records import PRODUCT
from headwise.kernels.cpu.simd import LANES, Emitter
from headwise.kernels.cpu.threads import fetch_add, take_item, wait_for
from headwise.kernels.cpu.tiles import MOST_ROWS, release, stay_awake
from headwise.kernels.fused import SILU_LIMIT, SWIGLU_ALPHA, SWIGLU_LIMIT

ROW_BLOCK = 96
"""Rows of an item at most: they stay in the L2 cache beside a panel. A whole number of tiles, of either kind."""

DEPTH_BYTES = 1 << 18
"""Bytes of a panel that are multiplied with all rows of an item before the next ones are: they stay in the L2 cache."""

MOST_ALONE = 2
"""Rows that leave no time to prefetch the next panel: they wait for memory, whose own prefetching does as well."""

TILE = ROW_BLOCK * PANEL + (SCRATCH if TILES else 0)
"""Floats of a thread's scratch: an item's sums, and what `codes_amx` takes."""

AWAKE_ROWS = 8
"""Rows that an epilogue takes 0.2 us for, at most."""

PLAIN, SILU, GELU, CLAMPED, RELU2, LIMITED, CLIPPED = range(7)
"""Epilogues: as it is; ``act(gate) * up``, where a panel is half gate, half up; or the square of what is above 0."""

AS_ROWS = 8
"""Added to one of the latter where both weights are multiplied in tiles: what comes of it is not ``out``, but rows that
are prepared for the next product, whose ``columns`` are then words."""

_MATH = {"nsz", "arcp", "contract"}
_pasted = numba.njit(inline="always", fastmath=_MATH, nogil=True, error_model="numpy")

_product_at = record_at(PRODUCT)


# --- epilogues ------------------------------------------------------------------------------------------------------


@intrinsic
def _gate(typing, tile, gate_at, up_at, epilogue):
    """``tile[gate_at:] = act(tile[gate_at:]) * tile[up_at:]`` for LANES numbers.

    ``silu(g) = g / (1 + exp(-g))``; gelu with the tanh approximation is ``g / (1 + exp(-2 z))``,
    ``z = sqrt(2 / pi) * (g + 0.044715 * g ** 3)``. CLAMPED, LIMITED and CLIPPED are those of
    `headwise.kernels.fused.Activation`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        tile, gate_at, up_at, epilogue = e.args
        place = e.at(tile, gate_at)
        gate, up = e.load(place), e.load(e.at(tile, up_at))
        is_gelu, is_clamped, is_limited, is_clipped = (
            builder.icmp_signed("==", epilogue, epilogue.type(kind)) for kind in (GELU, CLAMPED, LIMITED, CLIPPED)
        )
        most, least = (
            builder.select(is_limited, e.fill(sign * SILU_LIMIT), e.fill(sign * SWIGLU_LIMIT)) for sign in (1, -1)
        )
        has_limit = builder.or_(is_clamped, is_limited)
        gate = builder.select(has_limit, _smaller(builder, gate, most), gate)
        within = _smaller(builder, builder.select(builder.fcmp_ordered("<", up, least), least, up), most)
        up = builder.select(
            builder.or_(is_limited, is_clipped),
            within,
            builder.select(is_clamped, builder.fadd(within, e.fill(1.0)), up),
        )
        scaled = e.fill(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
        cube = e.multiply_add(builder.fmul(builder.fmul(gate, gate), gate), e.fill(0.044715), gate)
        turned = builder.fmul(gate, e.fill(-math.log2(math.e)))
        turned = builder.select(is_clamped, builder.fmul(turned, e.fill(SWIGLU_ALPHA)), turned)
        exponent = builder.select(is_gelu, builder.fmul(cube, scaled), turned)
        limit = e.fill(126.0)
        exponent = builder.select(builder.fcmp_ordered(">", exponent, limit), limit, exponent)
        result = builder.fdiv(gate, builder.fadd(e.fill(1.0), e.exp2(exponent)))
        result = builder.select(is_clipped, _smaller(builder, result, most), result)
        e.store(builder.fmul(result, up), place)
        return context.get_dummy_value()

    n = types.intp
    return types.void(tile, n, n, n), emit


def _smaller(builder: Any, x: Any, most: Any) -> Any:
    """The smaller of two vectors' lanes; NaN stays NaN."""
    return builder.select(builder.fcmp_ordered(">", x, most), most, x)


@_pasted
def _square_positive(numbers):
    """``max(x, 0) ** 2`` in place; NaN stays NaN."""
    for i in range(len(numbers)):
        kept = np.float32(0.0) if numbers[i] <= 0 else numbers[i]
        numbers[i] = kept * kept


@_pasted
def finish(tile, epilogue, bias, out, row, rows, panel, in_tiles):
    """Write ``tile``, the product of some rows with a panel, to ``out``.

    in_tiles: AMX has made it, and goes on to: its tiles are configured
    """
    half, act = PANEL // 2, epilogue % AS_ROWS
    is_gated = act != PLAIN and act != RELU2
    width = half if is_gated else PANEL
    first, last = panel * width, min((panel + 1) * width, out.shape[1])
    for r in range(rows):
        if in_tiles and r % AWAKE_ROWS == 0:
            stay_awake()
        # Arrays of their own, for loops over them become vector loops: a computed index may be negative for Numba.
        source = floats_at(tile.ctypes.data + r * PANEL * 4, PANEL)
        target = floats_at(out.ctypes.data + ((row + r) * out.shape[1] + first) * 4, last - first)
        if len(bias) > 0:
            own = floats_at(bias.ctypes.data + panel * PANEL * 4, PANEL)
            for c in range(PANEL):
                source[c] += own[c]
        if act == RELU2:
            _square_positive(source)
        elif is_gated:
            for c in range(0, half, LANES):
                _gate(tile, r * PANEL + c, r * PANEL + half + c, act)
        if in_tiles and epilogue >= AS_ROWS:
            tiled_panel(source, out, row + r, out.shape[0], out.shape[1], panel, width)
        elif len(target) % LANES == 0:
            row_times(source, 0, target, 0, len(target), np.float32(1.0))
        else:
            for c in range(len(target)):
                target[c] = source[c]


# --- items ----------------------------------------------------------------------------------------------------------


_float32_rows = plain_rows(Float32())
_bfloat16_rows = rows_in_tiles if TILES else plain_rows(Bfloat16())
_of_bytes, _of_codes = (IntegersOfInt8, IntegersOfCodes) if INTEGERS else (Int8, Codes)
_integers = (_of_bytes(), *map(_of_codes, (4, 5, 6)))
if TILES:
    _pairs = (Int8(native=True), *(Codes(bits, native=True) for bits in (4, 5, 6)))
    _int8_rows, _int4_rows, _int5_rows, _int6_rows = map(codes_in_tiles, _pairs, _integers)
else:
    _int8_rows, _int4_rows, _int5_rows, _int6_rows = map(grouped_rows, _integers)


PRODUCT_INTEGERS = 15


def _product(rows_of_kind: Any) -> Any:
    """Make the product with weights of a kind: one thread's share of ``out [rows, columns]``, items until none is left.

    All arrays are given by their addresses. weight: a `WEIGHT`; counters: ``counters[counter]`` items are done, and
    `take_item` counts in the ``threads`` behind it; tile: `TILE` floats of the thread's own; beyond: where this thread
    reads on when it is through, 0 if that is not known
    """
    has_tiles = TILES and rows_of_kind is not _float32_rows
    in_vectors = ROWS_IN_VECTORS if has_tiles and rows_of_kind is not rows_in_tiles else 0

    @_pasted
    def product(
        weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread,
        threads, beyond,
    ):  # fmt: skip
        weight, bias = weight_at(weight), floats_at(bias, bias_length)
        out, stride, sums_each = float_matrix_at(out, rows, columns), factor_stride(weight), sums_stride(weight)
        factors, sums = words_at(factors, rows * stride), floats_at(sums, rows * sums_each)
        tile, counters = floats_at(tile, TILE), longs_at(counters, counter + 1 + threads)
        each, panel_bytes = _turns_at_once(weight, rows), weight.data_bytes // -(-weight.columns // PANEL)
        block_rows, blocks, panels = cut_of(weight, rows, threads)
        in_tiles = has_tiles and rows > in_vectors
        each_blocks, count = blocks // threads if is_by_rows(rows, threads) else blocks, blocks * panels
        item, share = take_item(counters, counter + 1, thread, threads, count)
        while item < count:
            # Taken beforehand, so that this thread knows what it will need next.
            following, share = take_item(counters, counter + 1, share, threads, count)
            panel, block = _place_of(item, each_blocks, panels)
            row = block * block_rows
            some = min(block_rows, rows - row)
            here, ahead = weight.data + panel * panel_bytes, 0
            if some > MOST_ALONE and following < count:
                ahead = (_place_of(following, each_blocks, panels)[0] - panel) * panel_bytes
            elif some > MOST_ALONE and beyond != 0:
                ahead = beyond - here
            for turn in range(0, weight.turns, each):
                turns = min(each, weight.turns - turn)
                rows_of_kind(weight, factors, stride, sums, row, some, panel, turn, turns, tile, ahead)
            finish(tile, epilogue, bias, out, row, some, panel, in_tiles)
            fetch_add(counters, counter)
            item = following
        if in_tiles:
            release()

    return product


_of_float32, _of_bfloat16 = map(_product, (_float32_rows, _bfloat16_rows))
_of_int8, _of_int4, _of_int5, _of_int6 = map(_product, (_int8_rows, _int4_rows, _int5_rows, _int6_rows))


def _float32(
    weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread, threads,
    beyond,
):  # fmt: skip
    _of_float32(
        weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread,
        threads, beyond,
    )  # fmt: skip


def _bfloat16(
    weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread, threads,
    beyond,
):  # fmt: skip
    _of_bfloat16(
        weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread,
        threads, beyond,
    )  # fmt: skip


def _int8(
    weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread, threads,
    beyond,
):  # fmt: skip
    _of_int8(
        weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread,
        threads, beyond,
    )  # fmt: skip


def _int4(
    weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread, threads,
    beyond,
):  # fmt: skip
    _of_int4(
        weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread,
        threads, beyond,
    )  # fmt: skip


def _int5(
    weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread, threads,
    beyond,
):  # fmt: skip
    _of_int5(
        weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread,
        threads, beyond,
    )  # fmt: skip


def _int6(
    weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread, threads,
    beyond,
):  # fmt: skip
    _of_int6(
        weight, bias, bias_length, epilogue, out, columns, factors, sums, rows, counters, counter, tile, thread,
        threads, beyond,
    )  # fmt: skip


@cache
def product_of(kind: int) -> Any:
    """The compiled product with weights of a kind, as a C function of `PRODUCT_INTEGERS`."""
    function = (_float32, _bfloat16, _int8, _int4, _int5, _int6)[kind]
    return machine_code.unit(function, PRODUCT_INTEGERS, fastmath=_MATH, error_model="numpy")


@_pasted
def _turns_at_once(weight, rows):
    """Turns of a panel that are multiplied with all rows of an item before the next ones are."""
    if rows <= TILE_ROWS[0] or (TILES and weight.kind >= INT8):
        return weight.turns
    panel_bytes = weight.data_bytes // -(-weight.columns // PANEL)
    each = DEPTH_BYTES * weight.turns // panel_bytes
    return max(1, each // weight.group_turns) * weight.group_turns


@_pasted
def is_by_rows(rows, threads):
    """Whether each thread begins with rows of its own, rather than with panels: those of a large product.

    They are in its caches then from one product to the next, while each thread reads all of the weight.
    """
    return rows >= 2 * ROW_BLOCK * threads


@_pasted
def cut_of(weight, rows, threads):
    """How a product is cut into items: rows of a block, blocks (the last ones may have no rows), panels."""
    blocks, each = -(-rows // ROW_BLOCK), ROW_BLOCK
    if is_by_rows(rows, threads):
        blocks = -(-rows // (ROW_BLOCK * threads)) * threads
        step = MOST_ROWS if TILES and weight.kind != FLOAT32 else ROW_STEP
        each = -(-rows // (blocks * step)) * step
    return each, blocks, -(-weight.columns // PANEL)


@_pasted
def _place_of(item, each_blocks, panels):
    """The panel and the block of an item. A panel is multiplied with so many neighbouring blocks before the next is."""
    part, rest = item // (each_blocks * panels), item % (each_blocks * panels)
    return rest // each_blocks, part * each_blocks + rest % each_blocks


@_pasted
def items_of(weight, rows, threads):
    """Into how many items a product is cut."""
    _, blocks, panels = cut_of(weight, rows, threads)
    return blocks * panels


AHEAD_BYTES = 1 << 18
"""Of a weight that a thread prefetches while it waits for others: a part of the L2 cache."""


@_pasted
def share_of(weight, rows, thread, threads):
    """From which address to which a thread begins to read a weight; at most `AHEAD_BYTES`."""
    _, blocks, panels = cut_of(weight, rows, threads)
    first, last, each = np.int64(0), panels, weight.data_bytes // panels
    if not is_by_rows(rows, threads):
        first, last = panels * blocks * thread // threads // blocks, panels * blocks * (thread + 1) // threads // blocks
    begin = weight.data + first * each
    return begin, begin + min((last - first) * each, AHEAD_BYTES)


# --- entry point -----------------------------------------------------------------------------------------------------

PRODUCT_COUNTERS = 3
"""Of a product of its own: rows taken, rows prepared, items done. Those of items taken are behind them, one for each of
the threads."""


def _multiply(address, thread):
    call = _product_at(address)
    weight, counters, rows, inputs = weight_at(call.weight), longs_at(call.counters, 2), call.rows, call.inputs
    if call.factors != call.x:
        factors, sums = (
            words_at(call.factors, rows * factor_stride(weight)),
            floats_at(call.sums, rows * sums_stride(weight)),
        )
        values = floats_at(call.tiles + thread * call.tile_floats * 4 + TILE * 4, weight.depth)
        for i in range(inputs, weight.depth):
            values[i] = 0.0
        row = fetch_add(counters, 0)
        while row < rows:
            x = floats_at(call.x + row * inputs * 4, inputs)
            for i in range(inputs):
                values[i] = x[i]
            prepare_row(values, weight, row, rows, factors, sums)
            fetch_add(counters, 1)
            row = fetch_add(counters, 0)
        wait_for(counters, 1, rows)
    call_at(
        call.code,
        (
            call.weight, call.bias, call.bias_length, call.epilogue, call.out, call.columns, call.factors, call.sums,
            rows, call.counters, np.int64(2), call.tiles + thread * call.tile_floats * 4, thread, call.threads,
            np.int64(0),
        ),
    )  # fmt: skip


@cache
def multiply() -> Any:
    """The compiled function of a `PRODUCT`'s address and a thread: its share of preparing rows and of all items."""
    return machine_code.unit(_multiply, 2, error_model="numpy")
