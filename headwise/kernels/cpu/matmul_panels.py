# mypy: ignore-errors
"""Some rows times some turns of a panel, tile by tile: how rows are cut into tiles, and what is prefetched meanwhile.

Each tile reads these turns of the panel: the first one from memory, all others from a cache.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from headwise.kernels.cpu.addresses import bytes_at, halves_at
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.matmul_kinds import INTEGERS, PANEL, Kind
from headwise.kernels.cpu.matmul_rows import sums_stride
from headwise.kernels.cpu.matmul_tiles import (
    FEW_VECTORS,
    LINE,
    TILE_ROWS,
    VECTORS,
    VECTORS_ALONE,
    grouped_tile,
    integer_tile,
    plain_tile,
)
from headwise.kernels.cpu.simd import LANES

_MATH = {"nsz", "arcp", "contract"}
_pasted = numba.njit(inline="always", fastmath=_MATH, nogil=True, error_model="numpy")


@_pasted
def _next_tile(done, rows):
    """Which row the next tile begins with, when so many are ``done``, and how many it has.

    One of few rows waits for the panel, and leaves no time to fetch the next one in: so the last tile has rows of those
    before it once more.
    """
    left, most = rows - done, TILE_ROWS[0] if rows >= TILE_ROWS[0] else min(rows, 4)
    if left >= most:
        return done, most
    return (done, 4) if left == 4 else (rows - most, most)


@_pasted
def _next_grouped(done, rows):
    """Rows of the next tile where there are scales. The first one prefetches codes (`matmul_tiles.FEW_ROWS`), all
    others find them in a cache, where tiles of more rows are faster."""
    left = rows - done
    return TILE_ROWS[0] if done > 0 and left >= TILE_ROWS[0] else min(left, 4)


def _fetching(kind: Kind, rows: int, vectors: int) -> Any:
    """`plain_tile`s that prefetch none, one or two lines a turn, as the first argument says."""
    none, line, two = (plain_tile(kind, rows, vectors, lines) for lines in range(3))

    @_pasted
    def run(lines, x, x_at, stride, data, at, turns, tile, t_at, fresh, ahead):
        if lines == 0:
            none(x, x_at, stride, data, at, turns, tile, t_at, fresh, 0)
        elif lines == 1:
            line(x, x_at, stride, data, at, turns, tile, t_at, fresh, ahead)
        else:
            two(x, x_at, stride, data, at, turns, tile, t_at, fresh, ahead)

    return run


def plain_rows(kind: Kind) -> Any:
    """Make the function that multiplies some rows with some turns of a panel, for a kind without scales.

    Meanwhile the panel that lies ``ahead`` bytes behind is prefetched, if that is not 0: as evenly as can be by all
    tiles of rows. More at a time would wait for memory, and fewer would leave some of it to be waited for.
    """
    shapes = [(rows, VECTORS if rows > 1 else VECTORS_ALONE) for rows in (TILE_ROWS[0], 4, 3, 2, 1)]
    most, four, three, two, one = (_fetching(kind, *shape) for shape in shapes)
    turn_bytes, column_bytes, x_per_turn = kind.turn_bytes, kind.column_bytes, kind.x_per_turn

    @_pasted
    def run(weight, factors, stride, sums, row, rows, panel, turn, turns, tile, ahead):
        data = bytes_at(weight.data, weight.data_bytes)
        start, fresh, done = (panel * weight.turns + turn) * turn_bytes, turn == 0, 0
        line, lines = 0, turn_bytes // LINE if ahead != 0 else 0
        while done < rows:
            left, (first, step) = rows - done, _next_tile(done, rows)
            x_at = (row + first) * stride + turn * x_per_turn
            width = LANES * (VECTORS if step > 1 else VECTORS_ALONE)
            passes = -(-left // TILE_ROWS[0]) * (PANEL // width)
            for column in range(0, PANEL, width):
                at, t_at = start + column * column_bytes, done * PANEL + column
                some = min(2, -(-(lines - line) // passes))
                there, passes, line = ahead + line * LINE - column * column_bytes, passes - 1, line + some
                if step == TILE_ROWS[0]:
                    most(some, factors, x_at, stride, data, at, turns, tile, t_at, fresh, there)
                elif step == 4:
                    four(some, factors, x_at, stride, data, at, turns, tile, t_at, fresh, there)
                elif step == 3:
                    three(some, factors, x_at, stride, data, at, turns, tile, t_at, fresh, there)
                elif step == 2:
                    two(some, factors, x_at, stride, data, at, turns, tile, t_at, fresh, there)
                else:
                    one(some, factors, x_at, stride, data, at, turns, tile, t_at, fresh, there)
            if first < done and turn + turns == weight.turns:
                for r in range(done, rows):
                    row_copy(tile, (r + step - left) * PANEL, tile, r * PANEL, PANEL)
            done += step

    return run


def grouped_rows(kind: Kind) -> Any:
    """As `plain_rows`, for a kind with a scale per group of turns: they take as many registers as the sums do."""
    tile_of = integer_tile if INTEGERS else grouped_tile
    most, four, three, two = (tile_of(kind, rows, FEW_VECTORS) for rows in (TILE_ROWS[0], 4, 3, 2))
    one = tile_of(kind, 1, VECTORS_ALONE)
    turn_bytes, column_bytes, x_per_turn = kind.turn_bytes, kind.column_bytes, kind.x_per_turn

    @_pasted
    def run(weight, factors, stride, sums, row, rows, panel, turn, turns, tile, ahead):
        data, each = bytes_at(weight.data, weight.data_bytes), weight.group_turns
        scales = halves_at(weight.scales, weight.scale_count)
        minima = halves_at(weight.minima, weight.minima_count)
        offset, has_minima, fresh, done = weight.offset, weight.has_minima, turn == 0, 0
        all_groups, group, groups = weight.turns // each, turn // each, turns // each
        s_stride, first, parts, part_turns = sums_stride(weight), group, np.int64(0), each
        if INTEGERS:
            parts = s_stride // 3
            part_turns = weight.turns // parts
            first = turn // part_turns
        while done < rows:
            x_at = (row + done) * stride + turn * x_per_turn
            g_at = (row + done) * s_stride + first
            step = _next_grouped(done, rows)
            for column in range(0, PANEL, (VECTORS_ALONE if step == 1 else FEW_VECTORS) * LANES):
                at = (panel * weight.turns + turn) * turn_bytes + column * column_bytes
                s_at, t_at = (panel * all_groups + group) * PANEL + column, done * PANEL + column
                if step > 4:
                    most(factors, x_at, stride, data, at, offset, scales, minima, s_at, sums, g_at, s_stride, groups,
                         each, parts, part_turns, has_minima, tile, t_at, fresh)  # fmt: skip
                elif step == 4:
                    four(factors, x_at, stride, data, at, offset, scales, minima, s_at, sums, g_at, s_stride, groups,
                         each, parts, part_turns, has_minima, tile, t_at, fresh)  # fmt: skip
                elif step == 3:
                    three(factors, x_at, stride, data, at, offset, scales, minima, s_at, sums, g_at, s_stride, groups,
                          each, parts, part_turns, has_minima, tile, t_at, fresh)  # fmt: skip
                elif step == 2:
                    two(factors, x_at, stride, data, at, offset, scales, minima, s_at, sums, g_at, s_stride, groups,
                        each, parts, part_turns, has_minima, tile, t_at, fresh)  # fmt: skip
                else:
                    one(factors, x_at, stride, data, at, offset, scales, minima, s_at, sums, g_at, s_stride, groups,
                        each, parts, part_turns, has_minima, tile, t_at, fresh)  # fmt: skip
            done += step

    return run
