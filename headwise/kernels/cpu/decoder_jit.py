# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.decoder`: many layers of a decoder in one call, on several threads.

A layer is a run of *phases*: of most layers norm, query-key-value product, rotation and KV write, attention, output
product, add and norm, gated product, down product. Which they are, and what they compute with, `decoder_phases` says;
this file is compiled once for all models. Of each phase threads take pieces from a counter until none is left, and wait
until those that others took are done. So the threads are woken once for all layers, and nobody waits for a thread that
does not run: a phase is done when its pieces are.

What differs by dtype, products and attention, is compiled for itself and called by its address.
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
from headwise.kernels.cpu.decoder_records import (
    ATTEND,
    BETWEEN,
    DOWN_RANKS,
    DOWNS_BEFORE,
    GATED_BY_ROW,
    GATED_BY_SIGMOID,
    KEY_NORM,
    KIND,
    LATENTS,
    NO_GATE,
    OF_HEADS,
    PHASE,
    PRODUCT,
    QUERY_NORM,
    QUERY_SCALES,
    ROWS,
    STEP,
    UP_RANKS,
    VALUE_NORM,
    WRITE,
    WRITE_LATENTS,
)
from headwise.kernels.cpu.gates import sigmoid, times_gelu, times_sigmoid
from headwise.kernels.cpu.low_rank_jit import down_items, up_items
from headwise.kernels.cpu.matmul_jit import PLAIN, TILE, items_of, share_of
from headwise.kernels.cpu.matmul_rows import prepare_row, weight_at
from headwise.kernels.cpu.records import PLAN, STATES
from headwise.kernels.cpu.threads import fetch_add, pieces_of, take_item, take_rows, wait_and_prefetch, wait_for

_MATH = {"reassoc", "nsz", "arcp", "contract"}
_pasted = numba.njit(inline="always", fastmath=_MATH, nogil=True, error_model="numpy")
_step_at, _phase_at, _kind_at, _states_at = map(record_at, (STEP, PHASE, KIND, STATES))
_PHASE_BYTES, _KIND_BYTES, _PLAN_BYTES = PHASE.itemsize, KIND.itemsize, PLAN.itemsize


def phase_counters(phases: int, threads: int) -> int:
    """Counters of so many phases: of each, pieces done, then pieces taken of each thread's share."""
    return phases * (1 + threads)


_phase_counters = _pasted(phase_counters)


@_pasted
def _norm_at(norm):
    return floats_at(norm[0], norm[1])


@_pasted
def _scale(row, eps):
    """What a row's elements are multiplied with before the norm's weight."""
    total = np.float32(0.0)
    for i in range(len(row)):
        total += row[i] * row[i]
    return np.float32(1.0) / np.sqrt(total / np.float32(len(row)) + eps)


@_pasted
def _add_row(row, addend, norm, eps):
    """Add a row to another one, normed if there is a norm."""
    scale = np.float32(1.0)
    if len(norm) > 0:
        scale = _scale(addend, eps)
        for i in range(len(row)):
            row[i] += addend[i] * scale * norm[i]
    else:
        for i in range(len(row)):
            row[i] += addend[i]


@_pasted
def _centre_row(row):
    """Take off the mean."""
    total = np.float32(0.0)
    for i in range(len(row)):
        total += row[i]
    mean = total / np.float32(len(row))
    for i in range(len(row)):
        row[i] -= mean


@_pasted
def _norm_row(row, norm, eps, out):
    scale = _scale(row, eps)
    for i in range(len(row)):
        out[i] = row[i] * scale * norm[i]


@_pasted
def _norm_parts(row, norm, eps, out, parts):
    """Norm each of so many parts by itself; 0: all as one."""
    if parts == 0:
        _norm_row(row, norm, eps, out)
        return
    each = len(row) // parts
    for first in range(0, len(row), each):
        _norm_row(row[first : first + each], norm[first : first + each], eps, out[first : first + each])


@_pasted
def _gate(step, phase, row, values, columns):
    """Gate the first ``columns`` of ``values``; what is behind them and a vector's rest is room."""
    if phase.gate_kind == GATED_BY_ROW:
        number = floats_at(step.places[phase.gate] + row * phase.gate_row * 4, 1)[0]
        factor = sigmoid(number)
        for i in range(columns):
            values[i] *= factor
        return
    at = step.value_floats // 2
    there = floats_at(step.places[phase.gate] + (row * phase.gate_row + phase.gate_at) * 4, columns)
    if phase.gate_kind == GATED_BY_SIGMOID:
        row_copy(there, 0, values, at, columns)
        times_sigmoid(values, 0, values, at, columns)
    else:
        row_copy(values, 0, values, at, columns)
        row_copy(there, 0, values, 0, columns)
        times_gelu(values, 0, values, at, columns)


# --- phases ---------------------------------------------------------------------------------------------------------
# Whoever waits for others prefetches from ``ahead`` to ``end``, of the weight that it will multiply with next. A phase
# returns how far that came.


@_pasted
def _prepare(step, phase, is_first, before, counters, number, values, thread, ahead, end):
    """See `ROWS`. is_first: there is nothing to be added yet; before: the norm before what follows"""
    rows, eps, columns, weight = step.rows, phase.eps, phase.columns, phase.weight
    factors, sums = words_at(step.factors, step.factors_length), floats_at(step.sums, step.sums_length)
    is_as_it_is = weight != 0 and phase.kept < 0 and phase.gate_kind == NO_GATE and len(before) == 0
    is_as_it_is = is_as_it_is and weight_at(weight).depth == columns
    first, last, share = take_rows(counters, number, rows, thread, step.threads)
    while first < last:
        for row in range(first, last):
            here = floats_at(step.places[phase.source] + (row * phase.source_row + phase.source_at) * 4, columns)
            if phase.norms_first != 0:
                _norm_row(here, before, eps, values)
            if phase.addend >= 0 and not is_first:
                _add_row(
                    here, floats_at(step.places[phase.addend] + row * columns * 4, columns), _norm_at(phase.after), eps
                )
                if phase.scale != np.float32(1):
                    for i in range(columns):
                        here[i] *= phase.scale
                if phase.is_centred != 0:
                    _centre_row(here)
            if is_as_it_is:
                prepare_row(here, weight_at(weight), row, rows, factors, sums)
            elif weight != 0 or phase.kept >= 0:
                if phase.norms_first != 0:
                    pass
                elif len(before) > 0:
                    _norm_parts(here, before, eps, values, phase.norm_parts)
                else:
                    row_copy(here, 0, values, 0, columns)
                if phase.gate_kind != NO_GATE:
                    _gate(step, phase, row, values, columns)
                if phase.kept >= 0:
                    row_copy(values, 0, floats_at(step.places[phase.kept] + row * columns * 4, columns), 0, columns)
                if weight != 0:
                    packed = weight_at(weight)
                    for i in range(columns, packed.depth):
                        values[i] = 0.0
                    prepare_row(values, packed, row, rows, factors, sums)
            elif len(before) > 0:
                _norm_row(here, before, eps, here)
        fetch_add(counters, number)
        first, last, share = take_rows(counters, number, rows, share, step.threads)
    return wait_and_prefetch(counters, number, pieces_of(rows), ahead, end)


@_pasted
def _multiply(step, phase, counters, counters_at, number, tile, thread):
    """See `PRODUCT`. Returns what is to be prefetched."""
    weight = weight_at(phase.weight)
    ahead, end = np.int64(0), np.int64(0)
    if phase.following != 0:
        ahead, end = share_of(weight_at(phase.following), step.rows, thread, step.threads)
    factors = step.factors if phase.prepared < 0 else step.places[phase.prepared]
    call_at(
        step.products[weight.kind],
        (
            phase.weight, phase.bias, phase.bias_length, phase.epilogue, step.places[phase.out], phase.out_columns,
            factors, step.sums, step.rows, counters_at, number, tile, thread, step.threads, ahead,
        ),
    )  # fmt: skip
    return wait_and_prefetch(counters, number, items_of(weight, step.rows, step.threads), ahead, end), end


@_pasted
def _norm_heads(row, columns, norm, eps):
    """Norm as many of ``columns`` at a time as the norm has weights: a head, or all of them."""
    each = len(norm)
    if each > 0:
        for first in range(0, columns, each):
            here = floats_at(row + first * 4, each)
            _norm_row(here, norm, eps, here)


@_pasted
def _query_scale(step, row):
    return floats_at(step.places[QUERY_SCALES] + row * 4, 1)[0]


@_pasted
def _multiply_all(numbers, factor):
    """In place."""
    for i in range(len(numbers)):
        numbers[i] *= factor


@_pasted
def _rotate_and_write(step, phase, counters, number, thread, ahead, end):
    """See `WRITE`."""
    kind = _kind_at(step.kinds + phase.which * _KIND_BYTES)
    own = pass_at(kind.writing)
    rows, dim, value_dim, kv_heads = own.rows, own.dim, own.value_dim, own.kv_heads
    query_norm, key_norm, value_norm = (
        _norm_at(phase.norms[QUERY_NORM]),
        _norm_at(phase.norms[KEY_NORM]),
        _norm_at(phase.norms[VALUE_NORM]),
    )
    first, last, share = take_rows(counters, number, rows, thread, step.threads)
    while first < last:
        for row in range(first, last):
            query, key, value = (
                own.query + row * own.query_row * 4,
                own.key + row * own.key_row * 4,
                own.value + row * own.value_row * 4,
            )
            if phase.copies_keys != 0:
                row_copy(floats_at(key, kv_heads * dim), 0, floats_at(value, kv_heads * dim), 0, kv_heads * dim)
            if phase.is_scaled != 0:
                _multiply_all(floats_at(query, own.q_heads * dim), _query_scale(step, row))
            _norm_heads(query, own.q_heads * dim, query_norm, phase.eps)
            _norm_heads(key, kv_heads * dim, key_norm, phase.eps)
            _norm_heads(value, kv_heads * value_dim, value_norm, phase.eps)
        call_at(kind.write, (kind.writing, phase.record, first, last, thread))
        fetch_add(counters, number)
        first, last, share = take_rows(counters, number, rows, share, step.threads)
    return wait_and_prefetch(counters, number, pieces_of(rows), ahead, end)


@_pasted
def _rotate(row, cosines, sines):
    """In place: the elements ``(i, i + half)`` turn together."""
    half = len(cosines)
    for i in range(half):
        low, high = row[i], row[half + i]
        row[i] = low * cosines[i] - high * sines[i]
        row[half + i] = high * cosines[i] + low * sines[i]


@_pasted
def _write_latents(step, phase, counters, number, thread, ahead, end):
    """See `WRITE_LATENTS`."""
    kind = _kind_at(step.kinds + phase.which * _KIND_BYTES)
    own, rows, rank, rotated = pass_at(kind.attending), step.rows, phase.rank, phase.rotated
    norm, width, head_size, half = _norm_at(phase.before), rank + rotated, phase.plain + rotated, rotated // 2
    first, last, share = take_rows(counters, number, rows, thread, step.threads)
    while first < last:
        for row in range(first, last):
            made = step.places[phase.source] + ((row + 1) * phase.source_row - width) * 4
            latent = floats_at(step.places[LATENTS] + row * width * 4, width)
            cosines, sines = floats_at(own.cosines + row * half * 4, half), floats_at(own.sines + row * half * 4, half)
            _norm_row(floats_at(made, rank), norm, phase.eps, latent[:rank])
            row_copy(floats_at(made, width), rank, latent, rank, rotated)
            _rotate(latent[rank:], cosines, sines)
            queries = step.places[phase.gate] + row * phase.gate_row * 4
            if phase.is_scaled != 0:
                _multiply_all(floats_at(queries, phase.heads * head_size), _query_scale(step, row))
            for head in range(phase.heads):
                _rotate(floats_at(queries + (head * head_size + phase.plain) * 4, rotated), cosines, sines)
        call_at(kind.write, (kind.writing, phase.record, first, last, thread))
        fetch_add(counters, number)
        first, last, share = take_rows(counters, number, rows, share, step.threads)
    return wait_and_prefetch(counters, number, pieces_of(rows), ahead, end)


_HEAD_ROWS = 16
"""Rows that are multiplied with a head's matrix at a time."""

_DEPTH = 4
"""Rows of the matrix that are added at once."""


@_pasted
def _multiply_row(x, matrix, outputs, out):
    """``out [outputs] = x @ matrix``, which begins at that address."""
    for j in range(outputs):
        out[j] = 0.0
    whole = len(x) - len(x) % _DEPTH
    for d in range(0, whole, _DEPTH):
        first, second = floats_at(matrix + d * outputs * 4, outputs), floats_at(matrix + (d + 1) * outputs * 4, outputs)
        third = floats_at(matrix + (d + 2) * outputs * 4, outputs)
        fourth = floats_at(matrix + (d + 3) * outputs * 4, outputs)
        a, b, c, e = x[d], x[d + 1], x[d + 2], x[d + 3]
        for j in range(outputs):
            out[j] += a * first[j] + b * second[j] + c * third[j] + e * fourth[j]
    for d in range(whole, len(x)):
        only = floats_at(matrix + d * outputs * 4, outputs)
        for j in range(outputs):
            out[j] += x[d] * only[j]


@_pasted
def _multiply_heads(step, phase, counters, number, thread, ahead, end):
    """See `OF_HEADS`. A thread's items are a head's, of some rows."""
    rows, heads, inputs, outputs, tail = step.rows, phase.heads, phase.inputs, phase.outputs, phase.tail
    blocks = -(-rows // _HEAD_ROWS)
    count = heads * blocks
    item, share = take_item(counters, number + 1, thread, step.threads, count)
    while item < count:
        head, first = item // blocks, item % blocks * _HEAD_ROWS
        for row in range(first, min(first + _HEAD_ROWS, rows)):
            source = step.places[phase.source] + (row * phase.source_row + head * phase.columns) * 4
            target = step.places[phase.out] + (row * heads + head) * phase.out_columns * 4
            _multiply_row(
                floats_at(source, inputs), phase.up + head * inputs * outputs * 4, outputs, floats_at(target, outputs)
            )
            row_copy(floats_at(source, inputs + tail), inputs, floats_at(target, outputs + tail), outputs, tail)
        fetch_add(counters, number)
        item, share = take_item(counters, number + 1, share, step.threads, count)
    return wait_and_prefetch(counters, number, count, ahead, end)


@_pasted
def _attend(step, phase, counters_at, thread, ahead, end):
    """See `ATTEND`."""
    kind, layer = _kind_at(step.kinds + phase.which * _KIND_BYTES), layer_at(phase.record)
    own, own_at = pass_at(kind.attending), counters_at + 8 * step.attend_counters
    call_at(kind.attend, (kind.attending, phase.record, own_at, thread))
    if layer.states != 0:
        parts = own.sequences * _states_at(layer.states).heads
    else:
        parts = plan_at(own.plans + layer.plan * _PLAN_BYTES).part_count
    return wait_and_prefetch(longs_at(own_at, FINISHED + 1), FINISHED, parts, ahead, end)


@_pasted
def _down_ranks(step, phase, counters_at, number, thread):
    """See `DOWN_RANKS`."""
    call_at(
        step.add_down,
        (
            phase.low_rank, step.places[phase.source], phase.source_row, step.places[BETWEEN], phase.columns,
            step.row_groups, step.adapted_groups, counters_at, number, thread, step.threads,
        ),
    )  # fmt: skip


@_pasted
def _up_ranks(step, phase, counters, counters_at, number, tile, thread, ahead, end):
    """See `UP_RANKS`."""
    downs = _phase_counters(phase.number - DOWNS_BEFORE, step.threads)
    wait_for(counters, downs, down_items(phase.low_rank, step.adapted_groups))
    groups = step.adapted_groups if phase.epilogue == PLAIN else step.group_count
    call_at(
        step.add_up,
        (
            phase.low_rank, step.places[BETWEEN], phase.columns, step.places[phase.source], phase.source_row,
            phase.epilogue, step.places[phase.out], phase.out_columns, step.rows, step.row_groups, groups, counters_at,
            number, tile, thread, step.threads,
        ),
    )  # fmt: skip
    return wait_and_prefetch(counters, number, up_items(phase.low_rank, groups), ahead, end)


# --- entry point ----------------------------------------------------------------------------------------------------


def _run_phases(address, thread):
    step = _step_at(address)
    each = step.counters_per_layer
    values = floats_at(step.values + thread * step.value_floats * 4, step.value_floats)
    tile = step.tiles + thread * TILE * 4
    final_norm = floats_at(step.final_norm, step.hidden if step.final_norm != 0 else 0)
    ahead, end = np.int64(0), np.int64(0)
    for index in range(step.count + 1):
        is_last = index == step.count
        phase = _phase_at(step.closing if is_last else step.phases + index * _PHASE_BYTES)
        counters_at = step.counters + (phase.layer - step.first_layer) * each * 8
        counters, number = longs_at(counters_at, each), _phase_counters(phase.number, step.threads)
        if phase.kind == ROWS:
            before = final_norm if is_last and len(final_norm) > 0 else _norm_at(phase.before)
            is_first = index == 0 and step.goes_on == 0
            ahead = _prepare(step, phase, is_first, before, counters, number, values, thread, ahead, end)
        elif phase.kind == PRODUCT:
            ahead, end = _multiply(step, phase, counters, counters_at, number, tile, thread)
        elif phase.kind == WRITE:
            ahead = _rotate_and_write(step, phase, counters, number, thread, ahead, end)
        elif phase.kind == ATTEND:
            ahead = _attend(step, phase, counters_at, thread, ahead, end)
        elif phase.kind == WRITE_LATENTS:
            ahead = _write_latents(step, phase, counters, number, thread, ahead, end)
        elif phase.kind == OF_HEADS:
            ahead = _multiply_heads(step, phase, counters, number, thread, ahead, end)
        elif phase.kind == DOWN_RANKS:
            _down_ranks(step, phase, counters_at, number, thread)
        elif phase.kind == UP_RANKS:
            ahead = _up_ranks(step, phase, counters, counters_at, number, tile, thread, ahead, end)
        else:
            call_at(step.mix, (phase.mixture, step.mixing, counters_at + 8 * step.mixing_counters, thread))
            ahead = end = np.int64(0)


@cache
def run_phases() -> Any:
    """The compiled function of a `STEP`'s address and a thread: its share of all phases of all layers.

    The residual stream is what comes out of the last layer afterwards, normed if there is a norm behind it.
    """
    return machine_code.unit(_run_phases, 2, fastmath=_MATH, error_model="numpy")
