# mypy: ignore-errors
"""Compiled packing of weights for `matmul_jit`, and reading rows of what was packed (embeddings).

Layouts, all with `PANEL` columns (outputs of the weight) side by side, so that one vector holds neighbouring columns:

    float32   [panels, turns, PANEL]        float32: a turn is a number of depth
    bfloat16  [panels, turns, PANEL, 2]     uint16: a pair of depth; where they are multiplied in tiles, these lie one
              behind the other: [panels, turns / SIDE, PANEL / SIDE, SIDE turns, SIDE columns, 2]
    int8      [panels, turns, PANEL, 2]     int8: a pair of depth
    int4      [panels, turns, PANEL, 2]     uint16: eight of depth, the code at 2 j + p in word p, digit j
    int5      [panels, turns, 5, PANEL, 2]  uint16: 32 of depth; `code_words` has the codes at 2 j + p in words p
    int6      [panels, turns, 3, PANEL, 2]  uint16: 16 of depth, likewise
    scales, minima  [panels, groups, PANEL] float16, as its bits
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import (
    bytes_at,
    bytes_from,
    floats_at,
    halves_at,
    halves_from,
    int8s_at,
    ints_at,
    longs_at,
    record_at,
    words_at,
)
from headwise.kernels.cpu.code_words import depth_of, pack_and_get, words_of
from headwise.kernels.cpu.matmul_kinds import BFLOAT16, FLOAT32, INT4, INT5, INT8, PANEL, TILES
from headwise.kernels.cpu.matmul_tiles import widened_half
from headwise.kernels.cpu.records import PACKING, TAKING
from headwise.kernels.cpu.threads import fetch_add
from headwise.kernels.cpu.tiles import SIDE

_packing_at, _taking_at = record_at(PACKING), record_at(TAKING)
_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")


@_pasted
def _rounded(number):
    """The bits of a float32 number rounded to bfloat16: to nearest, half to even; NaN stays NaN."""
    rounded = number + np.uint32(0x7FFF) + ((number >> np.uint32(16)) & np.uint32(1))
    if number & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        rounded = number | np.uint32(0x400000)
    return np.uint16(rounded >> np.uint32(16))


@_pasted
def _pair_at(panel, turns, k, c):
    """Where the number at ``k`` of column ``c`` lies, of pairs of depth."""
    return ((panel * turns + k // 2) * PANEL + c) * 2 + (k & 1)


@_pasted
def _bfloat16_at(panel, turns, k, c):
    if not TILES:
        return _pair_at(panel, turns, k, c)
    turn, tile = panel * turns + k // 2, c // SIDE
    return (((turn // SIDE * (PANEL // SIDE) + tile) * SIDE + turn % SIDE) * SIDE + c % SIDE) * 2 + (k & 1)


def _codes(bits: int) -> tuple[Any, Any]:
    """Make the functions that pack a column of codes of so many bits, and that read one of them."""
    (pack, get), count, depth = pack_and_get(bits), words_of(bits), depth_of(bits)

    @_pasted
    def turn_at(own, panel, turn, c):
        return own.packed + ((panel * own.turns + turn) * count * PANEL + c) * 4

    @_pasted
    def pack_column(own, row, panel, c):
        for turn in range(own.turns):
            codes, words = own.source + row * own.inputs + turn * depth, turn_at(own, panel, turn, c)
            for half in range(2):
                pack(bytes_from(codes + half), halves_from(words + 2 * half), 2 * PANEL)

    @_pasted
    def code_at(own, panel, c, k):
        words = halves_from(turn_at(own, panel, k // depth, c) + 2 * (k & 1))
        return get(words, 2 * PANEL, k % depth // 2)

    return pack_column, code_at


_pack_int4, _int4_at = _codes(4)
_pack_int5, _int5_at = _codes(5)
_pack_int6, _int6_at = _codes(6)


@_pasted
def _pack_column(own, row, panel, c):
    inputs, turns, size = own.inputs, own.turns, own.panels * own.turns * PANEL
    if own.kind == FLOAT32:
        numbers, packed = floats_at(own.source + row * inputs * 4, inputs), floats_at(own.packed, size)
        for k in range(inputs):
            packed[(panel * turns + k) * PANEL + c] = numbers[k]
    elif own.kind == BFLOAT16:
        bits, pairs = words_at(own.source + row * inputs * 4, inputs), halves_at(own.packed, 2 * size)
        for k in range(inputs):
            pairs[_bfloat16_at(panel, turns, k, c)] = _rounded(bits[k])
    elif own.kind == INT8:
        codes, bytes_ = int8s_at(own.source + row * inputs, inputs), int8s_at(own.packed, 2 * size)
        for k in range(inputs):
            bytes_[_pair_at(panel, turns, k, c)] = codes[k]
    elif own.kind == INT4:
        _pack_int4(own, row, panel, c)
    elif own.kind == INT5:
        _pack_int5(own, row, panel, c)
    else:
        _pack_int6(own, row, panel, c)


@_pasted
def _code(own, panel, c, k):
    """A weight's code at ``k`` of a column."""
    if own.kind == INT8:
        codes = int8s_at(own.packed, 2 * own.panels * own.turns * PANEL)
        return np.int64(codes[_pair_at(panel, own.turns, k, c)])
    if own.kind == INT4:
        return _int4_at(own, panel, c, k)
    if own.kind == INT5:
        return _int5_at(own, panel, c, k)
    return _int6_at(own, panel, c, k)


def _pack(address, thread):
    own = _packing_at(address)
    order, counter = longs_at(own.order, own.panels * PANEL), longs_at(own.counter, 1)
    panel = fetch_add(counter, 0)
    while panel < own.panels:
        room = bytes_at(own.packed + panel * own.panel_bytes, own.panel_bytes)
        for i in range(own.panel_bytes):
            room[i] = 0
        for c in range(PANEL):
            row = order[panel * PANEL + c]
            if row >= 0:
                _pack_column(own, row, panel, c)
        panel = fetch_add(counter, 0)


@_pasted
def _take_codes(own, panel, c, out):
    """Write a column of a weight of codes: a group's numbers have a scale in common, and perhaps a minimum."""
    groups, each = own.groups, own.group_inputs
    scales = halves_at(own.scales, own.panels * groups * PANEL)
    minima = halves_at(own.minima, own.panels * groups * PANEL)
    for group in range(groups):
        at = (panel * groups + group) * PANEL + c
        scale, minimum = widened_half(scales[at]), np.float32(0.0)
        if own.has_minima != 0:
            minimum = widened_half(minima[at])
        for k in range(group * each, min((group + 1) * each, own.inputs)):
            value = np.float32(_code(own, panel, c, k) - own.offset) * scale
            if own.has_minima != 0:
                value += minimum
            out[k] = value


def _take(address, thread):
    own = _taking_at(address)
    counter = longs_at(own.counter, 1)
    ids, inputs, turns, size = ints_at(own.ids, own.count), own.inputs, own.turns, own.panels * own.turns * PANEL
    floats, words = floats_at(own.packed, size), halves_at(own.packed, 2 * size)
    i = fetch_add(counter, 0)
    while i < own.count:
        panel, c = ids[i] // PANEL, ids[i] % PANEL
        out, bits = floats_at(own.out + i * inputs * 4, inputs), words_at(own.out + i * inputs * 4, inputs)
        if own.kind == FLOAT32:
            for k in range(inputs):
                out[k] = floats[(panel * turns + k) * PANEL + c]
        elif own.kind == BFLOAT16:
            for k in range(inputs):
                bits[k] = np.uint32(words[_bfloat16_at(panel, turns, k, c)]) << np.uint32(16)
        else:
            _take_codes(own, panel, c, out)
        i = fetch_add(counter, 0)


@cache
def pack() -> Any:
    """The compiled function of a `PACKING`'s address and a thread: panels until none is left."""
    return machine_code.unit(_pack, 2, error_model="numpy")


@cache
def take() -> Any:
    """The compiled function of a `TAKING`'s address and a thread: rows until none is left."""
    return machine_code.unit(_take, 2, error_model="numpy")
