# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.decoder`: many layers of a decoder in one call, on several threads.

A layer is a run of *phases*: norm, query-key-value product, rotation and KV write, attention, output product, add and
norm, gated product, down product. Of each phase threads take pieces from a counter until none is left, and wait until
those that others took are done. So the threads are started once for all layers, nothing is allocated in between, and
nobody waits for a thread that does not run: a phase is done when its pieces are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import floats_at, ints_at
from headwise.kernels.cpu.attention_jit import (
    FINISHED,
    FIRST_ITEM,
    STRIDES,
    new_scratch,
    work,
)
from headwise.kernels.cpu.attention_plan import Plan, make_plan
from headwise.kernels.cpu.kv_write_jit import write_tokens
from headwise.kernels.cpu.matmul_jit import (
    PLAIN,
    TILE,
    WEIGHT_FIELDS,
    compute_items,
    items_of,
    markers,
    prepare_row,
    read_only,
    weight_at,
)
from headwise.kernels.cpu.threads import fetch_add, use_threads, wait_for

NORMS = range(6)
BEFORE_ATTENTION, BEFORE_MLP, AFTER_ATTENTION, AFTER_MLP, QUERY_NORM, KEY_NORM = NORMS
"""Norms of a layer, as in `headwise.kernels.fused.LayerNorms`."""

WEIGHTS = range(4)
QKV, OUT, GATE_UP, DOWN = WEIGHTS

HEADS = range(4)
HEAD_GROUP, HEAD_SLOT, HEAD_WINDOW, HEAD_SINK = HEADS

WEIGHTS_AT = 0
BIASES_AT = WEIGHTS_AT + len(WEIGHTS) * WEIGHT_FIELDS
NORMS_AT = BIASES_AT + 2 * len(WEIGHTS)
HEADS_AT = NORMS_AT + 2 * len(NORMS)
ROPE_AT = HEADS_AT + 2 * len(HEADS)
PLAN_AT = ROPE_AT + 1
LAYER_FIELDS = PLAN_AT + 1
"""Where a layer's numbers lie in its row of the table: weights, then address and length of biases, norms (of none: 0)
and arrays of heads, then which rotation is the layer's, and which plan of attention."""

PLAN_FIELDS = 7
"""Of a plan: first and last item, first and last part, rows, is_tiled, partial_rows."""

_INPUT, _QKV, _ROTATE, _HEADS, _OUT, _MIDDLE, _GATE_UP, _GATED, _DOWN = PHASES = range(9)
ATTENTION_AT = 2 * len(PHASES)
"""Counters of a layer: pieces taken and done of each phase, then those of attention, which are as many as its items."""

_MATH = {"reassoc", "nsz", "arcp", "contract"}
_compiled = numba.njit(fastmath=_MATH, nogil=True, error_model="numpy")
_inlined = numba.njit(forceinline=True, fastmath=_MATH, nogil=True, error_model="numpy")


class Shapes(NamedTuple):
    """What is the same in all layers. epilogue: of the gated product; factor: of queries; widest: most inputs of a
    product, padded"""

    q_heads: Any
    kv_heads: Any
    dim: Any
    epilogue: Any
    factor: Any
    softcap: Any
    eps: Any
    widest: Any


class Rooms(NamedTuple):
    """Arrays that phases pass on, with room for all rows.

    qkv: ``[rows, q_heads + 2 * kv_heads, dim]``; heads: ``[rows, q_heads, dim]``; out: ``[rows, hidden]``; gated:
    ``[rows, intermediate]``; factors, sums: of the row's next product
    """

    qkv: Any
    heads: Any
    out: Any
    gated: Any
    factors: Any
    sums: Any


@_inlined
def _array(layer, at):
    return floats_at(layer[at], layer[at + 1])


@_inlined
def _norm(layer, which):
    return _array(layer, NORMS_AT + 2 * which)


@_inlined
def _pieces(rows):
    """Rows of a piece: a counter's round trip is worth several rows, where there are many."""
    return 1 if rows < 32 else 8


@_compiled
def _scale(row, eps):
    """What a row's elements are multiplied with before the norm's weight."""
    total = np.float32(0.0)
    for i in range(len(row)):
        total += row[i] * row[i]
    return np.float32(1.0) / np.sqrt(total / np.float32(len(row)) + eps)


@_compiled
def _norm_rows(x, weight, norm, eps, first, last, factors, sums, values):
    """Rows of the residual stream, normed, as the next product's factors."""
    for row in range(first, last):
        scale = _scale(x[row], eps)
        for i in range(x.shape[1]):
            values[i] = x[row, i] * scale * norm[i]
        values[x.shape[1] : weight.depth] = 0.0
        prepare_row(values[: weight.depth], weight, row, factors, sums)


@_compiled
def _add_rows(x, addend, norm, eps, first, last):
    """Add rows to the residual stream, normed if there is a norm."""
    for row in range(first, last):
        if len(norm) > 0:
            scale = _scale(addend[row], eps)
            for i in range(x.shape[1]):
                x[row, i] += addend[row, i] * scale * norm[i]
        else:
            for i in range(x.shape[1]):
                x[row, i] += addend[row, i]


@_compiled
def _norm_heads(heads, first_head, last_head, norm, eps, first, last):
    for row in range(first, last):
        for head in range(first_head, last_head):
            scale = _scale(heads[row, head], eps)
            for i in range(heads.shape[2]):
                heads[row, head, i] *= scale * norm[i]


@_compiled
def _prepare_rows(source, weight, first, last, factors, sums, values):
    """Rows as the next product's factors."""
    width = source.shape[1]
    for row in range(first, last):
        values[:width] = source[row]
        values[width : weight.depth] = 0.0
        prepare_row(values[: weight.depth], weight, row, factors, sums)


@_inlined
def _weight(layer, which):
    return weight_at(layer, WEIGHTS_AT + which * WEIGHT_FIELDS)


@_inlined
def _ints(layer, which):
    return ints_at(layer[HEADS_AT + 2 * which], layer[HEADS_AT + 2 * which + 1])


@_inlined
def _product(f32, b16, i8, i4, layer, which, epilogue, out, rooms, rows, counters, phase, tile):
    weight, bias = _weight(layer, which), _array(layer, BIASES_AT + 2 * which)
    compute_items(
        f32, b16, i8, i4, weight, bias, epilogue, out, rooms.factors, rooms.sums, rows, counters, 2 * phase, tile
    )
    wait_for(counters, 2 * phase + 1, items_of(weight, rows))


@_inlined
def _take_rows(counters, phase, rows):
    """The next rows of a phase; an empty range at the end."""
    first = fetch_add(counters, 2 * phase) * _pieces(rows)
    return min(first, rows), min(first + _pieces(rows), rows)


@_inlined
def _rows_done(counters, phase):
    fetch_add(counters, 2 * phase + 1)


@_inlined
def _wait_for_rows(counters, phase, rows):
    wait_for(counters, 2 * phase + 1, -(-rows // _pieces(rows)))


# --- phases ---------------------------------------------------------------------------------------------------------


@_compiled
def _add_and_norm(x, addend, layer, after, before, weight, shapes, rooms, counters, phase, values):
    """Add rows to the residual stream, and prepare the norm of the sum for the next product."""
    rows = len(x)
    first, last = _take_rows(counters, phase, rows)
    while first < last:
        if len(addend) > 0:
            _add_rows(x, addend, after, shapes.eps, first, last)
        if len(before) > 0:
            _norm_rows(x, weight, before, shapes.eps, first, last, rooms.factors, rooms.sums, values)
        _rows_done(counters, phase)
        first, last = _take_rows(counters, phase, rows)
    _wait_for_rows(counters, phase, rows)


@_compiled
def _prepare(source, weight, rooms, counters, phase, values):
    """Prepare rows for the next product."""
    rows = len(source)
    first, last = _take_rows(counters, phase, rows)
    while first < last:
        _prepare_rows(source, weight, first, last, rooms.factors, rooms.sums, values)
        _rows_done(counters, phase)
        first, last = _take_rows(counters, phase, rows)
    _wait_for_rows(counters, phase, rows)


@_compiled
def _rotate_and_write(layer, rotations, shapes, rooms, cache, batch, counters):
    """Norm heads where the model does, rotate queries and keys, and write keys and values to the cache."""
    kv, scales, strides = cache
    cu, lens, tables, groups = batch
    rows, q_heads, both = len(rooms.qkv), shapes.q_heads, shapes.q_heads + shapes.kv_heads
    query, key, value = rooms.qkv[:, :q_heads], rooms.qkv[:, q_heads:both], rooms.qkv[:, both:]
    cosines, sines = rotations[layer[ROPE_AT], 0], rotations[layer[ROPE_AT], 1]
    query_norm, key_norm = _norm(layer, QUERY_NORM), _norm(layer, KEY_NORM)
    first, last = _take_rows(counters, _ROTATE, rows)
    while first < last:
        if len(query_norm) > 0:
            _norm_heads(rooms.qkv, 0, q_heads, query_norm, shapes.eps, first, last)
            _norm_heads(rooms.qkv, q_heads, both, key_norm, shapes.eps, first, last)
        write_tokens(
            query, key, value, cosines, sines, kv, scales, strides, cu, lens, tables, groups,
            _ints(layer, HEAD_GROUP), _ints(layer, HEAD_SLOT), first, last,
        )  # fmt: skip
        _rows_done(counters, _ROTATE)
        first, last = _take_rows(counters, _ROTATE, rows)
    _wait_for_rows(counters, _ROTATE, rows)


@_compiled
def _attend(layer, shapes, rooms, cache, batch, plans, partials, counters, scratch):
    kv, scales, strides = cache
    items, parts, table, _ = plans
    query, p = rooms.qkv[:, : shapes.q_heads], table[layer[PLAN_AT]]
    step = (
        query, kv, scales, strides, batch[2], batch[3], _ints(layer, HEAD_GROUP), _ints(layer, HEAD_SLOT),
        _ints(layer, HEAD_WINDOW), _ints(layer, HEAD_SINK), shapes.factor, shapes.softcap,
        shapes.q_heads // shapes.kv_heads, shapes.dim,
    )  # fmt: skip
    plan = (items[p[0] : p[1]], parts[p[2] : p[3]], p[4], p[5] > 0, p[6], 1)
    work(step, plan, partials, scratch, counters, rooms.heads)
    wait_for(counters, FINISHED, p[3] - p[2])


@_compiled
def _thread(f32, b16, i8, i4, x, layers, rotations, shapes, rooms, cache, batch, plans, partials, counters):
    """One thread's share of all phases of all layers."""
    shapes, rooms = Shapes(*shapes), Rooms(*rooms)
    items, parts, _, most = plans
    rows, nothing = len(x), rooms.out[:0]
    qkv, heads = rooms.qkv.reshape(rows, -1), rooms.heads.reshape(rows, -1)
    tile, values = np.empty(TILE, np.float32), np.empty(shapes.widest, np.float32)
    plan = Plan(items, parts, most[0], most[1] > 0, most[2], 1)
    scratch = new_scratch(plan, shapes.q_heads // shapes.kv_heads, shapes.dim)
    for index in range(len(layers)):
        layer, own, before = layers[index], counters[index], layers[max(index - 1, 0)]
        _add_and_norm(
            x, rooms.out if index > 0 else nothing, layer, _norm(before, AFTER_MLP), _norm(layer, BEFORE_ATTENTION),
            _weight(layer, QKV), shapes, rooms, own, _INPUT, values,
        )  # fmt: skip
        _product(f32, b16, i8, i4, layer, QKV, PLAIN, qkv, rooms, rows, own, _QKV, tile)
        _rotate_and_write(layer, rotations, shapes, rooms, cache, batch, own)
        _attend(layer, shapes, rooms, cache, batch, plans, partials, own[ATTENTION_AT:], scratch)
        _prepare(heads, _weight(layer, OUT), rooms, own, _HEADS, values)
        _product(f32, b16, i8, i4, layer, OUT, PLAIN, rooms.out, rooms, rows, own, _OUT, tile)
        _add_and_norm(
            x, rooms.out, layer, _norm(layer, AFTER_ATTENTION), _norm(layer, BEFORE_MLP), _weight(layer, GATE_UP),
            shapes, rooms, own, _MIDDLE, values,
        )  # fmt: skip
        _product(f32, b16, i8, i4, layer, GATE_UP, shapes.epilogue, rooms.gated, rooms, rows, own, _GATE_UP, tile)
        _prepare(rooms.gated, _weight(layer, DOWN), rooms, own, _GATED, values)
        _product(f32, b16, i8, i4, layer, DOWN, PLAIN, rooms.out, rooms, rows, own, _DOWN, tile)
    layer = layers[len(layers) - 1]
    _add_and_norm(
        x, rooms.out, layer, _norm(layer, AFTER_MLP), nothing.reshape(-1), _weight(layer, QKV), shapes, rooms,
        counters[len(layers)], _INPUT, values,
    )  # fmt: skip


# --- entry point ----------------------------------------------------------------------------------------------------


@machine_code.entry(
    types.Tuple((types.int64[:, ::1], types.int64[:, ::1], types.int64, types.boolean, types.int64))(
        *[read_only(types.int32, 1)] * 4, types.int64, types.int64
    ),
    nogil=True, error_model="numpy",
)  # fmt: skip
def plan_attention(cu, lens, windows, sinks, share, dim):
    """The fields of `attention_plan.make_plan` but for the threads."""
    plan = make_plan(cu, lens, windows, sinks, share, dim, 1)
    return plan.items, plan.parts, plan.rows, plan.is_tiled, plan.partial_rows


@machine_code.entry(parallel=True, nogil=True, fastmath=_MATH, error_model="numpy")
def run_layers(f32, b16, i8, i4, x, layers, rotations, shapes, rooms, cache, batch, plans, partials, threads):
    """The residual stream ``x [rows, hidden]`` after ``layers [n, LAYER_FIELDS]``, in place.

    rotations: cosines and sines ``[rotations, 2, rows, dim / 2]``; shapes, rooms: as `Shapes`, `Rooms`
    cache:     the arena as what it stores, the arena as float32, and strides, as in `attention_jit.Step`
    batch:     ``cu_seqlens_q``, ``seq_lens``, ``block_tables``, groups
    plans:     items and parts of all plans, a table ``[plans, PLAN_FIELDS]`` of them, and ``int64 [3]``: the most rows,
               whether any is tiled, and the most partial rows
    partials:  room for the partial results of attention
    """
    counters = np.zeros((len(layers) + 1, ATTENTION_AT + FIRST_ITEM + len(plans[0])), np.int64)
    if threads == 1:
        _thread(f32, b16, i8, i4, x, layers, rotations, shapes, rooms, cache, batch, plans, partials, counters)
        return
    before = use_threads(threads)
    for _ in numba.prange(threads):
        _thread(f32, b16, i8, i4, x, layers, rotations, shapes, rooms, cache, batch, plans, partials, counters)
    use_threads(before)


def run_signature(kinds: Iterable[int], kv: Any) -> Any:
    """The types of `run_layers` for weights of these kinds and a cache that stores ``kv``."""
    floats, ints, index = types.float32, read_only(types.int32, 1), types.int64
    return types.void(
        *markers(kinds), floats[:, ::1], read_only(index, 2), read_only(floats, 4),
        types.Tuple((index, index, index, index, floats, floats, floats, index)),
        types.Tuple((*[floats[:, :, ::1]] * 2, *[floats[:, ::1]] * 2, types.uint32[::1], floats[::1])),
        types.Tuple((kv[::1], floats[::1], STRIDES)),
        types.Tuple((ints, ints, read_only(types.int32, 2), index)),
        types.Tuple((index[:, ::1], index[:, ::1], index[:, ::1], index[::1])),
        types.UniTuple(floats[::1], 3), index,
    )  # fmt: skip
