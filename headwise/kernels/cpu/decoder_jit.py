# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.decoder`: many layers of a decoder in one call, on several threads.

A layer is a run of *phases*: norm, query-key-value product, rotation and KV write, attention, output product, add and
norm, gated product, down product. Of each phase threads take pieces from a counter until none is left, and wait until
those that others took are done. So the threads are woken once for all layers, and nobody waits for a thread that does
not run: a phase is done when its pieces are.

What differs by dtype, products and attention, is compiled for itself and called by its address: this file is compiled
once for all models.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import (
    call_3,
    call_4,
    call_12,
    float_matrix_at,
    floats_at,
    heads_at,
    longs_at,
    words_at,
)
from headwise.kernels.cpu.attention_jit import FINISHED
from headwise.kernels.cpu.attention_plan import make_plan
from headwise.kernels.cpu.matmul_jit import (
    KINDS,
    PLAIN,
    TILE,
    WEIGHT_FIELDS,
    items_of,
    prepare_row,
    weight_at,
)
from headwise.kernels.cpu.threads import fetch_add, wait_for

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

_INPUT, _QKV, _ROTATE, _HEADS, _OUT, _MIDDLE, _GATE_UP, _GATED, _DOWN = PHASES = range(9)
ATTENTION_AT = 2 * len(PHASES)
"""Counters of a layer: pieces taken and done of each phase, then those of attention, which are as many as its items."""

STEP_FIELDS = 41
(
    X, ROWS, HIDDEN, LAYERS, LAYER_COUNT, Q_HEADS, KV_HEADS, DIM, EPILOGUE, WIDEST, INTERMEDIATE, QKV_ROOM, HEADS_ROOM,
    OUT_ROOM, GATED_ROOM, FACTORS, FACTORS_LENGTH, SUMS, SUMS_LENGTH, TILES, VALUES, COUNTERS, COUNTERS_PER_LAYER,
    PRODUCTS, WRITE, ATTEND, CACHE, CACHE_BYTES, STRIDES, CU_SEQLENS, SEQ_LENS, SEQUENCES, TABLES, TABLE_COLUMNS,
    GROUPS, PLANS, PARTIALS, PARTIAL_ROOM, ROTATIONS, FLOATS, ATTENTION_WORK,
) = range(STEP_FIELDS)  # fmt: skip
"""Numbers that a step is given as: addresses, lengths and sizes. ..._ROOM: what phases pass on, for all rows: queries,
keys and values ``[rows, q_heads + 2 * kv_heads, dim]``, attention's output ``[rows, q_heads, dim]``, what is
added to the residual stream ``[rows, hidden]``, the gated product ``[rows, intermediate]``. TILES, VALUES: of all
threads. PRODUCTS: of each kind. PLANS: see `PLAN_FIELDS`. PARTIALS: of attention, PARTIAL_ROOM rows. ROTATIONS: cosines
and sines ``[rotations, 2, rows, dim / 2]``. FLOATS: see `STEP_FLOATS`. ATTENTION_WORK: of `attention_jit.work`."""

PLAN_FIELDS = 7
ITEMS, ITEM_COUNT, PARTS, PART_COUNT, PLAN_ROWS, IS_TILED, PARTIAL_ROWS = range(PLAN_FIELDS)
"""Of a plan of attention: addresses and lengths of items and parts, and the other fields of `attention_plan.Plan`."""

STEP_FLOATS = 3
EPS, FACTOR, SOFTCAP = range(STEP_FLOATS)
"""Numbers of a step that are floats: of norms; of queries; of attention's scores."""

_MATH = {"reassoc", "nsz", "arcp", "contract"}
_compiled = numba.njit(fastmath=_MATH, nogil=True, error_model="numpy")
_inlined = numba.njit(forceinline=True, fastmath=_MATH, nogil=True, error_model="numpy")


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
def _counters(step, layer):
    each = step[COUNTERS_PER_LAYER]
    return longs_at(step[COUNTERS] + layer * each * 8, each)


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
def _add_and_norm(step, floats, is_added, after, before, weight, counters, phase, values):
    """Add rows to the residual stream, if any are, and prepare the norm of the sum, if there is one."""
    rows, hidden, eps = step[ROWS], step[HIDDEN], floats[EPS]
    x, addend = float_matrix_at(step[X], rows, hidden), float_matrix_at(step[OUT_ROOM], rows, hidden)
    factors, sums = words_at(step[FACTORS], step[FACTORS_LENGTH]), floats_at(step[SUMS], step[SUMS_LENGTH])
    first, last = _take_rows(counters, phase, rows)
    while first < last:
        if is_added:
            _add_rows(x, addend, after, eps, first, last)
        if len(before) > 0:
            _norm_rows(x, weight, before, eps, first, last, factors, sums, values)
        _rows_done(counters, phase)
        first, last = _take_rows(counters, phase, rows)
    _wait_for_rows(counters, phase, rows)


@_compiled
def _prepare(step, source, columns, weight, counters, phase, values):
    """Prepare the rows ``source [rows, columns]`` for the next product."""
    rows = step[ROWS]
    factors, sums = words_at(step[FACTORS], step[FACTORS_LENGTH]), floats_at(step[SUMS], step[SUMS_LENGTH])
    matrix = float_matrix_at(source, rows, columns)
    first, last = _take_rows(counters, phase, rows)
    while first < last:
        _prepare_rows(matrix, weight, first, last, factors, sums, values)
        _rows_done(counters, phase)
        first, last = _take_rows(counters, phase, rows)
    _wait_for_rows(counters, phase, rows)


@_compiled
def _multiply(step, layer_at, which, epilogue, out, columns, counters, phase, tile):
    """A product of all rows with one of the layer's weights."""
    layer, rows = longs_at(layer_at, LAYER_FIELDS), step[ROWS]
    weight, bias = _weight(layer, which), BIASES_AT + 2 * which
    product = longs_at(step[PRODUCTS], len(KINDS))[weight.kind]
    where = layer_at + 8 * (WEIGHTS_AT + which * WEIGHT_FIELDS)
    call_12(
        product,
        (
            where, layer[bias], layer[bias + 1], np.int64(epilogue), out, columns, step[FACTORS], step[SUMS], rows,
            counters.ctypes.data, np.int64(2 * phase), tile,
        ),
    )  # fmt: skip
    wait_for(counters, 2 * phase + 1, items_of(weight, rows))


@_compiled
def _rotate_and_write(step, floats, step_at, layer_at, counters):
    """Norm heads where the model does, rotate queries and keys, and write keys and values to the cache."""
    layer, rows, dim, q_heads = longs_at(layer_at, LAYER_FIELDS), step[ROWS], step[DIM], step[Q_HEADS]
    both = q_heads + step[KV_HEADS]
    all_heads = both + step[KV_HEADS]
    heads = heads_at(step[QKV_ROOM], rows, all_heads, dim, all_heads * dim)
    query_norm, key_norm = _norm(layer, QUERY_NORM), _norm(layer, KEY_NORM)
    first, last = _take_rows(counters, _ROTATE, rows)
    while first < last:
        if len(query_norm) > 0:
            _norm_heads(heads, 0, q_heads, query_norm, floats[EPS], first, last)
            _norm_heads(heads, q_heads, both, key_norm, floats[EPS], first, last)
        call_4(step[WRITE], (step_at, layer_at, first, last))
        _rows_done(counters, _ROTATE)
        first, last = _take_rows(counters, _ROTATE, rows)
    _wait_for_rows(counters, _ROTATE, rows)


@_compiled
def _attend(step, step_at, layer_at, counters):
    layer = longs_at(layer_at, LAYER_FIELDS)
    own = counters[ATTENTION_AT:]
    call_3(step[ATTEND], (step_at, layer_at, own.ctypes.data))
    wait_for(own, FINISHED, longs_at(step[PLANS] + layer[PLAN_AT] * PLAN_FIELDS * 8, PLAN_FIELDS)[PART_COUNT])


# --- entry points ---------------------------------------------------------------------------------------------------


@machine_code.entry(types.void(types.int64, types.int64), nogil=True, fastmath=_MATH, error_model="numpy")
def run_layers(step_at, thread):
    """One thread's share of all phases of all layers: ``x [rows, hidden]`` after them, in place.

    step_at: address of the `STEP_FIELDS` numbers
    """
    step = longs_at(step_at, STEP_FIELDS)
    floats = floats_at(step[FLOATS], STEP_FLOATS)
    values, tile = floats_at(step[VALUES] + thread * step[WIDEST] * 4, step[WIDEST]), step[TILES] + thread * TILE * 4
    heads, all_heads = step[Q_HEADS] * step[DIM], (step[Q_HEADS] + 2 * step[KV_HEADS]) * step[DIM]
    after = floats_at(0, 0)
    for index in range(step[LAYER_COUNT]):
        at = step[LAYERS] + index * LAYER_FIELDS * 8
        layer, counters = longs_at(at, LAYER_FIELDS), _counters(step, index)
        qkv, gate_up = _weight(layer, QKV), _weight(layer, GATE_UP)
        _add_and_norm(step, floats, index > 0, after, _norm(layer, BEFORE_ATTENTION), qkv, counters, _INPUT, values)
        _multiply(step, at, QKV, PLAIN, step[QKV_ROOM], all_heads, counters, _QKV, tile)
        _rotate_and_write(step, floats, step_at, at, counters)
        _attend(step, step_at, at, counters)
        _prepare(step, step[HEADS_ROOM], heads, _weight(layer, OUT), counters, _HEADS, values)
        _multiply(step, at, OUT, PLAIN, step[OUT_ROOM], step[HIDDEN], counters, _OUT, tile)
        after = _norm(layer, AFTER_ATTENTION)
        _add_and_norm(step, floats, True, after, _norm(layer, BEFORE_MLP), gate_up, counters, _MIDDLE, values)
        _multiply(step, at, GATE_UP, step[EPILOGUE], step[GATED_ROOM], step[INTERMEDIATE], counters, _GATE_UP, tile)
        _prepare(step, step[GATED_ROOM], step[INTERMEDIATE], _weight(layer, DOWN), counters, _GATED, values)
        _multiply(step, at, DOWN, PLAIN, step[OUT_ROOM], step[HIDDEN], counters, _DOWN, tile)
        after = _norm(layer, AFTER_MLP)
    last = longs_at(step[LAYERS], LAYER_FIELDS)
    _add_and_norm(
        step, floats, True, after, floats_at(0, 0), _weight(last, QKV), _counters(step, step[LAYER_COUNT]), _INPUT,
        values,
    )  # fmt: skip


@machine_code.entry(
    types.Tuple((types.int64[:, ::1], types.int64[:, ::1], types.int64, types.boolean, types.int64))(
        *[types.Array(types.int32, 1, "C", readonly=True)] * 4, types.int64, types.int64
    ),
    nogil=True, error_model="numpy",
)  # fmt: skip
def plan_attention(cu, lens, windows, sinks, share, dim):
    """The fields of `attention_plan.make_plan` but for the threads."""
    plan = make_plan(cu, lens, windows, sinks, share, dim, 1)
    return plan.items, plan.parts, plan.rows, plan.is_tiled, plan.partial_rows
