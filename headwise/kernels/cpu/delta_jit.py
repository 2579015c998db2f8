# mypy: ignore-errors
"""The gated delta rule over a state that a thread has, and what is between a layer's projections, compiled."""

from __future__ import annotations

import numpy as np

from headwise.kernels.cpu.addresses import float_matrix_at, floats_at
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.gates import set_exponentials, sigmoid, times_sigmoid
from headwise.kernels.cpu.state_room_jit import CHUNK, add_product, compiled, convolve, softplus
from headwise.kernels.delta_base import NORM_EPS

_EPS = np.float32(NORM_EPS)


@compiled
def set_divided_by_length(source, target, factor):
    """``target`` is ``source`` divided by its length, times ``factor``."""
    total = _EPS
    for j in range(source.size):
        total += source[j] * source[j]
    scale = factor / np.sqrt(total)
    for j in range(source.size):
        target[j] = source[j] * scale


@compiled
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


@compiled
def _chunk(state, room, tokens):
    """The delta rule for a chunk of tokens: ``state [key, value]``, in place. See `kernels.delta_base`."""
    key_dim, value_dim = state.shape
    query, key, value, out = room.query[:tokens], room.key[:tokens], room.values[:tokens], room.result[:tokens]
    keys, known = float_matrix_at(room.keys, key_dim, tokens), float_matrix_at(room.known, tokens, value_dim)
    among, seen = float_matrix_at(room.among, tokens, tokens), float_matrix_at(room.seen, tokens, tokens)
    sums, fades, rates, total = room.sums, room.fades, room.rates, np.float32(0)
    for i in range(tokens):
        total += room.decays[i]
        sums[i] = total
        for d in range(key_dim):
            keys[d, i] = key[i, d]
    among[:], seen[:], known[:], out[:] = 0, 0, 0, 0
    add_product(key, keys, among)
    add_product(query, keys, seen)
    add_product(key, state, known)
    add_product(query, state, out)
    for i in range(tokens):
        fade, row = np.exp(sums[i]), value[i]
        for j in range(value_dim):
            row[j] -= fade * known[i, j]
            out[i, j] *= fade
        for before in range(i):
            fades[before] = sums[i] - sums[before]
        set_exponentials(fades, 0, i)
        for before in range(i):
            share = fades[before]
            seen[i, before] *= share
            share *= among[i, before]
            earlier = value[before]
            for j in range(value_dim):
                row[j] -= share * earlier[j]
        for j in range(value_dim):
            row[j] *= rates[i]
        for after in range(i + 1, tokens):
            seen[i, after] = 0
    add_product(seen, value, out)
    fade = np.exp(sums[tokens - 1])
    for d in range(key_dim):
        row = state[d]
        for j in range(value_dim):
            row[j] *= fade
        for t in range(tokens):
            keys[d, t] *= np.exp(sums[tokens - 1] - sums[t])
    add_product(keys, value, state)


@compiled
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


@compiled
def run(own, delta, head, first, last, room):
    """Take one head's state on by the rows ``[first, last)``; the window's last inputs come first."""
    key_dim, value_dim, share, heads = delta.key_dim, delta.value_dim, delta.share, delta.heads
    channels = 2 * key_dim + share * value_dim
    before, of_head = delta.convolution - 1, channels + share * value_dim
    weights = float_matrix_at(delta.weights + head * delta.convolution * channels * 4, delta.convolution, channels)
    speed, bias = floats_at(delta.speed + head * share * 4, share), floats_at(delta.bias + head * share * 4, share)
    norm, none, window = floats_at(delta.norm, value_dim), floats_at(delta.norm, 0), room.window
    query_scale = np.float32(1) / np.sqrt(np.float32(key_dim))
    while first < last:
        tokens = min(CHUNK, last - first)
        for t in range(tokens):
            row = floats_at(own.query + ((first + t) * own.query_row + head * of_head) * 4, channels)
            row_copy(row, 0, window[before + t], 0, channels)
        convolve(window, weights, none, room.convolved, tokens)
        for t in range(before):
            row_copy(window[tokens + t], 0, window[t], 0, channels)
        for t in range(tokens):
            row = room.convolved[t]
            set_divided_by_length(row[:key_dim], room.query[t], query_scale)
            set_divided_by_length(row[key_dim : 2 * key_dim], room.key[t], np.float32(1))
        for part in range(share):
            state = float_matrix_at(room.state + part * key_dim * value_dim * 4, key_dim, value_dim)
            for t in range(tokens):
                row_copy(room.convolved[t], 2 * key_dim + part * value_dim, room.values[t], 0, value_dim)
                told = floats_at(
                    own.query + ((first + t) * own.query_row + heads * of_head + 2 * head * share) * 4, 2 * share
                )
                room.rates[t] = sigmoid(told[part])
                room.decays[t] = -speed[part] * softplus(told[share + part] + bias[part])
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
