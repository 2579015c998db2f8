# mypy: ignore-errors
"""Rows in bfloat16 times a packed weight in bfloat16, in AMX's tiles: both are laid out as tiles take them."""

from __future__ import annotations

import numba

from headwise.kernels.cpu.matmul_kinds import PANEL
from headwise.kernels.cpu.tiles import MOST_ROWS, ROW_BYTES, SIDE, TILE_BYTES, configure, one_by_four, two_by_two

_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")

_STRIDE = PANEL * 4
"""Bytes from one row of sums to the next; and of a turn of a panel."""

_BLOCK_BYTES = PANEL // SIDE * TILE_BYTES
"""Of a panel, that one step of depth takes: its tiles, one behind the other."""

_HALF_BYTES = _BLOCK_BYTES // 2

_AHEAD = 24576
"""Bytes that a weight is prefetched ahead for few rows: tiles are read too late for a processor's own prefetching."""


@_pasted
def rows_in_tiles(weight, factors, stride, sums, row, rows, panel, turn, turns, tile, ahead):
    """Some rows, as `matmul_rows.prepare_row` lays them, times some turns of a panel, as `matmul_panels.plain_rows`."""
    if rows <= 0:  # the last blocks of a product may have none
        return
    by, to = weight.data + (panel * weight.turns + turn) * _STRIDE, tile.ctypes.data
    blocks, fresh, first = turns // SIDE, turn == 0, turn // SIDE
    # Lines of the next panel are shared out among all passes over this one, two for each `MOST_ROWS`.
    lines = 0 if ahead == 0 else -(-(_BLOCK_BYTES // ROW_BYTES) // (2 * -(-rows // MOST_ROWS)))
    if rows <= SIDE:
        ahead, lines = _AHEAD, _BLOCK_BYTES // ROW_BYTES // 2
    done, shape = 0, 0
    while done < rows:
        some = min(MOST_ROWS, rows - done)
        if some != shape:
            configure(some)
            shape = some
        step, beyond_step = ROW_BYTES * min(some, SIDE), ROW_BYTES * (some - SIDE)
        x = factors.ctypes.data + 4 * stride * (row + done)
        beyond, x = x + 4 * stride * SIDE + first * beyond_step, x + first * step
        at, there = to + done * _STRIDE, ahead + done // SIDE * lines * ROW_BYTES
        if some > SIDE:
            two_by_two(
                x, ROW_BYTES, step, beyond, beyond_step, by, ROW_BYTES, TILE_BYTES, _BLOCK_BYTES, blocks, at, _STRIDE,
                fresh, there, lines,
            )  # fmt: skip
            there += lines * ROW_BYTES - _HALF_BYTES
            two_by_two(
                x, ROW_BYTES, step, beyond, beyond_step, by + _HALF_BYTES, ROW_BYTES, TILE_BYTES, _BLOCK_BYTES, blocks,
                at + _STRIDE // 2, _STRIDE, fresh, there, lines,
            )  # fmt: skip
        else:
            one_by_four(
                x, ROW_BYTES, step, 0, 0, by, ROW_BYTES, TILE_BYTES, _BLOCK_BYTES, blocks, at, _STRIDE, fresh, there,
                2 * lines,
            )  # fmt: skip
        done += some
