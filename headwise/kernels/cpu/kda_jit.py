# mypy: ignore-errors
"""The rule of Kimi Delta Attention over a state that a thread has, and what is between a layer's projections, compiled.

See `headwise.kernels.kda_base`. Ratios of decays are made as tokens come: each key of a chunk is multiplied by what
every later token keeps of its channels. So no ratio is divided, no sum of decays is ever taken, and nothing can
overflow, however fast channels forget. It costs ``3 * key_dim`` products for two tokens of a chunk, where a decay of
all channels alike costs two thirds of that.
"""

from __future__ import annotations

import numpy as np

from headwise.kernels.cpu.addresses import float_matrix_at, floats_at
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.delta_jit import set_divided_by_length
from headwise.kernels.cpu.gates import set_exponentials, sigmoid, times_sigmoid
from headwise.kernels.cpu.state_room_jit import CHUNK, add_product, compiled, convolve

_TWO = np.float32(2)
_SERIES = tuple(np.float32(1 / odd) for odd in (3, 5, 7, 9, 11, 13))


@compiled
def _set_kept(told, bias, speed, room, out):
    """``out = exp(-speed * softplus(told + bias))``, of each channel; all rows but ``told`` and ``bias`` are padded.

    ``log(1 + u)`` is ``2 artanh(s)`` of ``s = u / (2 + u)``, at most 1 / 3: seven terms of its series, which vectors
    are made of, leave a relative error below 2e-8.
    """
    count, small = bias.size, room.keeps[CHUNK]
    c3, c5, c7, c9, c11, c13 = _SERIES
    for d in range(count):
        x = told[d] + bias[d]
        out[d] = max(x, np.float32(0))
        small[d] = -abs(x)
    set_exponentials(small, 0, count)
    for d in range(count):
        s = small[d] / (_TWO + small[d])
        q = s * s
        more = _TWO * s * (np.float32(1) + q * (c3 + q * (c5 + q * (c7 + q * (c9 + q * (c11 + q * c13))))))
        out[d] = -speed * (out[d] + more)
    set_exponentials(out, 0, count)


@compiled
def _one(state, query, key, value, kept, rate, out):
    """One token: ``state [key, value]``, in place."""
    key_dim, value_dim = state.shape
    for j in range(value_dim):
        out[j] = 0
    for d in range(key_dim):  # out is what the state says of the key so far
        row, k, keep = state[d], key[d], kept[d]
        for j in range(value_dim):
            row[j] *= keep
            out[j] += k * row[j]
    for j in range(value_dim):
        value[j] = rate * (value[j] - out[j])
        out[j] = 0
    for d in range(key_dim):
        row, k, q = state[d], key[d], query[d]
        for j in range(value_dim):
            row[j] += k * value[j]
            out[j] += q * row[j]


@compiled
def _pair(room, key_dim, tokens):
    """``among`` and ``seen``, of ratios of decays; keys become what is left of each behind the chunk, queries and
    ``keys [tokens, key]`` what the state before the chunk is asked. Returns what is left of that."""
    query, key, kept = room.query, room.key, room.keeps
    started = float_matrix_at(room.keys, tokens, key_dim)
    among, seen = float_matrix_at(room.among, tokens, tokens), float_matrix_at(room.seen, tokens, tokens)
    left = kept[CHUNK]
    for d in range(key_dim):
        left[d] = 1
    for i in range(tokens):
        q, k, keep = query[i], key[i], kept[i]
        for before in range(i):
            earlier, alike, asked = key[before], np.float32(0), np.float32(0)
            for d in range(key_dim):
                faded = earlier[d] * keep[d]
                earlier[d] = faded
                alike += k[d] * faded
                asked += q[d] * faded
            among[i, before], seen[i, before] = alike, asked
        asked = np.float32(0)
        for d in range(key_dim):
            asked += q[d] * k[d]
        seen[i, i] = asked
        for after in range(i + 1, tokens):
            seen[i, after] = 0
        for d in range(key_dim):
            left[d] *= keep[d]
            started[i, d] = left[d] * k[d]
            q[d] *= left[d]
    return left


@compiled
def _chunk(state, room, tokens):
    """A chunk of tokens: ``state [key, value]``, in place. See `headwise.kernels.kda_base`."""
    key_dim, value_dim = state.shape
    left = _pair(room, key_dim, tokens)
    query, key, value, out = room.query[:tokens], room.key, room.values[:tokens], room.result[:tokens]
    among, seen = float_matrix_at(room.among, tokens, tokens), float_matrix_at(room.seen, tokens, tokens)
    known = float_matrix_at(room.known, tokens, value_dim)
    known[:], out[:] = 0, 0
    add_product(float_matrix_at(room.keys, tokens, key_dim), state, known)
    add_product(query, state, out)
    for i in range(tokens):
        row, rate = value[i], room.rates[i]
        for j in range(value_dim):
            row[j] -= known[i, j]
        for before in range(i):
            share, earlier = among[i, before], value[before]
            for j in range(value_dim):
                row[j] -= share * earlier[j]
        for j in range(value_dim):
            row[j] *= rate
    add_product(seen, value, out)
    keys = float_matrix_at(room.keys, key_dim, tokens)
    for d in range(key_dim):
        row = state[d]
        for j in range(value_dim):
            row[j] *= left[d]
        for t in range(tokens):
            keys[d, t] = key[t, d]
    add_product(keys, value, state)


@compiled
def _norm_and_gate(result, gate, source, norm, eps, out):
    """``out`` is the RMS norm of ``result`` times the sigmoid of ``source``."""
    count, total = out.size, np.float32(0)
    for j in range(count):
        total += result[j] * result[j]
        gate[j] = source[j]
    scale = np.float32(1) / np.sqrt(total / np.float32(count) + eps)
    for j in range(count):
        result[j] *= scale * norm[j]
    times_sigmoid(result, 0, gate, 0, count)
    for j in range(count):
        out[j] = result[j]


@compiled
def run(own, kda, head, first, last, room):
    """Take one head's state on by the rows ``[first, last)``; the window's last inputs come first."""
    key_dim, value_dim, heads = kda.key_dim, kda.value_dim, kda.heads
    channels, before = 2 * key_dim + value_dim, kda.convolution - 1
    weights = float_matrix_at(kda.weights + head * kda.convolution * channels * 4, kda.convolution, channels)
    speed, bias = floats_at(kda.speed, heads)[head], floats_at(kda.bias + head * key_dim * 4, key_dim)
    norm, none, window = floats_at(kda.norm, value_dim), floats_at(kda.norm, 0), room.window
    query_scale = np.float32(1) / np.sqrt(np.float32(key_dim))
    state = float_matrix_at(room.state, key_dim, value_dim)
    while first < last:
        tokens = min(CHUNK, last - first)
        for t in range(tokens):
            row, fresh = own.query + (first + t) * own.query_row * 4, window[before + t]
            keys, values = heads + head, 2 * heads * key_dim + head * value_dim
            row_copy(floats_at(row + head * key_dim * 4, key_dim), 0, fresh, 0, key_dim)
            row_copy(floats_at(row + keys * key_dim * 4, key_dim), 0, fresh, key_dim, key_dim)
            row_copy(floats_at(row + values * 4, value_dim), 0, fresh, 2 * key_dim, value_dim)
            room.rates[t] = sigmoid(floats_at(row + (heads * channels + head) * 4, 1)[0])
            told = floats_at(own.key + ((first + t) * own.key_row + head * key_dim) * 4, key_dim)
            _set_kept(told, bias, speed, room, room.keeps[t])
        convolve(window, weights, none, room.convolved, tokens)
        for t in range(before):
            row_copy(window[tokens + t], 0, window[t], 0, channels)
        for t in range(tokens):
            row = room.convolved[t]
            set_divided_by_length(row[:key_dim], room.query[t], query_scale)
            set_divided_by_length(row[key_dim : 2 * key_dim], room.key[t], np.float32(1))
            row_copy(row, 2 * key_dim, room.values[t], 0, value_dim)
        if tokens == 1:
            query, key, value = room.query[0], room.key[0], room.values[0]
            _one(state, query, key, value, room.keeps[0], room.rates[0], room.result[0])
        else:
            _chunk(state, room, tokens)
        for t in range(tokens):
            source = floats_at(own.value + ((first + t) * own.value_row + head * value_dim) * 4, value_dim)
            target = floats_at(own.out + ((first + t) * heads + head) * value_dim * 4, value_dim)
            _norm_and_gate(room.result[t], room.gate, source, norm, kda.eps, target)
        first += tokens
