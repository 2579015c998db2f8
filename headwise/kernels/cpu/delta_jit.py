# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.delta_attention`: the gated delta rule over states in the cache.

Products are written as sums of rows: each row of the right matrix is added to four rows of the result at once, which
the compiler makes vectors of.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
from numba import types

from headwise.kernels.cpu.machine_code import callable_from_python

CHUNK = 32
"""Tokens that are computed at once: more cost more arithmetic between them, fewer more products with the state."""

_MATH = {"contract", "reassoc", "nsz", "arcp"}
_FLOAT, _INT = types.float32, types.int64
_compiled = numba.njit(fastmath=_MATH, nogil=True, error_model="numpy")


@_compiled
def _add_product(left, right, out):
    """``out += left @ right``."""
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
def _divide_by_length(rows, factor, eps):
    """Each row divided by its length, times ``factor``."""
    for i in range(rows.shape[0]):
        row = rows[i]
        total = eps
        for j in range(row.size):
            total += row[j] * row[j]
        scale = factor / np.sqrt(total)
        for j in range(row.size):
            row[j] *= scale


@_compiled
def _convolve(window, weights, out):
    """SiLU of the causal convolution of ``window [width - 1 + C, channels]`` into ``out [C, channels]``."""
    width, channels = weights.shape
    for t in range(out.shape[0]):
        row = out[t]
        row[:] = 0
        for w in range(width):
            source, weight = window[t + w], weights[w]
            for c in range(channels):
                row[c] += source[c] * weight[c]
        for c in range(channels):
            row[c] = row[c] / (np.float32(1) + np.exp(-row[c]))


@_compiled
def _one(state, query, key, value, decay, rate, out):
    """The delta rule for one token: ``state [key, value]``, in place."""
    key_dim, value_dim = state.shape
    kept = np.exp(decay)
    out[:] = 0
    for d in range(key_dim):  # out is what the state says of the key so far
        row, k = state[d], key[d]
        for j in range(value_dim):
            row[j] *= kept
            out[j] += k * row[j]
    for j in range(value_dim):
        value[j] = rate * (value[j] - out[j])
    out[:] = 0
    for d in range(key_dim):
        row, k, q = state[d], key[d], query[d]
        for j in range(value_dim):
            row[j] += k * value[j]
            out[j] += q * row[j]


@_compiled
def _chunk(state, query, key, value, decays, rates, out):
    """The delta rule for a chunk of ``C`` tokens: ``state [key, value]``, in place. See `kernels.delta_base`."""
    tokens, value_dim = value.shape
    sums = np.cumsum(decays)
    keys = np.ascontiguousarray(key.T)
    among, seen = np.zeros((tokens, tokens), np.float32), np.zeros((tokens, tokens), np.float32)
    _add_product(key, keys, among)
    _add_product(query, keys, seen)
    known = np.zeros((tokens, value_dim), np.float32)
    _add_product(key, state, known)
    out[:] = 0
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
    fade = np.exp(sums[-1])
    for d in range(state.shape[0]):
        row = state[d]
        for j in range(value_dim):
            row[j] *= fade
        for t in range(tokens):
            keys[d, t] *= np.exp(sums[-1] - sums[t])
    _add_product(keys, value, state)


@_compiled
def _run(mixed, decay, rate, weights, window, state, out, eps):
    """Take one head's ``window`` (its last inputs come first) and ``state [share, key, value]`` on by some tokens."""
    tokens, channels = mixed.shape
    share, key_dim, value_dim = state.shape
    before = weights.shape[0] - 1
    query_scale = np.float32(1) / np.sqrt(np.float32(key_dim))
    convolved = np.empty((min(tokens, CHUNK), channels), np.float32)
    for first in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - first)
        window[before : before + count] = mixed[first : first + count]
        rows = convolved[:count]
        _convolve(window, weights, rows)
        for t in range(before):
            window[t] = window[count + t]
        query = np.ascontiguousarray(rows[:, :key_dim])
        key = np.ascontiguousarray(rows[:, key_dim : 2 * key_dim])
        _divide_by_length(query, query_scale, eps)
        _divide_by_length(key, np.float32(1), eps)
        for head in range(share):
            at = 2 * key_dim + head * value_dim
            value = np.ascontiguousarray(rows[:, at : at + value_dim])
            result = np.empty((count, value_dim), np.float32)
            if count == 1:
                _one(state[head], query[0], key[0], value[0], decay[first, head], rate[first, head], result[0])
            else:
                decays = np.ascontiguousarray(decay[first : first + count, head])
                _chunk(state[head], query, key, value, decays, rate[first : first + count, head], result)
            out[first : first + count, head] = result


@cache
def attend_items():
    """The compiled function below."""
    each, weights, out = _FLOAT[:, :, ::1], _FLOAT[:, :, ::1], _FLOAT[:, :, :, ::1]
    ints, tables = types.int32[::1], types.int32[:, ::1]
    arguments = (
        _INT, _INT, each, each, each, weights, _FLOAT[::1], _INT, _INT, _INT, ints, ints, tables, _INT, ints, ints,
        _INT, _FLOAT, out,
    )  # fmt: skip
    return callable_from_python(_attend_items, arguments, fastmath=_MATH, nogil=True, error_model="numpy")


def _attend_items(
    first, last, mixed, rate, decay, weights, arena, block_floats, slot_floats, recurrent_at,
    cu_seqlens, seq_lens, tables, groups, group, slot, size, eps, out,
):  # fmt: skip
    """The pairs ``first .. last - 1`` of (sequence, head) of a batch; ``arena`` is float32."""
    heads = group.size
    share, value_dim = out.shape[2], out.shape[3]
    width, channels = weights.shape[1], weights.shape[2]
    key_dim = (channels - share * value_dim) // 2
    inputs_floats, state_floats = (width - 1) * channels, share * key_dim * value_dim
    state = np.empty((share, key_dim, value_dim), np.float32)
    window = np.empty((width - 1 + CHUNK, channels), np.float32)
    for item in range(first, last):
        sequence, head = item // heads, item % heads
        begin, stop = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        if begin == stop:
            continue
        end = seq_lens[sequence]
        start = end - (stop - begin)
        table = tables[sequence * groups + group[head]]
        source = -1
        if start > 0:
            source = table[(start - 1) // size]
            if source < 0:
                source = table[(end - 1) // size]
        if source < 0:
            state[:] = 0
            window[:] = 0
        else:
            at = source * block_floats + slot[head] * slot_floats
            window.reshape(-1)[:inputs_floats] = arena[at : at + inputs_floats]
            at += recurrent_at
            state.reshape(-1)[:] = arena[at : at + state_floats]
        done = start
        for column in range(start // size, (end - 1) // size + 1):
            behind = min((column + 1) * size, end)
            block = table[column]
            if block < 0 and behind < end:
                continue
            rows = slice(begin + done - start, begin + behind - start)
            _run(
                mixed[rows, head],
                decay[rows, head],
                rate[rows, head],
                weights[head],
                window,
                state,
                out[rows, head],
                eps,
            )
            done = behind
            if block >= 0:
                at = block * block_floats + slot[head] * slot_floats
                arena[at : at + inputs_floats] = window.reshape(-1)[:inputs_floats]
                at += recurrent_at
                arena[at : at + state_floats] = state.reshape(-1)
