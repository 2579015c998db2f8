# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.decoder`: many layers of a decoder in one call, on several threads.

A layer is a run of *phases*: norm, query-key-value product, rotation and KV write, attention, output product, add and
norm, gated product, down product; or, in place of the last two, a router's product and what `experts_jit` does. Of each
phase threads take pieces from a counter until none is left, and wait until those that others took are done. So the
threads are woken once for all layers, and nobody waits for a thread that does not run: a phase is done when its pieces
are.

What differs by dtype, products and attention, is compiled for itself and called by its address: this file is compiled
once for all models.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import (
    call_at,
    floats_at,
    layer_at,
    longs_at,
    pass_at,
    plan_at,
    record_at,
    words_at,
)
from headwise.kernels.cpu.attention_jit import FINISHED
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.experts_jit import MIXING
from headwise.kernels.cpu.matmul_jit import PLAIN, TILE, items_of, share_of
from headwise.kernels.cpu.matmul_rows import prepare_row, weight_at
from headwise.kernels.cpu.records import (
    AFTER_ATTENTION,
    AFTER_MLP,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    DOWN,
    GATE_UP,
    KEY_NORM,
    LAYER,
    OUT,
    PLAN,
    QKV,
    QUERY_NORM,
    STEP,
)
from headwise.kernels.cpu.threads import fetch_add, pieces_of, take_rows, wait_and_prefetch

_PHASES_OF_WEIGHT = 3
"""Its factors, its product, and, of the first one, rotation and KV write."""

_PHASES = (DOWN + 1) * _PHASES_OF_WEIGHT

_MATH = {"reassoc", "nsz", "arcp", "contract"}
_pasted = numba.njit(inline="always", fastmath=_MATH, nogil=True, error_model="numpy")
_step_at, _mixing_at = record_at(STEP), record_at(MIXING)
_LAYER_BYTES, _PLAN_BYTES = LAYER.itemsize, PLAN.itemsize


def phase_counters(threads: int) -> int:
    """Counters of a layer's phases, behind which those of its attention lie.

    Of each phase, pieces done, then pieces taken of each thread's share.
    """
    return _PHASES * (1 + threads)


_phase_counters = _pasted(phase_counters)


@_pasted
def _norm(layer, which):
    return floats_at(layer.norms[which, 0], layer.norms[which, 1])


@_pasted
def _scale(row, eps):
    """What a row's elements are multiplied with before the norm's weight."""
    total = np.float32(0.0)
    for i in range(len(row)):
        total += row[i] * row[i]
    return np.float32(1.0) / np.sqrt(total / np.float32(len(row)) + eps)


@_pasted
def _add_row(row, addend, norm, eps):
    """Add a row to one of the residual stream, normed if there is a norm."""
    scale = np.float32(1.0)
    if len(norm) > 0:
        scale = _scale(addend, eps)
        for i in range(len(row)):
            row[i] += addend[i] * scale * norm[i]
    else:
        for i in range(len(row)):
            row[i] += addend[i]


@_pasted
def _norm_row(row, norm, eps, out):
    scale = _scale(row, eps)
    for i in range(len(row)):
        out[i] = row[i] * scale * norm[i]


@_pasted
def _wait_for_rows(counters, phase, rows, ahead, end):
    return wait_and_prefetch(counters, phase, pieces_of(rows), ahead, end)


# --- phases ---------------------------------------------------------------------------------------------------------
# Whoever waits for others prefetches from ``ahead`` to ``end``, of the weight that it will multiply with next. A phase
# returns how far that came.


@_pasted
def _prepare(
    step, source, columns, is_stream, addend, after, before, kept, weight, counters, phase, values, thread, ahead, end
):
    """Prepare the rows ``source [rows, columns]`` for the next product, if there is one (``weight`` is not 0).

    If they are the residual stream, they get ``addend`` before, if there is one (not 0), normed if there is a norm
    ``after``; and they are prepared with the norm ``before``, and so normed go to ``kept``, if that is not 0. Without a
    next product they themselves are normed so, if there is such a norm.
    """
    rows, eps = step.rows, step.eps
    factors, sums = words_at(step.factors, step.factors_length), floats_at(step.sums, step.sums_length)
    first, last, share = take_rows(counters, phase, rows, thread, step.threads)
    while first < last:
        for row in range(first, last):
            here = floats_at(source + row * columns * 4, columns)
            if addend != 0:
                _add_row(here, floats_at(addend + row * columns * 4, columns), after, eps)
            if weight != 0:
                if is_stream:
                    _norm_row(here, before, eps, values)
                    if kept != 0:
                        row_copy(values, 0, floats_at(kept + row * columns * 4, columns), 0, columns)
                else:
                    for i in range(columns):
                        values[i] = here[i]
                packed = weight_at(weight)
                for i in range(columns, packed.depth):
                    values[i] = 0.0
                prepare_row(values, packed, row, factors, sums)
            elif len(before) > 0:
                _norm_row(here, before, eps, here)
        fetch_add(counters, phase)
        first, last, share = take_rows(counters, phase, rows, share, step.threads)
    return _wait_for_rows(counters, phase, rows, ahead, end)


@_pasted
def _multiply(step, layer, following, which, epilogue, out, columns, counters, counters_at, phase, tile, thread):
    """A product of all rows with one of the layer's weights; ``following`` is the address of the next, or 0.

    Returns what is to be prefetched.
    """
    at, bias = layer.weights[which], layer.biases[which]
    weight = weight_at(at)
    ahead, end = np.int64(0), np.int64(0)
    if following != 0:
        ahead, end = share_of(weight_at(following), step.rows, thread, step.threads)
    call_at(
        step.products[weight.kind],
        (
            at, bias[0], bias[1], epilogue, out, columns, step.factors, step.sums, step.rows, counters_at,
            phase, tile, thread, step.threads, ahead,
        ),
    )  # fmt: skip
    return wait_and_prefetch(counters, phase, items_of(weight, step.rows, step.threads), ahead, end), end


@_pasted
def _rotate_and_write(step, own, layer, layer_address, counters, phase, thread, ahead, end):
    """Norm heads where the model does, rotate queries and keys, and write keys and values to the cache."""
    rows, dim, q_heads = own.rows, own.dim, own.q_heads
    query_norm, key_norm = _norm(layer, QUERY_NORM), _norm(layer, KEY_NORM)
    first, last, share = take_rows(counters, phase, rows, thread, step.threads)
    while first < last:
        if len(query_norm) > 0:
            for row in range(first, last):
                for head in range(q_heads + own.kv_heads):
                    here = floats_at(own.query + (row * own.query_row + head * dim) * 4, dim)
                    _norm_row(here, query_norm if head < q_heads else key_norm, step.eps, here)
        call_at(step.write, (step.attention, layer_address, first, last, thread))
        fetch_add(counters, phase)
        first, last, share = take_rows(counters, phase, rows, share, step.threads)
    return _wait_for_rows(counters, phase, rows, ahead, end)


@_pasted
def _attend(step, own, layer, layer_address, counters_at, thread, ahead, end):
    own_at = counters_at + 8 * _phase_counters(step.threads)
    call_at(step.attend, (step.attention, layer_address, own_at, thread))
    parts = plan_at(own.plans + layer.plan * _PLAN_BYTES).part_count
    return wait_and_prefetch(longs_at(own_at, FINISHED + 1), FINISHED, parts, ahead, end)


# --- entry point ----------------------------------------------------------------------------------------------------


def _run_layers(address, thread):
    step = _step_at(address)
    own, each, last = pass_at(step.attention), step.counters_per_layer, step.layer_count
    values, tile = floats_at(step.values + thread * step.widest * 4, step.widest), step.tiles + thread * TILE * 4
    heads, all_heads = own.q_heads * own.dim, (own.q_heads + 2 * own.kv_heads) * own.dim
    ahead, end = np.int64(0), np.int64(0)
    for index in range(last + 1):
        layer_address, counters_at = step.layers + min(index, last - 1) * _LAYER_BYTES, step.counters + index * each * 8
        layer, counters = layer_at(layer_address), longs_at(counters_at, each)
        previous = layer_at(step.layers + max(index - 1, 0) * _LAYER_BYTES)
        following_layer = layer_at(layer_address + _LAYER_BYTES).weights[QKV] if index + 1 < last else np.int64(0)
        for which in range(DOWN + 1):
            source, columns, out, outputs = step.x, step.hidden, step.added, step.hidden
            addend, after, before = np.int64(0), _norm(previous, AFTER_MLP), _norm(layer, BEFORE_ATTENTION)
            epilogue, phase = np.int64(PLAIN), which * _PHASES_OF_WEIGHT * (1 + step.threads)
            if which == QKV:
                addend, out, outputs = step.added if index > 0 else addend, own.query, all_heads
            elif which == OUT:
                source, columns = own.out, heads
            elif which == GATE_UP:
                addend, after, before = step.added, _norm(layer, AFTER_ATTENTION), _norm(layer, BEFORE_MLP)
                epilogue, out, outputs = step.epilogue, step.gated, step.intermediate
            else:
                source, columns = step.gated, step.intermediate
            kept, weight = np.int64(0), layer.weights[which] if index < last else np.int64(0)
            if layer.mixture != 0 and which == GATE_UP:
                mixing = _mixing_at(step.mixing)
                epilogue, out, outputs, kept = np.int64(PLAIN), mixing.logits, weight_at(weight).columns, mixing.x
            elif layer.mixture != 0 and which == DOWN:
                call_at(step.mix, (layer.mixture, step.mixing, counters_at + 8 * step.mixing_counters, thread))
                ahead = end = np.int64(0)
                break
            if index == last:
                before = floats_at(step.final_norm, step.hidden if step.final_norm != 0 else 0)
            is_stream = which in (QKV, GATE_UP)
            ahead = _prepare(
                step, source, columns, is_stream, addend, after, before, kept, weight, counters, phase, values, thread,
                ahead, end,
            )  # fmt: skip
            if index == last:
                break
            phase += 1 + step.threads
            following = layer.weights[which + 1] if which < DOWN else following_layer
            ahead, end = _multiply(
                step, layer, following, which, epilogue, out, outputs, counters, counters_at, phase, tile, thread
            )
            if which == QKV:
                phase += 1 + step.threads
                ahead = _rotate_and_write(step, own, layer, layer_address, counters, phase, thread, ahead, end)
                ahead = _attend(step, own, layer, layer_address, counters_at, thread, ahead, end)


@cache
def run_layers() -> Any:
    """The compiled function of a `STEP`'s address and a thread: its share of all phases of all layers.

    The residual stream is what comes out of the last layer afterwards, normed if there is a norm behind it.
    """
    return machine_code.unit(_run_layers, 2, fastmath=_MATH, error_model="numpy")
