# mypy: ignore-errors
"""What threads work with as they take recurrent states on, and what the rules of these have in common.

Products are written as sums of rows: each row of the right matrix is added to four rows of the result at once, which
the compiler makes vectors of.
"""

from __future__ import annotations

from collections import namedtuple

import numba
import numpy as np
from numba.extending import register_jitable

from headwise.kernels.cpu.addresses import float_matrix_at, floats_at
from headwise.kernels.cpu.gates import padded, times_sigmoid

CHUNK = 32
"""Tokens that are computed at once: more cost more arithmetic between them, fewer more products with the state."""

MATH = {"contract", "reassoc", "nsz", "arcp"}
compiled = numba.njit(fastmath=MATH, nogil=True, error_model="numpy")
pasted = numba.njit(inline="always", fastmath=MATH, nogil=True, error_model="numpy")
_padded = register_jitable(padded)

Room = namedtuple(
    "Room",
    "state window convolved query key keys values result gate among seen known fades sums decays rates keeps",
)
"""What a thread works with.

state:                 ``[share, key, value]``, and window the inputs that the convolution sees, ``[.., channels]``
convolved:             ``[CHUNK, channels]``, rows padded
query, key, keys:      ``[CHUNK, key]`` twice, and the latter's transpose
values, result, known: ``[CHUNK, value]``
gate:                  ``[value]``, padded, as rows of ``result`` are
among, seen:           products of keys with keys, and of queries with keys, ``[CHUNK, CHUNK]``; or what a head sees of
                       the latter
fades:                 ``[CHUNK]``, padded
sums, decays, rates:   ``[CHUNK]``
keeps:                 what tokens keep of each channel of a key, and a row besides, ``[CHUNK + 1, key]``, rows padded
"""


def scratch_floats(key_dim: int, value_dim: int, share: int, convolution: int) -> int:
    """Floats that a thread works with."""
    channels, value_row = 2 * key_dim + share * value_dim, padded(value_dim)
    states = share * key_dim * value_dim + (convolution - 1 + CHUNK) * channels
    rows = padded(channels) + 3 * key_dim + 2 * value_dim + value_row + 2 * CHUNK + 3
    return states + CHUNK * rows + value_row + padded(CHUNK) + (CHUNK + 1) * padded(key_dim)


@pasted
def divide(states, at):
    """A thread's `Room`, which begins at an address."""
    channels = 2 * states.key_dim + states.share * states.value_dim
    row, value_row, inputs = _padded(channels), _padded(states.value_dim), states.convolution - 1 + CHUNK
    key_row = _padded(states.key_dim)
    state = at
    window = state + 4 * states.share * states.key_dim * states.value_dim
    convolved = window + 4 * inputs * channels
    query = convolved + 4 * CHUNK * row
    key = query + 4 * CHUNK * states.key_dim
    keys = key + 4 * CHUNK * states.key_dim
    values = keys + 4 * CHUNK * states.key_dim
    result = values + 4 * CHUNK * states.value_dim
    known = result + 4 * CHUNK * value_row
    among = known + 4 * CHUNK * states.value_dim
    seen = among + 4 * CHUNK * CHUNK
    sums = seen + 4 * CHUNK * CHUNK
    decays = sums + 4 * CHUNK
    rates = decays + 4 * CHUNK
    gate = rates + 4 * CHUNK
    fades = gate + 4 * value_row
    keeps = fades + 4 * _padded(CHUNK)
    return Room(
        state,
        float_matrix_at(window, inputs, channels),
        float_matrix_at(convolved, CHUNK, row),
        float_matrix_at(query, CHUNK, states.key_dim),
        float_matrix_at(key, CHUNK, states.key_dim),
        keys,
        float_matrix_at(values, CHUNK, states.value_dim),
        float_matrix_at(result, CHUNK, value_row),
        floats_at(gate, value_row),
        among,
        seen,
        known,
        floats_at(fades, _padded(CHUNK)),
        floats_at(sums, CHUNK),
        floats_at(decays, CHUNK),
        floats_at(rates, CHUNK),
        float_matrix_at(keeps, CHUNK + 1, key_row),
    )


@compiled
def add_product(left, right, out):
    """``out += left @ right``, of as many columns as ``right`` has."""
    rows, depth = left.shape
    columns = right.shape[1]
    whole, deep = rows - rows % 4, depth - depth % 4
    for i in range(0, whole, 4):
        out0, out1, out2, out3 = out[i], out[i + 1], out[i + 2], out[i + 3]
        left0, left1, left2, left3 = left[i], left[i + 1], left[i + 2], left[i + 3]
        for d in range(0, deep, 4):
            a0, a1, a2, a3 = left0[d], left0[d + 1], left0[d + 2], left0[d + 3]
            b0, b1, b2, b3 = left1[d], left1[d + 1], left1[d + 2], left1[d + 3]
            c0, c1, c2, c3 = left2[d], left2[d + 1], left2[d + 2], left2[d + 3]
            d0, d1, d2, d3 = left3[d], left3[d + 1], left3[d + 2], left3[d + 3]
            right0, right1, right2, right3 = right[d], right[d + 1], right[d + 2], right[d + 3]
            for j in range(columns):
                w, x, y, z = right0[j], right1[j], right2[j], right3[j]
                out0[j] += a0 * w + a1 * x + a2 * y + a3 * z
                out1[j] += b0 * w + b1 * x + b2 * y + b3 * z
                out2[j] += c0 * w + c1 * x + c2 * y + c3 * z
                out3[j] += d0 * w + d1 * x + d2 * y + d3 * z
        for d in range(deep, depth):
            a0, b0, c0, d0, row = left0[d], left1[d], left2[d], left3[d], right[d]
            for j in range(columns):
                out0[j] += a0 * row[j]
                out1[j] += b0 * row[j]
                out2[j] += c0 * row[j]
                out3[j] += d0 * row[j]
    for i in range(whole, rows):
        last = out[i]
        for d in range(depth):
            a = left[i, d]
            row = right[d]
            for j in range(columns):
                last[j] += a * row[j]


@compiled
def convolve(window, weights, bias, out, tokens):
    """SiLU of the causal convolution of ``window [width - 1 + tokens, channels]`` into ``out [tokens, ..]``; a bias is
    of no length where there is none."""
    width, channels = weights.shape
    for t in range(tokens):
        row = out[t]
        for c in range(channels):
            row[c] = bias[c] if len(bias) > 0 else np.float32(0)
        for w in range(width):
            source, weight = window[t + w], weights[w]
            for c in range(channels):
                row[c] += source[c] * weight[c]
        times_sigmoid(row, 0, row, 0, channels)


@pasted
def softplus(x):
    """``log(1 + exp(x))``, without overflow."""
    return max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))
