# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.experts`: a layer's mixture of experts in one call, on several threads.

A *slot* is a token at one of its experts; slots are in the order of experts, and of tokens within an expert. A *part*
is some slots of one expert. Threads choose tokens' experts, deal the slots out into parts, and go through the parts
together, some hundreds of slots at a time: each expert's product is shared out among all threads, and nobody waits
before the next one begins. So a few slots keep as many threads busy as many do, and what is under way stays in caches.

As in `decoder_jit`, nobody waits for a thread, only for what some thread has taken. A thread may be late by any time:
whatever it reads without having taken anything is of this layer alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from numba.extending import register_jitable

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import call_at, floats_at, longs_at, record_at, words_at
from headwise.kernels.cpu.matmul_jit import PLAIN, TILE, items_of
from headwise.kernels.cpu.matmul_rows import factor_stride, prepare_row, sums_stride, weight_at
from headwise.kernels.cpu.records import numbers
from headwise.kernels.cpu.threads import fetch_add, pieces_of, publish, take_item, take_rows, wait_for
from headwise.kernels.experts import SCORED_BY

GATE, DOWN = range(2)
"""Products of an MLP: the one that its activation is behind, which has a gate if that is gated, and the last."""

MLP = np.dtype([("weights", np.int64, (2,)), ("biases", np.int64, (2, 2)), ("codes", np.int64, (2,)), *numbers("size")])
"""An MLP: of both products a `WEIGHT` record, address and length of the bias (0 where there is none), and address
of what is compiled; and how many numbers are between the two."""

MIXTURE = np.dtype(
    [
        *numbers(
            "mlps experts per_token has_shared epilogue columns scored_by groups groups_per_token best_of_group"
            " weighs_input correction scales logit_bias"
        ),
        ("norm_min", np.float32),
        ("scale", np.float32),
    ]
)
"""A layer's experts: see `headwise.kernels.experts.Mixture` and `Routing`.

mlps:       `MLP` records of the experts, which are alike, and behind them of the shared one, if there is one
epilogue:   of first products
columns:    of tokens
correction, scales, logit_bias: float32 ``[experts]``; 0 where there is none
norm_min:   negative where weights are not divided
"""

MIXING = np.dtype(
    numbers(
        "rows threads x logits chosen weights order ends factors sums gated down shared_factors shared_sums"
        " shared_gated out tiles values widest"
    )
)
"""What layers of a step have in common: so many ``rows``, and room for what is under way, of ``slots`` at a time.

x:               float32 ``[rows, columns]``
logits:          float32 ``[rows, experts]``
chosen, weights: int64 and float32 ``[rows, per_token]``
order:           int64: for each slot, the place of its token and expert in ``chosen``
ends:            int64 ``[experts]``
factors, sums:   of rows that are multiplied, for ``slots``; shared_...: for ``rows``
gated, down:     float32 ``[slots, size]`` and ``[slots, columns]``; shared_gated: for ``rows``
out:             float32 ``[rows, columns]``
tiles, values:   `matmul_jit.TILE` and ``widest`` floats for each thread
"""

SLOTS = 512
"""That are computed at a time."""

COLUMNS = 256
"""Of what experts made, that a thread adds up at a time."""

MOST_EXPERTS = TILE // 4
"""A thread's tile is where it chooses: three numbers of each expert, and one of each group."""

_SOFTMAX, _SIGMOID, _ROOT_SOFTPLUS = map(SCORED_BY.index, ("softmax", "sigmoid", "sqrtsoftplus"))
_PHASES = 3
"""Before parts: the choice, and both products of the shared expert."""

_OF_SLOTS = 3
"""Of some slots: rows for the first product, rows for the second, and the sum."""

_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")
_called = numba.njit(nogil=True, error_model="numpy")
_mixture_at, _mixing_at, _mlp_at = record_at(MIXTURE), record_at(MIXING), record_at(MLP)
_MLP_BYTES = MLP.itemsize


@register_jitable
def most_parts(slots: int, experts: int) -> int:
    """Parts that so many slots may be in."""
    return min(slots, experts) + -(-slots // SLOTS) - 1


@register_jitable
def mixture_counters(slots: int, experts: int, threads: int) -> int:
    """Numbers that each layer has of its own, which are 0: counters, then how many parts there are, then the parts.

    Counters are, of each phase, pieces done, and pieces taken of each thread's share.
    """
    parts = most_parts(slots, experts)
    return (_PHASES + _OF_SLOTS * -(-slots // SLOTS) + 2 * parts) * (1 + threads) + 1 + 3 * parts


# --- which experts --------------------------------------------------------------------------------------------------


@_pasted
def _is_better(score, best):
    """NaN is the worst."""
    return score > best or (best != best and score == score)


@_pasted
def _score(mixture, logits, scores, compared):
    """Scores of a token, and what they are compared by; as `headwise.kernels.experts.route`."""
    experts = mixture.experts
    bias = floats_at(mixture.logit_bias, experts if mixture.logit_bias != 0 else 0)
    correction = floats_at(mixture.correction, experts if mixture.correction != 0 else 0)
    most = np.float32(-np.inf)
    for e in range(experts):
        compared[e] = logits[e] + bias[e] if len(bias) > 0 else logits[e]
        most = max(most, compared[e])
    total = np.float32(0.0)
    for e in range(experts):
        if mixture.scored_by == _SIGMOID:
            scores[e] = np.float32(0.5) * np.tanh(np.float32(0.5) * compared[e]) + np.float32(0.5)
        elif mixture.scored_by == _ROOT_SOFTPLUS:
            positive = compared[e] if compared[e] > 0 else np.float32(0)
            scores[e] = np.sqrt(positive + np.log1p(np.exp(-abs(compared[e]))))
        else:
            scores[e] = np.exp(compared[e] - most)
            total += scores[e]
    if mixture.scored_by == _SOFTMAX:
        for e in range(experts):
            scores[e] /= total
    if mixture.scored_by != _SIGMOID or mixture.groups > 1 or len(correction) > 0:
        for e in range(experts):
            compared[e] = scores[e] + correction[e] if len(correction) > 0 else scores[e]


@_pasted
def _best_left(compared, taken, first, last):
    """Of some experts, the best one that is not taken; of equal ones the first."""
    best = np.int64(-1)
    for e in range(first, last):
        if taken[e] == 0 and (best < 0 or _is_better(compared[e], compared[best])):
            best = e
    return best


@_pasted
def _keep_groups(mixture, compared, taken):
    """Leave of the experts those of a token's best groups; the others compare as minus infinity.

    A group's score lies for a time in ``taken``, behind what tells which are taken: of these, groups need no more.
    """
    each, infinity = mixture.experts // mixture.groups, np.float32(np.inf)
    scores = floats_at(taken.ctypes.data + 4 * mixture.experts, mixture.groups)
    for group in range(mixture.groups):
        scores[group] = np.float32(0.0)
        for _ in range(mixture.best_of_group):
            best = _best_left(compared, taken, group * each, (group + 1) * each)
            scores[group] += compared[best]
            taken[best] = 1
    for e in range(mixture.experts):
        taken[e] = 0
    for _ in range(mixture.groups_per_token):
        best = _best_left(scores, taken, 0, mixture.groups)
        taken[best] = 1
    for group in range(mixture.groups):
        scores[group] = taken[group]
    for e in range(mixture.experts):
        taken[e] = 0
        if scores[e // each] == 0:
            compared[e] = -infinity


@_pasted
def _choose(mixture, call, row, tile):
    """Say which experts a token goes to, and their weights."""
    experts, per_token = mixture.experts, mixture.per_token
    scores, compared = floats_at(tile, experts), floats_at(tile + 4 * experts, experts)
    taken = floats_at(tile + 8 * experts, experts)
    for e in range(experts):
        taken[e] = 0
    _score(mixture, floats_at(call.logits + row * experts * 4, experts), scores, compared)
    if mixture.groups > 1:
        _keep_groups(mixture, compared, taken)
    chosen = longs_at(call.chosen + row * per_token * 8, per_token)
    weights = floats_at(call.weights + row * per_token * 4, per_token)
    total = np.float32(0.0)
    for i in range(per_token):
        best = _best_left(compared, taken, 0, experts)
        taken[best] = 1
        chosen[i], weights[i] = best, scores[best]
        total += scores[best]
    factor = mixture.scale
    scales = floats_at(mixture.scales, experts if mixture.scales != 0 else 0)
    for i in range(per_token):
        if mixture.norm_min >= 0:
            weights[i] /= mixture.norm_min if total < mixture.norm_min else total  # NaN stays NaN
        weights[i] *= factor
        if len(scales) > 0:
            weights[i] *= scales[chosen[i]]


@_pasted
def _deal(mixture, call, parts):
    """Put slots in order, and cut them into ``parts``: expert, first slot, and the one behind the last. How many."""
    slots = call.rows * mixture.per_token
    chosen, order = longs_at(call.chosen, slots), longs_at(call.order, slots)
    ends, count, until = longs_at(call.ends, mixture.experts), 0, np.int64(0)
    for e in range(mixture.experts):
        ends[e] = 0
    for i in range(slots):
        ends[chosen[i]] += 1
    for e in range(mixture.experts):
        first, until, ends[e] = until, until + ends[e], until
        while first < until:
            last = min(until, (first // SLOTS + 1) * SLOTS)
            parts[3 * count], parts[3 * count + 1], parts[3 * count + 2] = e, first, last
            count, first = count + 1, last
    for i in range(slots):
        order[ends[chosen[i]]] = i
        ends[chosen[i]] += 1
    return count


@_pasted
def _choose_and_deal(mixture, call, counters, count_at, parts, thread, tile):
    """Whoever is the last to choose deals out. Returns how many parts there are."""
    first, last, share = take_rows(counters, 0, call.rows, thread, call.threads)
    while first < last:
        for row in range(first, last):
            _choose(mixture, call, row, tile)
        if fetch_add(counters, 0) + 1 == pieces_of(call.rows):
            publish(counters, count_at, _deal(mixture, call, parts))
        first, last, share = take_rows(counters, 0, call.rows, share, call.threads)
    wait_for(counters, count_at, 1)
    return counters[count_at]


# --- products -------------------------------------------------------------------------------------------------------


@_called
def _ready(source, columns, factor, weight, row, factors, sums, rows, values):
    """Make a row times ``factor`` what a product takes, as number ``row`` of its ``rows``."""
    packed, here = weight_at(weight), floats_at(source, columns)
    for i in range(columns):
        values[i] = here[i] * factor
    for i in range(columns, packed.depth):
        values[i] = 0.0
    factors, sums = words_at(factors, rows * factor_stride(packed)), floats_at(sums, rows * sums_stride(packed))
    prepare_row(values, packed, row, rows, factors, sums)


@_pasted
def _ready_rows(mixture, call, which, parts, some, first, slots, shared, counters, phase, thread, values):
    """Rows for the products ``which``, of so many slots from ``first`` on, which is where the part ``some`` begins, and
    ``shared`` ones of the shared expert. Those of a part are what its expert's product takes."""
    order, weights = longs_at(call.order, first + slots), floats_at(call.weights, call.rows * mixture.per_token)
    mlp, other, count = _mlp_at(mixture.mlps), _shared(mixture), slots + shared
    packed = weight_at(mlp.weights[which])
    begin, end, share = take_rows(counters, phase, count, thread, call.threads)
    while begin < end:
        part = some
        for i in range(begin, end):
            row, factor = i - slots, np.float32(1.0)
            if i < slots:
                while parts[3 * part + 2] <= first + i:
                    part += 1
                at, rows = parts[3 * part + 1] - first, parts[3 * part + 2] - parts[3 * part + 1]
                source, columns = call.gated + i * mlp.size * 4, mlp.size
                if which == GATE:
                    place, columns = order[first + i], mixture.columns
                    source = call.x + place // mixture.per_token * columns * 4
                    if mixture.weighs_input != 0:
                        factor = weights[place]
                _ready(
                    source, columns, factor, mlp.weights[which], i - at, call.factors + 4 * at * factor_stride(packed),
                    call.sums + 4 * at * sums_stride(packed), rows, values,
                )  # fmt: skip
            else:
                source, columns = call.shared_gated + row * other.size * 4, other.size
                if which == GATE:
                    columns = mixture.columns
                    source = call.x + row * columns * 4
                _ready(
                    source, columns, factor, other.weights[which], row, call.shared_factors, call.shared_sums, shared,
                    values,
                )  # fmt: skip
        fetch_add(counters, phase)
        begin, end, share = take_rows(counters, phase, count, share, call.threads)
    wait_for(counters, phase, pieces_of(count))


@_called
def _multiply(mixture, call, mlp, which, factors, sums, out, rows, counters_at, counter, thread):
    """This thread's share of a product."""
    columns = mlp.size if which == GATE else mixture.columns
    epilogue = mixture.epilogue if which == GATE else np.int64(PLAIN)
    call_at(
        mlp.codes[which],
        (
            mlp.weights[which], mlp.biases[which, 0], mlp.biases[which, 1], epilogue, out, columns, factors, sums, rows,
            counters_at, counter, call.tiles + thread * TILE * 4, thread, call.threads, np.int64(0),
        ),
    )  # fmt: skip


@_pasted
def _multiply_parts(mixture, call, which, parts, some, last, shared, counters, counter, thread):
    """Products ``which`` of the parts from ``some`` to ``last``, whose counters begin at ``counter``, and of the shared
    expert on so many rows; its second ones go to ``out``."""
    each, other, counters_at = 1 + call.threads, _shared(mixture), counters.ctypes.data
    packed, first = weight_at(_mlp_at(mixture.mlps).weights[which]), parts[3 * some + 1]
    if shared > 0:
        out = call.shared_gated if which == GATE else call.out
        _multiply(
            mixture, call, other, which, call.shared_factors, call.shared_sums, out, shared, counters_at,
            (1 + which) * each, thread,
        )  # fmt: skip
    for part in range(some, last):
        mlp, at = _mlp_at(mixture.mlps + parts[3 * part] * _MLP_BYTES), parts[3 * part + 1] - first
        out = call.gated + 4 * at * mlp.size if which == GATE else call.down + 4 * at * mixture.columns
        _multiply(
            mixture, call, mlp, which, call.factors + 4 * at * factor_stride(packed),
            call.sums + 4 * at * sums_stride(packed), out, parts[3 * part + 2] - parts[3 * part + 1], counters_at,
            counter + (2 * part + which) * each, thread,
        )  # fmt: skip
    if shared > 0:
        wait_for(counters, (1 + which) * each, items_of(weight_at(other.weights[which]), shared, call.threads))
    for part in range(some, last):
        rows = parts[3 * part + 2] - parts[3 * part + 1]
        wait_for(counters, counter + (2 * part + which) * each, items_of(packed, rows, call.threads))


@_pasted
def _shared(mixture):
    """The shared expert; of a mixture without one, any."""
    return _mlp_at(mixture.mlps + mixture.has_shared * mixture.experts * _MLP_BYTES)


# --- sums -----------------------------------------------------------------------------------------------------------


@_pasted
def _add_up(mixture, call, first, slots, counters, phase, thread):
    """Add what experts made of the slots from ``first`` on to their tokens' rows, in the order of slots."""
    columns, per_token = mixture.columns, mixture.per_token
    order, weights = longs_at(call.order, first + slots), floats_at(call.weights, call.rows * per_token)
    count = -(-columns // COLUMNS)
    piece, share = take_item(counters, phase + 1, thread, call.threads, count)
    while piece < count:
        begin = piece * COLUMNS
        width = min(COLUMNS, columns - begin)
        if first == 0 and mixture.has_shared == 0:
            for row in range(call.rows):
                target = floats_at(call.out + 4 * (row * columns + begin), width)
                for c in range(width):
                    target[c] = 0.0
        for slot in range(slots):
            place = order[first + slot]
            weight = np.float32(1.0) if mixture.weighs_input != 0 else weights[place]
            source = floats_at(call.down + 4 * (slot * columns + begin), width)
            target = floats_at(call.out + 4 * (place // per_token * columns + begin), width)
            for c in range(width):
                target[c] += weight * source[c]
        fetch_add(counters, phase)
        piece, share = take_item(counters, phase + 1, share, call.threads, count)
    wait_for(counters, phase, count)


# --- entry point ----------------------------------------------------------------------------------------------------


def _mix(mixture_address, mixing_address, counters_address, thread):
    mixture, call = _mixture_at(mixture_address), _mixing_at(mixing_address)
    slots, each = call.rows * mixture.per_token, 1 + call.threads
    runs, most = -(-slots // SLOTS), most_parts(slots, mixture.experts)
    counter = (_PHASES + _OF_SLOTS * runs) * each
    count_at = counter + 2 * most * each
    counters = longs_at(counters_address, count_at + 1)
    parts = longs_at(counters_address + 8 * (count_at + 1), 3 * most)
    tile, values = call.tiles + thread * TILE * 4, floats_at(call.values + thread * call.widest * 4, call.widest)
    count = _choose_and_deal(mixture, call, counters, count_at, parts, thread, tile)
    some = np.int64(0)
    for run in range(runs):
        first = run * SLOTS
        here, last = min(SLOTS, slots - first), some
        while last < count and parts[3 * last + 1] < first + here:
            last += 1
        shared = call.rows if run == 0 and mixture.has_shared != 0 else np.int64(0)
        phase = (_PHASES + _OF_SLOTS * run) * each
        for which in range(DOWN + 1):
            _ready_rows(
                mixture, call, which, parts, some, first, here, shared, counters, phase + which * each, thread, values
            )
            _multiply_parts(mixture, call, which, parts, some, last, shared, counters, counter, thread)
        _add_up(mixture, call, first, here, counters, phase + (DOWN + 1) * each, thread)
        some = last


@cache
def mix() -> Any:
    """The compiled function of a `MIXTURE`'s and a `MIXING`'s addresses, that of `mixture_counters` numbers, which are
    0, and a thread: its share of what the experts make of ``x``."""
    return machine_code.unit(_mix, 4, error_model="numpy")


def _mix_alone(address, thread):
    own = longs_at(address, 4)
    call_at(own[0], (own[1], own[2], own[3], thread))


@cache
def mix_alone() -> Any:
    """The compiled function of the address of four numbers, that of `mix` and its first three, and a thread."""
    return machine_code.unit(_mix_alone, 2, error_model="numpy")
