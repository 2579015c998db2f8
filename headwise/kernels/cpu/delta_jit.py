# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.delta_attention`: the gated delta rule over states in the cache, and what
is between a layer's projections beside it.

Threads take pairs of a sequence and a key head from a counter. Products are written as sums of rows: each row of the
right matrix is added to four rows of the result at once, which the compiler makes vectors of.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache
from typing import Any

import numba
import numpy as np
from numba.extending import register_jitable

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import (
    float_matrix_at,
    floats_at,
    int_matrix_at,
    ints_at,
    layer_at,
    longs_at,
    pass_at,
    record_at,
)
from headwise.kernels.cpu.attention_jit import FINISHED, FIRST_ITEM, TAKEN
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.gates import padded, sigmoid, times_sigmoid
from headwise.kernels.cpu.records import DELTA, HEAD_GROUP, HEAD_SLOT
from headwise.kernels.cpu.threads import fetch_add
from headwise.kernels.delta_base import NORM_EPS

CHUNK = 32
"""Tokens that are computed at once: more cost more arithmetic between them, fewer more products with the state."""

_MATH = {"contract", "reassoc", "nsz", "arcp"}
_EPS = np.float32(NORM_EPS)
_compiled = numba.njit(fastmath=_MATH, nogil=True, error_model="numpy")
_pasted = numba.njit(inline="always", fastmath=_MATH, nogil=True, error_model="numpy")
_delta_at, _padded = record_at(DELTA), register_jitable(padded)

Room = namedtuple("Room", "state window convolved query key keys values result gate among seen known sums decays rates")
"""What a thread works with.

state:                 ``[share, key, value]``, and window the inputs that the convolution sees, ``[.., channels]``
convolved:             ``[CHUNK, channels]``, rows padded
query, key, keys:      ``[CHUNK, key]`` twice, and the latter's transpose
values, result, known: ``[CHUNK, value]``
gate:                  ``[value]``, padded, as rows of ``result`` are
among, seen:           products of keys with keys, and of queries with keys, ``[CHUNK, CHUNK]``
sums, decays, rates:   ``[CHUNK]``
"""


def scratch_floats(key_dim: int, value_dim: int, share: int, convolution: int) -> int:
    """Floats that a thread works with."""
    channels, value_row = 2 * key_dim + share * value_dim, padded(value_dim)
    states = share * key_dim * value_dim + (convolution - 1 + CHUNK) * channels
    rows = padded(channels) + 3 * key_dim + 2 * value_dim + value_row + 2 * CHUNK + 3
    return states + CHUNK * rows + value_row


@_pasted
def _divide(delta, at):
    """A thread's `Room`, which begins at an address."""
    channels = 2 * delta.key_dim + delta.share * delta.value_dim
    row, value_row, inputs = _padded(channels), _padded(delta.value_dim), delta.convolution - 1 + CHUNK
    state = at
    window = state + 4 * delta.share * delta.key_dim * delta.value_dim
    convolved = window + 4 * inputs * channels
    query = convolved + 4 * CHUNK * row
    key = query + 4 * CHUNK * delta.key_dim
    keys = key + 4 * CHUNK * delta.key_dim
    values = keys + 4 * CHUNK * delta.key_dim
    result = values + 4 * CHUNK * delta.value_dim
    known = result + 4 * CHUNK * value_row
    among = known + 4 * CHUNK * delta.value_dim
    seen = among + 4 * CHUNK * CHUNK
    sums = seen + 4 * CHUNK * CHUNK
    decays = sums + 4 * CHUNK
    rates = decays + 4 * CHUNK
    gate = rates + 4 * CHUNK
    return Room(
        state,
        float_matrix_at(window, inputs, channels),
        float_matrix_at(convolved, CHUNK, row),
        float_matrix_at(query, CHUNK, delta.key_dim),
        float_matrix_at(key, CHUNK, delta.key_dim),
        keys,
        float_matrix_at(values, CHUNK, delta.value_dim),
        float_matrix_at(result, CHUNK, value_row),
        floats_at(gate, value_row),
        among,
        seen,
        known,
        floats_at(sums, CHUNK),
        floats_at(decays, CHUNK),
        floats_at(rates, CHUNK),
    )


@_compiled
def _add_product(left, right, out):
    """``out += left @ right``, of as many columns as ``right`` has."""
    rows, depth = left.shape
    columns = right.shape[1]
    whole = rows - rows % 4
    for i in range(0, whole, 4):
        out0, out1, out2, out3 = out[i], out[i + 1], out[i + 2], out[i + 3]
        for d in range(depth):
            a0, a1, a2, a3 = left[i, d], left[i + 1, d], left[i + 2, d], left[i + 3, d]
            row = right[d]
            for j in range(columns):
                out0[j] += a0 * row[j]
                out1[j] += a1 * row[j]
                out2[j] += a2 * row[j]
                out3[j] += a3 * row[j]
    for i in range(whole, rows):
        last = out[i]
        for d in range(depth):
            a = left[i, d]
            row = right[d]
            for j in range(columns):
                last[j] += a * row[j]


@_compiled
def _set_divided_by_length(source, target, factor):
    """``target`` is ``source`` divided by its length, times ``factor``."""
    total = _EPS
    for j in range(source.size):
        total += source[j] * source[j]
    scale = factor / np.sqrt(total)
    for j in range(source.size):
        target[j] = source[j] * scale


@_compiled
def _convolve(window, weights, out, tokens):
    """SiLU of the causal convolution of ``window [width - 1 + tokens, channels]`` into ``out [tokens, ..]``."""
    width, channels = weights.shape
    for t in range(tokens):
        row = out[t]
        for c in range(channels):
            row[c] = 0
        for w in range(width):
            source, weight = window[t + w], weights[w]
            for c in range(channels):
                row[c] += source[c] * weight[c]
        times_sigmoid(row, 0, row, 0, channels)


@_compiled
def _one(state, query, key, value, decay, rate, out):
    """The delta rule for one token: ``state [key, value]``, in place."""
    key_dim, value_dim = state.shape
    kept = np.exp(decay)
    for j in range(value_dim):
        out[j] = 0
    for d in range(key_dim):  # out is what the state says of the key so far
        row, k = state[d], key[d]
        for j in range(value_dim):
            row[j] *= kept
            out[j] += k * row[j]
    for j in range(value_dim):
        value[j] = rate * (value[j] - out[j])
        out[j] = 0
    for d in range(key_dim):
        row, k, q = state[d], key[d], query[d]
        for j in range(value_dim):
            row[j] += k * value[j]
            out[j] += q * row[j]


@_compiled
def _chunk(state, room, tokens):
    """The delta rule for a chunk of tokens: ``state [key, value]``, in place. See `kernels.delta_base`."""
    key_dim, value_dim = state.shape
    query, key, value, out = room.query[:tokens], room.key[:tokens], room.values[:tokens], room.result[:tokens]
    keys, known = float_matrix_at(room.keys, key_dim, tokens), float_matrix_at(room.known, tokens, value_dim)
    among, seen = float_matrix_at(room.among, tokens, tokens), float_matrix_at(room.seen, tokens, tokens)
    sums, rates, total = room.sums, room.rates, np.float32(0)
    for i in range(tokens):
        total += room.decays[i]
        sums[i] = total
        for d in range(key_dim):
            keys[d, i] = key[i, d]
    among[:], seen[:], known[:], out[:] = 0, 0, 0, 0
    _add_product(key, keys, among)
    _add_product(query, keys, seen)
    _add_product(key, state, known)
    _add_product(query, state, out)
    for i in range(tokens):
        fade, row = np.exp(sums[i]), value[i]
        for j in range(value_dim):
            row[j] -= fade * known[i, j]
            out[i, j] *= fade
        for before in range(i):
            share = np.exp(sums[i] - sums[before])
            seen[i, before] *= share
            share *= among[i, before]
            earlier = value[before]
            for j in range(value_dim):
                row[j] -= share * earlier[j]
        for j in range(value_dim):
            row[j] *= rates[i]
        for after in range(i + 1, tokens):
            seen[i, after] = 0
    _add_product(seen, value, out)
    fade = np.exp(sums[tokens - 1])
    for d in range(key_dim):
        row = state[d]
        for j in range(value_dim):
            row[j] *= fade
        for t in range(tokens):
            keys[d, t] *= np.exp(sums[tokens - 1] - sums[t])
    _add_product(keys, value, state)


@_compiled
def _norm_and_gate(result, gate, source, norm, eps, out):
    """``out`` is the RMS norm of ``result`` times SiLU of ``source``: see `headwise.kernels.delta_gates.gated_norm`."""
    count, total = out.size, np.float32(0)
    for j in range(count):
        total += result[j] * result[j]
        gate[j] = source[j]
    scale = np.float32(1) / np.sqrt(total / np.float32(count) + eps)
    for j in range(count):
        result[j] *= scale * norm[j] * source[j]
    times_sigmoid(result, 0, gate, 0, count)
    for j in range(count):
        out[j] = result[j]


@_pasted
def _softplus(x):
    return max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))


@_compiled
def _run(own, delta, head, first, last, room):
    """Take one head's state on by the rows ``[first, last)``; the window's last inputs come first."""
    key_dim, value_dim, share, heads = delta.key_dim, delta.value_dim, delta.share, delta.heads
    channels = 2 * key_dim + share * value_dim
    before, of_head = delta.convolution - 1, channels + share * value_dim
    weights = float_matrix_at(delta.weights + head * delta.convolution * channels * 4, delta.convolution, channels)
    speed, bias = floats_at(delta.speed + head * share * 4, share), floats_at(delta.bias + head * share * 4, share)
    norm, window, query_scale = (
        floats_at(delta.norm, value_dim),
        room.window,
        np.float32(1) / np.sqrt(np.float32(key_dim)),
    )
    while first < last:
        tokens = min(CHUNK, last - first)
        for t in range(tokens):
            row = floats_at(own.query + ((first + t) * own.query_row + head * of_head) * 4, channels)
            row_copy(row, 0, window[before + t], 0, channels)
        _convolve(window, weights, room.convolved, tokens)
        for t in range(before):
            row_copy(window[tokens + t], 0, window[t], 0, channels)
        for t in range(tokens):
            row = room.convolved[t]
            _set_divided_by_length(row[:key_dim], room.query[t], query_scale)
            _set_divided_by_length(row[key_dim : 2 * key_dim], room.key[t], np.float32(1))
        for part in range(share):
            state = float_matrix_at(room.state + part * key_dim * value_dim * 4, key_dim, value_dim)
            for t in range(tokens):
                row_copy(room.convolved[t], 2 * key_dim + part * value_dim, room.values[t], 0, value_dim)
                told = floats_at(
                    own.query + ((first + t) * own.query_row + heads * of_head + 2 * head * share) * 4, 2 * share
                )
                room.rates[t] = sigmoid(told[part])
                room.decays[t] = -speed[part] * _softplus(told[share + part] + bias[part])
            if tokens == 1:
                value, result = room.values[0], room.result[0]
                _one(state, room.query[0], room.key[0], value, room.decays[0], room.rates[0], result)
            else:
                _chunk(state, room, tokens)
            for t in range(tokens):
                at = own.query + ((first + t) * own.query_row + head * of_head + channels + part * value_dim) * 4
                out = own.out + (((first + t) * heads + head) * share + part) * value_dim * 4
                source, target = floats_at(at, value_dim), floats_at(out, value_dim)
                _norm_and_gate(room.result[t], room.gate, source, norm, delta.eps, target)
        first += tokens


@_compiled
def _load(own, delta, at, room):
    """Take a head's state from a slot that begins there, in floats of the arena; or zeros, where that is negative."""
    inputs = (delta.convolution - 1) * room.window.shape[1]
    window = floats_at(room.window.ctypes.data, inputs)
    state = floats_at(room.state, delta.share * delta.key_dim * delta.value_dim)
    if at < 0:
        window[:], state[:] = 0, 0
        return
    arena = floats_at(own.cache.arena, own.cache.arena_bytes // 4)
    row_copy(arena, at, window, 0, window.size)
    row_copy(arena, at + own.cache.value_offset, state, 0, state.size)


@_compiled
def _store(own, delta, at, room):
    inputs = (delta.convolution - 1) * room.window.shape[1]
    arena = floats_at(own.cache.arena, own.cache.arena_bytes // 4)
    row_copy(floats_at(room.window.ctypes.data, inputs), 0, arena, at, inputs)
    state = floats_at(room.state, delta.share * delta.key_dim * delta.value_dim)
    row_copy(state, 0, arena, at + own.cache.value_offset, state.size)


@_compiled
def _take_on(own, layer, delta, item, room):
    """One pair of a sequence and a head through the step."""
    sequence, head, size = item // delta.heads, item % delta.heads, own.cache.block_size
    cu, lens = ints_at(own.cu_seqlens, own.sequences + 1), ints_at(own.seq_lens, own.sequences)
    begin, stop, end = np.int64(cu[sequence]), np.int64(cu[sequence + 1]), np.int64(lens[sequence])
    if begin == stop:
        return
    start = end - (stop - begin)
    group = ints_at(layer.heads[HEAD_GROUP, 0], delta.heads)[head]
    slot = np.int64(ints_at(layer.heads[HEAD_SLOT, 0], delta.heads)[head]) * own.cache.slot_stride
    table = int_matrix_at(own.tables, own.sequences * own.groups, own.table_columns)[sequence * own.groups + group]
    source = np.int64(-1)
    if start > 0:
        source = np.int64(table[(start - 1) // size])
        if source < 0:
            source = np.int64(table[(end - 1) // size])
    _load(own, delta, source * own.cache.block_stride + slot if source >= 0 else np.int64(-1), room)
    done = start
    for column in range(start // size, (end - 1) // size + 1):
        behind, block = min((column + 1) * size, end), np.int64(table[column])
        if block < 0 and behind < end:
            continue
        _run(own, delta, head, begin + done - start, begin + behind - start, room)
        done = behind
        if block >= 0:
            _store(own, delta, block * own.cache.block_stride + slot, room)


def _attend(own, layer, counters, thread):
    own, layer = pass_at(own), layer_at(layer)
    delta, counters = _delta_at(layer.delta), longs_at(counters, FIRST_ITEM)
    room, items = _divide(delta, own.scratch + thread * own.scratch_floats * 4), own.sequences * delta.heads
    item = fetch_add(counters, TAKEN)
    while item < items:
        _take_on(own, layer, delta, item, room)
        fetch_add(counters, FINISHED)
        item = fetch_add(counters, TAKEN)


@cache
def attend() -> Any:
    """The compiled delta-nets, as a C function as that of `attention_jit.attend_of`: ``counters[FINISHED]`` pairs of a
    sequence and a head are done.
    """
    return machine_code.unit(_attend, 4, fastmath=_MATH, error_model="numpy")
