# mypy: ignore-errors
"""Rows in bfloat16 times a packed weight in bfloat16, in AMX's tiles: its panels are laid out as tiles take them.

One or two rows are multiplied in vectors, to the same sums: a weight comes from memory faster by these.
"""

from __future__ import annotations

import numba

from headwise.kernels.cpu.addresses import bytes_at
from headwise.kernels.cpu.matmul_kinds import PANEL
from headwise.kernels.cpu.matmul_tiles import VECTORS_ALONE, blockwise_tile
from headwise.kernels.cpu.tiles import MOST_ROWS, ROW_BYTES, SIDE, configure, one_by_four, release, two_by_two

_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")

_STRIDE = PANEL * 4
"""Bytes from one row of sums to the next; and from one turn of a panel to the next."""

_PANEL_LINES = SIDE * _STRIDE // ROW_BYTES
"""Cache lines of a panel that one step of depth takes."""


_AHEAD = 16384
"""Bytes that a weight is prefetched ahead for few rows: tiles are read too late for a processor's own prefetching."""


_one, _two = blockwise_tile(1, VECTORS_ALONE), blockwise_tile(2, VECTORS_ALONE)


@_pasted
def rows_in_tiles(weight, factors, stride, sums, row, rows, panel, turn, turns, tile, ahead):
    """Some rows times some turns of a panel, as `matmul_jit._plain_rows` has it."""
    if rows <= 0:  # the last blocks of a product may have none
        return
    if rows <= 2:
        data, at = bytes_at(weight.data, weight.data_bytes), (panel * weight.turns + turn) * _STRIDE
        if rows == 1:
            _one(factors, row * stride + turn, stride, data, at, turns, tile, 0, turn == 0)
        else:
            _two(factors, row * stride + turn, stride, data, at, turns, tile, 0, turn == 0)
        return
    by, to = weight.data + (panel * weight.turns + turn) * _STRIDE, tile.ctypes.data
    x, each, blocks, fresh = factors.ctypes.data + 4 * (row * stride + turn), 4 * stride, turns // SIDE, turn == 0
    # Lines of the next panel are shared out among all passes over this one, two for each `MOST_ROWS`.
    lines = 0 if ahead == 0 else -(-_PANEL_LINES // (2 * -(-rows // MOST_ROWS)))
    if rows <= SIDE:
        ahead, lines = _AHEAD, _PANEL_LINES // 2
    done, shape = 0, 0
    while done < rows:
        some = min(MOST_ROWS, rows - done)
        if some != shape:
            configure(some)
            shape = some
        x_at, at, there = x + done * each, to + done * _STRIDE, ahead + done // SIDE * lines * ROW_BYTES
        if some > SIDE:
            half = 2 * ROW_BYTES
            two_by_two(x_at, each, by, _STRIDE, blocks, at, _STRIDE, fresh, there, lines)
            there += lines * ROW_BYTES - half
            two_by_two(x_at, each, by + half, _STRIDE, blocks, at + half, _STRIDE, fresh, there, lines)
        else:
            one_by_four(x_at, each, by, _STRIDE, blocks, at, _STRIDE, fresh, there, 2 * lines)
        done += some
    release()
