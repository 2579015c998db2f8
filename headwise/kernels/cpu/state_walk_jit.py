# mypy: ignore-errors
"""Recurrent states through a step, compiled: read from the cache, taken on by a rule, and left where blocks end.

Threads take pairs of a sequence and a member from a counter.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headwise.kernels.base import FOLLOWS
from headwise.kernels.cpu import delta_jit, kda_jit, machine_code, ssm_jit
from headwise.kernels.cpu.addresses import floats_at, int_matrix_at, ints_at, layer_at, longs_at, pass_at, record_at
from headwise.kernels.cpu.attention_jit import FINISHED, FIRST_ITEM, TAKEN
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.records import HEAD_GROUP, HEAD_SLOT, KDA, SSM, STATES
from headwise.kernels.cpu.state_room_jit import MATH, compiled, divide
from headwise.kernels.cpu.threads import fetch_add

_states_at = record_at(STATES)


@compiled
def _load(own, states, at, room):
    """Take a head's state from a slot that begins there, in floats of the arena; or zeros, where that is negative."""
    inputs = (states.convolution - 1) * room.window.shape[1]
    window = floats_at(room.window.ctypes.data, inputs)
    state = floats_at(room.state, states.share * states.key_dim * states.value_dim)
    if at < 0:
        window[:], state[:] = 0, 0
        return
    arena = floats_at(own.cache.arena, own.cache.arena_bytes // 4)
    row_copy(arena, at, window, 0, window.size)
    row_copy(arena, at + own.cache.value_offset, state, 0, state.size)


@compiled
def _store(own, states, at, room):
    inputs = (states.convolution - 1) * room.window.shape[1]
    arena = floats_at(own.cache.arena, own.cache.arena_bytes // 4)
    row_copy(floats_at(room.window.ctypes.data, inputs), 0, arena, at, inputs)
    state = floats_at(room.state, states.share * states.key_dim * states.value_dim)
    row_copy(state, 0, arena, at + own.cache.value_offset, state.size)


@compiled
def _run(own, states, head, first, last, room):
    """Take a member's states on by the rows ``[first, last)``, by its rule."""
    if states.rule == SSM:
        ssm_jit.run(own, states, head, first, last, room)
    elif states.rule == KDA:
        kda_jit.run(own, states, head, first, last, room)
    else:
        delta_jit.run(own, states, head, first, last, room)


@compiled
def _followed(own, sequence):
    """The last of the sequences that follow one, and the last of these whose token is known."""
    last = known = sequence
    if own.follows != 0:
        follows = ints_at(own.follows, own.sequences)
        while last + 1 < own.sequences and follows[last + 1] != 0:
            last += 1
            if follows[last] == FOLLOWS:
                known = last
    return last, known


@compiled
def _take_on(own, layer, states, item, room):
    """One pair of a sequence and a member through the step; with those that follow the sequence, token by token."""
    sequence, head, size = item // states.heads, item % states.heads, own.cache.block_size
    if own.follows != 0 and ints_at(own.follows, own.sequences)[sequence] != 0:
        return
    cu, lens = ints_at(own.cu_seqlens, own.sequences + 1), ints_at(own.seq_lens, own.sequences)
    last, known = _followed(own, sequence)
    begin, stop, end = np.int64(cu[sequence]), np.int64(cu[last + 1]), np.int64(lens[known])
    if begin == stop:
        return
    start = lens[sequence] - (np.int64(cu[sequence + 1]) - begin)
    group = ints_at(layer.heads[HEAD_GROUP, 0], states.heads)[head]
    slot = np.int64(ints_at(layer.heads[HEAD_SLOT, 0], states.heads)[head]) * own.cache.slot_stride
    table = int_matrix_at(own.tables, own.sequences * own.groups, own.table_columns)[sequence * own.groups + group]
    source = np.int64(-1)
    if start > 0:
        source = np.int64(table[(start - 1) // size])
        if source < 0:
            source = np.int64(table[(end - 1) // size])
    _load(own, states, source * own.cache.block_stride + slot if source >= 0 else np.int64(-1), room)
    done, at_once = begin, stop - begin if last == sequence else np.int64(1)
    for column in range(start // size, (end - 1) // size + 1):
        behind, block = min((column + 1) * size, end), np.int64(table[column])
        if block < 0 and behind < end:
            continue
        while done < begin + behind - start:
            rows = min(at_once, begin + behind - start - done)
            _run(own, states, head, done, done + rows, room)
            done += rows
        if block >= 0:
            _store(own, states, block * own.cache.block_stride + slot, room)
    while done < stop:  # of guesses no state is left
        _run(own, states, head, done, done + 1, room)
        done += 1


def _attend(own, layer, counters, thread):
    own, layer = pass_at(own), layer_at(layer)
    states, counters = _states_at(layer.states), longs_at(counters, FIRST_ITEM)
    room, items = divide(states, own.scratch + thread * own.scratch_floats * 4), own.sequences * states.heads
    item = fetch_add(counters, TAKEN)
    while item < items:
        _take_on(own, layer, states, item, room)
        fetch_add(counters, FINISHED)
        item = fetch_add(counters, TAKEN)


@cache
def attend() -> Any:
    """The compiled delta-nets, as a C function as that of `attention_jit.attend_of`: ``counters[FINISHED]`` pairs of a
    sequence and a head are done.
    """
    return machine_code.unit(_attend, 4, fastmath=MATH, error_model="numpy")
