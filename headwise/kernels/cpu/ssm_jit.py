# mypy: ignore-errors
"""The rule of state space models over a state that a thread has, and what is between a layer's projections, compiled.

See `headwise.kernels.ssm_base`.
"""

from __future__ import annotations

import numpy as np

from headwise.kernels.cpu.addresses import float_matrix_at, floats_at, ints_at
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.gates import set_exponentials, times_sigmoid
from headwise.kernels.cpu.state_room_jit import CHUNK, add_product, compiled, convolve, softplus


@compiled
def _one(state, query, key, value, kept, step, skip, out):
    """One token: ``state [key, value]``, in place."""
    key_dim, value_dim = state.shape
    for j in range(value_dim):
        out[j] = skip * value[j]
    for d in range(key_dim):
        row, q, k = state[d], query[d], key[d] * step
        for j in range(value_dim):
            row[j] = kept * row[j] + k * value[j]
            out[j] += q * row[j]


@compiled
def _see(room, key_dim, tokens):
    """What a chunk's tokens see of each other, whatever the head: queries and keys are what is convolved."""
    keys, seen = float_matrix_at(room.keys, key_dim, tokens), float_matrix_at(room.seen, tokens, tokens)
    query = room.query[:tokens]
    for i in range(tokens):
        row = room.convolved[i]
        for d in range(key_dim):
            query[i, d] = row[d]
            keys[d, i] = row[key_dim + d]
    seen[:] = 0
    add_product(query, keys, seen)


@compiled
def _chunk(state, room, skip, tokens):
    """A chunk of tokens, of which rates are steps: ``state [key, value]``, in place."""
    key_dim, value_dim = state.shape
    query, value, out = room.query[:tokens], room.values[:tokens], room.result[:tokens]
    seen, faded = float_matrix_at(room.seen, tokens, tokens), float_matrix_at(room.among, tokens, tokens)
    keys, fading = float_matrix_at(room.keys, key_dim, tokens), float_matrix_at(room.known, 1, tokens)[0]
    sums, fades, total = room.sums, room.fades, np.float32(0)
    for i in range(tokens):
        total += room.decays[i]
        sums[i] = total
    out[:] = 0
    add_product(query, state, out)
    for i in range(tokens):
        kept = np.exp(sums[i])
        for j in range(value_dim):
            out[i, j] *= kept
        for before in range(i + 1):
            fades[before] = sums[i] - sums[before]
        set_exponentials(fades, 0, i + 1)
        for before in range(i + 1):
            faded[i, before] = fades[before] * room.rates[before] * seen[i, before]
        for after in range(i + 1, tokens):
            faded[i, after] = 0
        fading[i] = np.exp(total - sums[i]) * room.rates[i]
    add_product(faded, value, out)
    for i in range(tokens):  # what is left of each is asked for no more: what becomes of it goes into the state
        for j in range(value_dim):
            out[i, j] += skip * value[i, j]
            value[i, j] *= fading[i]
    kept = np.exp(total)
    for d in range(key_dim):
        row = state[d]
        for j in range(value_dim):
            row[j] *= kept
    add_product(keys, value, state)


@compiled
def _gate(result, gate, source, out):
    """``out`` is ``result`` times SiLU of ``source``."""
    count = out.size
    for j in range(count):
        gate[j] = source[j]
        result[j] *= source[j]
    times_sigmoid(result, 0, gate, 0, count)
    for j in range(count):
        out[j] = result[j]


@compiled
def _taken(own, states, member, first, tokens, room):
    """Inputs of a member's convolution, behind those that come before: of its group, then its own; convolved."""
    key_dim, before = states.key_dim, states.convolution - 1
    keys, values = 2 * key_dim, states.share * states.value_dim
    group = np.int64(ints_at(states.group, states.heads)[member])
    window, at = room.window, own.query + (states.groups * keys + member * 2 * values) * 4
    for t in range(tokens):
        row = (first + t) * own.query_row * 4
        row_copy(floats_at(own.query + row + group * keys * 4, keys), 0, window[before + t], 0, keys)
        row_copy(floats_at(at + row, values), 0, window[before + t], keys, values)
    channels = keys + values
    taps = float_matrix_at(states.weights + member * states.convolution * channels * 4, states.convolution, channels)
    bias = floats_at(states.convolution_bias + member * channels * 4, channels)
    convolve(window, taps, bias, room.convolved, tokens)
    for t in range(before):
        row_copy(window[tokens + t], 0, window[t], 0, channels)


@compiled
def run(own, states, member, first, last, room):
    """Take one member's states on by the rows ``[first, last)``; the window's last inputs come first."""
    key_dim, value_dim, share, members = states.key_dim, states.value_dim, states.share, states.heads
    values = share * value_dim
    gates_at = states.groups * 2 * key_dim + member * 2 * values + values
    told_at = states.groups * 2 * key_dim + members * 2 * values + member * share
    speed, bias, skip = (
        floats_at(states.speed + member * share * 4, share),
        floats_at(states.bias + member * share * 4, share),
        floats_at(states.skip + member * share * 4, share),
    )
    while first < last:
        tokens = min(CHUNK, last - first)
        _taken(own, states, member, first, tokens, room)
        if tokens > 1:
            _see(room, key_dim, tokens)
        for part in range(share):
            state = float_matrix_at(room.state + part * key_dim * value_dim * 4, key_dim, value_dim)
            for t in range(tokens):
                row_copy(room.convolved[t], 2 * key_dim + part * value_dim, room.values[t], 0, value_dim)
                told = floats_at(own.query + ((first + t) * own.query_row + told_at + part) * 4, 1)[0]
                room.rates[t] = softplus(told + bias[part])
                room.decays[t] = -speed[part] * room.rates[t]
            if tokens == 1:
                row, kept = room.convolved[0], np.exp(room.decays[0])
                query, key = row[:key_dim], row[key_dim : 2 * key_dim]
                _one(state, query, key, room.values[0], kept, room.rates[0], skip[part], room.result[0])
            else:
                _chunk(state, room, skip[part], tokens)
            for t in range(tokens):
                gate = own.query + ((first + t) * own.query_row + gates_at + part * value_dim) * 4
                out = own.out + (((first + t) * members + member) * share + part) * value_dim * 4
                _gate(room.result[t], room.gate, floats_at(gate, value_dim), floats_at(out, value_dim))
        first += tokens
