# mypy: ignore-errors
"""What of a decoder layer touches the cache, compiled for each dtype that it stores: KV write and attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import (
    contiguous_heads_at,
    float_matrix_at,
    floats_at,
    halves_at,
    heads_at,
    int8s_at,
    int_matrix_at,
    ints_at,
    long_matrix_at,
    longs_at,
)
from headwise.kernels.cpu.attention_jit import FIRST_ITEM, new_scratch
from headwise.kernels.cpu.attention_plan import FIRST_ROW, Plan
from headwise.kernels.cpu.decoder_jit import (
    ATTENTION_WORK,
    CACHE,
    CACHE_BYTES,
    CU_SEQLENS,
    DIM,
    FACTOR,
    FLOATS,
    GROUPS,
    HEAD_GROUP,
    HEAD_SINK,
    HEAD_SLOT,
    HEAD_WINDOW,
    HEADS_AT,
    HEADS_ROOM,
    IS_TILED,
    ITEM_COUNT,
    ITEMS,
    KV_HEADS,
    LAYER_FIELDS,
    PART_COUNT,
    PARTIAL_ROOM,
    PARTIAL_ROWS,
    PARTIALS,
    PARTS,
    PLAN_AT,
    PLAN_FIELDS,
    PLAN_ROWS,
    PLANS,
    Q_HEADS,
    QKV_ROOM,
    ROPE_AT,
    ROTATIONS,
    ROWS,
    SEQ_LENS,
    SEQUENCES,
    SOFTCAP,
    STEP_FIELDS,
    STEP_FLOATS,
    STRIDES,
    TABLE_COLUMNS,
    TABLES,
)
from headwise.kernels.cpu.kv_write_jit import write_tokens
from headwise.kernels.cpu.native_call import call_at

STRIDE_FIELDS = 8

_compiled = numba.njit(nogil=True, error_model="numpy")
_inlined = numba.njit(forceinline=True, nogil=True, error_model="numpy")


@_inlined
def _heads(layer, which):
    return ints_at(layer[HEADS_AT + 2 * which], layer[HEADS_AT + 2 * which + 1])


@_inlined
def _batch(step):
    """The batch's ``cu_seqlens_q``, ``seq_lens``, ``block_tables`` and groups."""
    sequences, groups = step[SEQUENCES], step[GROUPS]
    tables = int_matrix_at(step[TABLES], sequences * groups, step[TABLE_COLUMNS])
    return ints_at(step[CU_SEQLENS], sequences + 1), ints_at(step[SEQ_LENS], sequences), tables, groups


@_inlined
def _all_heads(step, first, count):
    """Some of the heads of queries, keys and values: ``[rows, count, dim]``."""
    dim = step[DIM]
    stride = (step[Q_HEADS] + 2 * step[KV_HEADS]) * dim
    return heads_at(step[QKV_ROOM] + first * dim * 4, step[ROWS], count, dim, stride)


@_compiled
def _write(kv, step, layer, first, last):
    q_heads, kv_heads, rows, half = step[Q_HEADS], step[KV_HEADS], step[ROWS], step[DIM] // 2
    query, key = _all_heads(step, 0, q_heads), _all_heads(step, q_heads, kv_heads)
    value = _all_heads(step, q_heads + kv_heads, kv_heads)
    angles = step[ROTATIONS] + layer[ROPE_AT] * 2 * rows * half * 4
    cosines, sines = float_matrix_at(angles, rows, half), float_matrix_at(angles + rows * half * 4, rows, half)
    scales, strides = floats_at(step[CACHE], step[CACHE_BYTES] // 4), longs_at(step[STRIDES], STRIDE_FIELDS)
    cu, lens, tables, groups = _batch(step)
    write_tokens(
        query, key, value, cosines, sines, kv, scales, strides, cu, lens, tables, groups, _heads(layer, HEAD_GROUP),
        _heads(layer, HEAD_SLOT), first, last,
    )  # fmt: skip


@_compiled
def _attend(kv, step, layer, counters_at):
    q_heads, dim, rows = step[Q_HEADS], step[DIM], step[ROWS]
    share, floats = q_heads // step[KV_HEADS], floats_at(step[FLOATS], STEP_FLOATS)
    scales, strides = floats_at(step[CACHE], step[CACHE_BYTES] // 4), longs_at(step[STRIDES], STRIDE_FIELDS)
    _, _, tables, groups = _batch(step)
    attention = (
        _all_heads(step, 0, q_heads), kv, scales, strides, tables, groups, _heads(layer, HEAD_GROUP),
        _heads(layer, HEAD_SLOT), _heads(layer, HEAD_WINDOW), _heads(layer, HEAD_SINK), floats[FACTOR],
        floats[SOFTCAP], share, dim,
    )  # fmt: skip
    p = longs_at(step[PLANS] + layer[PLAN_AT] * PLAN_FIELDS * 8, PLAN_FIELDS)
    items, parts = long_matrix_at(p[ITEMS], p[ITEM_COUNT], FIRST_ROW + 1), long_matrix_at(p[PARTS], p[PART_COUNT], 2)
    plan = Plan(items, parts, p[PLAN_ROWS], p[IS_TILED] > 0, p[PARTIAL_ROWS], np.int64(1))
    room, at = step[PARTIAL_ROOM], step[PARTIALS]
    partials = (floats_at(at, room), floats_at(at + 4 * room, room), floats_at(at + 8 * room, room * dim))
    out = contiguous_heads_at(step[HEADS_ROOM], rows, q_heads, dim)
    counters = longs_at(counters_at, FIRST_ITEM + p[ITEM_COUNT])
    what = (plan.items, plan.parts, plan.rows, plan.is_tiled, plan.partial_rows, plan.workers)
    call_at(step[ATTENTION_WORK], (attention, what, partials, new_scratch(plan, share, dim), counters, out))


def _write_float32(step_at, layer_at, first, last):
    step = longs_at(step_at, STEP_FIELDS)
    _write(floats_at(step[CACHE], step[CACHE_BYTES] // 4), step, longs_at(layer_at, LAYER_FIELDS), first, last)


def _write_bfloat16(step_at, layer_at, first, last):
    step = longs_at(step_at, STEP_FIELDS)
    _write(halves_at(step[CACHE], step[CACHE_BYTES] // 2), step, longs_at(layer_at, LAYER_FIELDS), first, last)


def _write_int8(step_at, layer_at, first, last):
    step = longs_at(step_at, STEP_FIELDS)
    _write(int8s_at(step[CACHE], step[CACHE_BYTES]), step, longs_at(layer_at, LAYER_FIELDS), first, last)


def _attend_float32(step_at, layer_at, counters):
    step = longs_at(step_at, STEP_FIELDS)
    _attend(floats_at(step[CACHE], step[CACHE_BYTES] // 4), step, longs_at(layer_at, LAYER_FIELDS), counters)


def _attend_bfloat16(step_at, layer_at, counters):
    step = longs_at(step_at, STEP_FIELDS)
    _attend(halves_at(step[CACHE], step[CACHE_BYTES] // 2), step, longs_at(layer_at, LAYER_FIELDS), counters)


def _attend_int8(step_at, layer_at, counters):
    step = longs_at(step_at, STEP_FIELDS)
    _attend(int8s_at(step[CACHE], step[CACHE_BYTES]), step, longs_at(layer_at, LAYER_FIELDS), counters)


_FUNCTIONS = {
    "float32": (_write_float32, _attend_float32),
    "bfloat16": (_write_bfloat16, _attend_bfloat16),
    "int8": (_write_int8, _attend_int8),
}


@cache
def write_and_attend(kv_dtype: str) -> tuple[Any, Any]:
    """The compiled KV write and attention of a cache of that dtype, as C functions.

    Integers of the write: addresses of a step and of a layer, the first row and the one behind the last. Of attention:
    these addresses, and that of its counters.
    """
    write, attend = _FUNCTIONS[kv_dtype]
    return (
        machine_code.unit(write, 4, error_model="numpy"),
        machine_code.unit(attend, 3, error_model="numpy"),
    )
