# mypy: ignore-errors
"""Compiled packing of weights for `matmul_jit`, and reading rows of what was packed (embeddings).

Layouts, all with `PANEL` columns (outputs of the weight) side by side, so that one vector holds neighbouring columns:

    float32   [panels, depth, PANEL]                   float32
    bfloat16  [panels, depth / 2, PANEL, 2]            uint16: pairs of depth beside each other
    int8      [panels, depth / 2, PANEL, 2]            int8
    int4      [panels, depth / 8, PANEL, 2]            uint16: the codes at depth 2 j + p of a run of eight are in
                                                       word p, digit j
    scales, minima  [panels, groups, PANEL]            float16, as its bits
"""

from __future__ import annotations

import numba
import numpy as np

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.matmul_tiles import PANEL

_OPTIONS = {"parallel": True, "nogil": True, "error_model": "numpy"}


@machine_code.entry(**_OPTIONS)
def pack_float32(weight, order, packed):
    """``weight [rows, k]`` float32 into ``packed [panels, depth, PANEL]``; column ``c`` is row ``order[c]``, or 0."""
    for panel in numba.prange(len(packed)):
        packed[panel] = 0.0
        for c in range(PANEL):
            row = order[panel * PANEL + c]
            if row >= 0:
                for k in range(weight.shape[1]):
                    packed[panel, k, c] = weight[row, k]


@machine_code.entry(**_OPTIONS)
def pack_bfloat16(bits, order, packed):
    """``bits [rows, k]``, the bits of float32 numbers, rounded into ``packed [panels, depth / 2, PANEL, 2]`` uint16."""
    for panel in numba.prange(len(packed)):
        packed[panel] = 0
        for c in range(PANEL):
            row = order[panel * PANEL + c]
            if row >= 0:
                for k in range(bits.shape[1]):
                    number = bits[row, k]
                    rounded = number + np.uint32(0x7FFF) + ((number >> np.uint32(16)) & np.uint32(1))
                    if number & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
                        rounded = number | np.uint32(0x400000)  # NaN stays NaN
                    packed[panel, k >> 1, c, k & 1] = rounded >> np.uint32(16)


@machine_code.entry(**_OPTIONS)
def pack_int8(codes, order, packed):
    """``codes [rows, k]`` int8 into ``packed [panels, depth / 2, PANEL, 2]`` int8."""
    for panel in numba.prange(len(packed)):
        packed[panel] = 0
        for c in range(PANEL):
            row = order[panel * PANEL + c]
            if row >= 0:
                for k in range(codes.shape[1]):
                    packed[panel, k >> 1, c, k & 1] = codes[row, k]


@machine_code.entry(**_OPTIONS)
def pack_int4(codes, order, packed):
    """``codes [rows, k]`` uint8 of 0 to 15 into ``packed [panels, depth / 8, PANEL, 2]`` uint16."""
    for panel in numba.prange(len(packed)):
        packed[panel] = 0
        for c in range(PANEL):
            row = order[panel * PANEL + c]
            if row >= 0:
                for k in range(codes.shape[1]):
                    packed[panel, k >> 3, c, k & 1] |= np.uint16(codes[row, k]) << np.uint16((k & 7) >> 1 << 2)


@machine_code.entry(**_OPTIONS)
def pack_groups(numbers, order, packed):
    """``numbers [rows, groups]`` into ``packed [panels, groups, PANEL]``, which is zeros."""
    for panel in numba.prange(len(packed)):
        for c in range(PANEL):
            row = order[panel * PANEL + c]
            if row >= 0:
                for group in range(numbers.shape[1]):
                    packed[panel, group, c] = numbers[row, group]


@machine_code.entry(nogil=True, error_model="numpy")
def rows_float32(packed, ids, out):
    """``out[i] = weight[ids[i]]``, as float32."""
    for i in range(len(ids)):
        panel, c = ids[i] // PANEL, ids[i] % PANEL
        for k in range(out.shape[1]):
            out[i, k] = packed[panel, k, c]


@machine_code.entry(nogil=True, error_model="numpy")
def rows_bfloat16(packed, ids, bits):
    """``bits[i]``: the bits of float32 numbers ``weight[ids[i]]``."""
    for i in range(len(ids)):
        panel, c = ids[i] // PANEL, ids[i] % PANEL
        for k in range(bits.shape[1]):
            bits[i, k] = np.uint32(packed[panel, k >> 1, c, k & 1]) << np.uint32(16)


@machine_code.entry(nogil=True, error_model="numpy")
def rows_quantised(packed, is_int4, offset, scales, minima, each, ids, out):
    """``out[i] = weight[ids[i]]``: ``scale * (code - offset) + minimum``, with ``each`` numbers a group.

    scales, minima: of these rows, ``[n, groups]``; ``minima`` may have no groups
    """
    for i in range(len(ids)):
        panel, c = ids[i] // PANEL, ids[i] % PANEL
        for k in range(out.shape[1]):
            if is_int4:
                code = np.float32(packed[panel, k >> 3, c, k & 1] >> ((k & 7) >> 1 << 2) & 15)
            else:
                code = np.float32(packed[panel, k >> 1, c, k & 1])
            value = (code - np.float32(offset)) * scales[i, k // each]
            if minima.shape[1] > 0:
                value += minima[i, k // each]
            out[i, k] = value
