"""Records of a decoder's step in one compiled call: its *phases*, and what they have in common. See `decoder_jit`."""

from __future__ import annotations

import numpy as np

from headwise.kernels.cpu.records import numbers

_N = np.int64

PRODUCTS = 6
"""Kinds of packed weights."""

ROWS, PRODUCT, WRITE, ATTEND, MIX, WRITE_LATENTS, OF_HEADS, DOWN_RANKS, UP_RANKS = range(9)
"""Kinds of phases, see `PHASE`."""

QUERY_NORM, KEY_NORM, VALUE_NORM = HEAD_NORMS = range(3)

NO_GATE, GATED_BY_SIGMOID, GATED_BY_GELU, GATED_BY_ROW = range(4)
"""What rows are multiplied with before a product: nothing, sigmoids of other rows, or of a number each; or they are the
gate themselves, as GELU has it, of other rows."""

(
    STREAM, QKV, VALUES, HEADS_SEEN, GATES, ADDED, GATED, BESIDE, NORMED, LOGITS, SIDES, QUERY_SCALES, QUERIES, LATENTS,
    ABSORBED, VALUES_SEEN, INTO, BETWEEN, DECAYS,
) = PLACES = range(19)  # fmt: skip
"""Places that rows lie in from phase to phase, float32.

STREAM:      the residual stream
QKV:         queries, keys and values; or all that goes into what has states
VALUES:      values that keys are made into
HEADS_SEEN:  what attention has seen
GATES:       of heads, also of those with states, of a shared expert, of a side input
ADDED:       what is to be added to the stream
GATED:       what comes of an MLP's activation
BESIDE:      what an MLP makes beside experts
NORMED:      rows that experts are given, or adapters
LOGITS:      of their routers
SIDES:       what layers are told besides, of each token
QUERY_SCALES: a number of each token, by which queries are multiplied
QUERIES:     of heads over latents, where they are made of other numbers
LATENTS:     of tokens
ABSORBED:    queries for latents
VALUES_SEEN: what heads over latents have seen
INTO:        what an MLP's activation is given, as it lies packed, where adapters add to it
BETWEEN:     the numbers between both matrices of rows' adapters
DECAYS:      of channels of states
"""

DOWNS_BEFORE = 2
"""How many phases numbers between two matrices come before they are taken: the product is between these."""

PHASE = np.dtype(
    [
        *numbers(
            "kind layer number source source_row source_at columns addend kept gate gate_row gate_at gate_kind weight"
            " bias bias_length epilogue out out_columns prepared following which record"
            " copies_keys is_scaled mixture norms_first norm_parts is_centred"
            " heads plain rank rotated inputs outputs up tail low_rank"
        ),
        ("after", _N, (2,)),
        ("before", _N, (2,)),
        ("norms", _N, (len(HEAD_NORMS), 2)),
        ("scale", np.float32),
        ("eps", np.float32),
    ]
)
"""A phase of a decoder layer, and its number within it. Places are given by number, norms by address and length.

ROWS:    rows ``source [rows, columns]``, ``source_row`` apart and from ``source_at`` on, get ``addend``, if that is not
         negative, normed if there is a norm ``after``, are multiplied by ``scale``, and have their mean taken off, if
         ``is_centred``: in place. Normed, if there is a norm ``before``, which comes before all that if
         ``norms_first``, or else is of each of ``norm_parts`` by itself, if that is not 0,
         and gated (see `NO_GATE`: by rows of ``gate``, ``gate_row`` apart, from ``gate_at`` on) they are prepared for
         the product with ``weight``, if that is not 0, and copied to ``kept``, if that is not negative; with neither
         they stay where they are, normed
PRODUCT: what rows were prepared as, in ``prepared``, or in `STEP`'s room if that is negative, times
         ``weight [.., out_columns]``, with ``bias`` and ``epilogue``, to ``out``, see `matmul_jit.AS_ROWS`;
         ``following`` is the weight of the product behind it, to be prefetched; 0: unknown
WRITE:   heads are normed by ``norms``, those that have some, each or as one, queries and keys rotated, and keys and
         values written to the cache of kind ``which``, as ``record``, a `LAYER`, says. copies_keys: values are keys,
         before all that. is_scaled: queries are multiplied by `QUERY_SCALES`
ATTEND:  attention, or what has states in its place, of ``record`` by kind ``which``
MIX:     the mixture of experts at ``mixture``
WRITE_LATENTS: the last ``rank + rotated`` numbers of rows of ``source`` become latents: normed by ``before`` but for
         those that are rotated, and written to the cache. Of rows of ``gate`` the ``rotated`` numbers of each of the
         ``heads``, behind ``plain`` others, are rotated, and all multiplied by `QUERY_SCALES`, if ``is_scaled``
OF_HEADS: of rows ``source [rows, heads, columns]``, ``source_row`` apart, the first ``inputs`` times the head's
         matrix at ``up [heads, inputs, outputs]``, to ``out [rows, heads, out_columns]``; behind them the ``tail``
         numbers of the source that follow
DOWN_RANKS: rows of ``source``, ``source_row`` apart, of groups that go by adapters become what is `BETWEEN`, of
         ``columns`` numbers each, as ``low_rank``, a `LOW_RANK`, says. Nobody waits for it before the phase that is
         `DOWNS_BEFORE` phases behind it
UP_RANKS: what adapters make of these is added to what a product left in ``source [rows, source_row]``: there, or by
         ``epilogue`` it becomes ``out [rows, out_columns]``, of all rows

``eps`` is of norms.
"""

KIND = np.dtype(numbers("writing write attending attend"))
"""A kind of layers: `PASS` records for KV write and attention, and addresses of what is compiled for them."""

STEP = np.dtype(
    [
        ("products", _N, (PRODUCTS,)),
        ("places", _N, (len(PLACES),)),
        *numbers(
            "rows phases count closing first_layer kinds counters counters_per_layer attend_counters mixing_counters"
            " threads values value_floats tiles factors factors_length sums sums_length final_norm hidden mix mixing"
            " goes_on add_down add_up row_groups adapted_groups group_count"
        ),
    ]
)
"""A step of a decoder.

products:      addresses of the compiled products with weights of each kind
places:        addresses of `PLACES`
phases:        ``count`` `PHASE` records; and ``closing``, that of what ends the last layer of them
kinds:         `KIND` records
counters:      that are 0, ``counters_per_layer`` of each layer from ``first_layer`` on: two for each phase and those of
               its threads, see `decoder_jit.phase_counters`; of attention behind ``attend_counters``, and of the
               mixture behind ``mixing_counters``
threads:       that take part
values, tiles: ``value_floats`` and `matmul_jit.TILE` floats for each thread
factors, sums: room for what products multiply
goes_on:       whether these phases are not the first ones of their layers: there is something to be added
final_norm:    weight of the norm behind the last layer, float32 ``[hidden]``; 0 where there is none
mix, mixing:   address of `experts_jit.mix`, and an `experts_jit.MIXING`
add_down, add_up: addresses of what `low_rank_jit` has for the phases of adapters
row_groups:    ``group_count`` of `low_rank.RowGroups`, of which the first ``adapted_groups`` go by adapters
"""
