"""Kimi Delta Attention over states in the cache, in Triton: what `headwise.kernels.kda_base` says, by three ways.

**One token** (`step`): a program has one sequence's head, and does all that the layer does between its projections:
convolution, lengths, gates, the rule, the norm. The state is read once and written once.

**Tokens that follow each other** (`walk`), each a sequence of one, as drafts make them: the same of each in turn, with
the state in registers through all of them; it is left behind those that are no guesses.

**Several tokens**: chunks of ``CHUNK`` tokens, which end where blocks do, in five launches. `convolve` makes queries,
keys, values and rates of what was projected. `pair` has the products among a chunk's tokens, for ``PART`` of them in a
program. `solve` has the inverse of the triangular system that corrections solve. `carry` goes through a sequence's
chunks one after the other, for some columns of a head's state, and leaves states where blocks end. `finish` norms.

Ratios of decays hang on the channel. Of tokens in two parts they are made over the last token before the later part,
which makes matrices of them that tensor cores multiply; of two tokens in one part for each channel by itself. No factor
is above 1, so that nothing overflows, and what underflows is of a product that is smaller yet.

A program reads what it will overwrite before a barrier, and writes behind it: small tiles lie in several warps alike.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.delta_jit import NORM_EPS, decay_of
from headwise.kernels.cuda.states_jit import (
    NEVER,
    convolved,
    convolved_row,
    convolved_window,
    find_chunk,
    keep_inputs,
    keep_window,
    left_at,
    member_at,
    product,
    run_of,
    sigmoid,
    source_of,
    span_of,
    table_of,
    window_of,
)

PART = tl.constexpr(16)
"""Tokens of a chunk whose ratios of decays are made for each two of them: as few as matrix instructions take."""


@JITFunction
def inputs_of(projected, head, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Where a head's queries, keys and values are in the first row; less their first channel, which is added."""
    keys = projected + (HEADS + head) * KEY_DIM - KEY_DIM
    return projected + head * KEY_DIM, keys, projected + 2 * HEADS * KEY_DIM + head * VALUE_DIM - 2 * KEY_DIM


@JITFunction
def gated_norm(seen, gates, weight, eps, VALUE_DIM: tl.constexpr):
    """RMS norm over the last axis of ``seen [M, N]``, of which ``VALUE_DIM`` are not 0, times sigmoids of the gates."""
    variance = tl.sum(seen * seen, 1) / VALUE_DIM
    return weight * (seen / tl.sqrt(variance + eps)[:, None]) * sigmoid(gates)


@JITFunction
def controls_of(
    projected, decays, speed, bias, row, head, dims,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """A head's rate at a row, and how much is kept of each of its state's keys, ``[K]``."""
    rate = sigmoid(tl.load(projected + row * ROW + HEADS * CHANNELS + head).to(tl.float32))
    in_key = dims < KEY_DIM
    told = tl.load(decays + (row * HEADS + head) * KEY_DIM + dims, mask=in_key, other=0.0).to(tl.float32)
    biases = tl.load(bias + head * KEY_DIM + dims, mask=in_key, other=0.0)
    return rate, tl.exp(decay_of(told, tl.load(speed + head), biases))


@JITFunction
def tell(out, seen, gates, norm, at, dims, eps, VALUE_DIM: tl.constexpr):
    """What comes of a token and head that has ``seen [N]``, whose numbers begin ``at``."""
    here = (dims < VALUE_DIM)[None, :]
    its_gates = tl.load(gates + at + dims[None, :], mask=here, other=0.0).to(tl.float32)
    weight = tl.load(norm + dims, mask=dims < VALUE_DIM, other=0.0)[None, :]
    gated = gated_norm(seen[None, :], its_gates, weight, eps, VALUE_DIM)
    tl.store(out + at + dims[None, :], gated.to(out.dtype.element_ty), mask=here)


@JITFunction
def step(
    projected, decays, gates, out, arena, convolution, speed, bias, norm,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, groups, max_blocks, block_bytes, slot_bytes, eps,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROW: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    RECURRENT_AT: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """One token of one sequence and head, for sequences with exactly one; grid (sequences x heads)."""
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    table = table_of(block_tables, head_group, sequence, head, groups, max_blocks)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    if count != 1:
        return
    source = source_of(table, start, start + 1, BLOCK_SIZE)
    target = tl.load(table + start // BLOCK_SIZE)
    old = member_at(arena, source, head_slot, head, block_bytes, slot_bytes)
    new = member_at(arena, target, head_slot, head, block_bytes, slot_bytes)

    key_dims, value_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_key, in_value = key_dims < KEY_DIM, value_dims < VALUE_DIM
    within = RECURRENT_AT + key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    # Rows that are there, of what is read and written: none, where there is no block.
    read = (key_dims < tl.where(source >= 0, KEY_DIM, 0))[:, None] & in_value[None, :]
    written = (key_dims < tl.where(target >= 0, KEY_DIM, 0))[:, None] & in_value[None, :]
    state = tl.load(old + within, mask=read, other=0.0)  # asked for long before it is needed

    queries_at, keys_at, values_at = inputs_of(projected, head, HEADS, KEY_DIM, VALUE_DIM)
    weights = convolution + head * (WIDTH * CHANNELS)
    known, kept_to = tl.where(source >= 0, CHANNELS, 0), tl.where(target >= 0, CHANNELS, 0)
    of_query, of_key, of_value = key_dims[None, :], KEY_DIM + key_dims[None, :], 2 * KEY_DIM + value_dims[None, :]
    here, there = in_key[None, :], in_value[None, :]
    query_window = window_of(queries_at, old, begin, known, of_query, here, ROW, WIDTH, CHANNELS)
    key_window = window_of(keys_at, old, begin, known, of_key, here, ROW, WIDTH, CHANNELS)
    value_window = window_of(values_at, old, begin, known, of_value, there, ROW, WIDTH, CHANNELS)
    query = tl.sum(convolved_window(query_window, weights, None, of_query, here, WIDTH, CHANNELS), 0)
    key = tl.sum(convolved_window(key_window, weights, None, of_key, here, WIDTH, CHANNELS), 0)
    value = tl.sum(convolved_window(value_window, weights, None, of_value, there, WIDTH, CHANNELS), 0)
    query *= QUERY_SCALE / tl.sqrt(tl.sum(query * query, 0) + NORM_EPS)
    key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + NORM_EPS)

    row = begin.to(tl.int64)
    rate, kept = controls_of(projected, decays, speed, bias, row, head, key_dims, HEADS, KEY_DIM, CHANNELS, ROW)
    state *= kept[:, None]
    correction = rate * (value - tl.sum(key[:, None] * state, 0))
    seen = tl.sum(query[:, None] * state, 0) + tl.sum(query * key, 0) * correction
    tl.debug_barrier()
    tl.store(new + within, state + key[:, None] * correction[None, :], mask=written)
    keep_window(new, query_window, kept_to, of_query, here, WIDTH, CHANNELS)
    keep_window(new, key_window, kept_to, of_key, here, WIDTH, CHANNELS)
    keep_window(new, value_window, kept_to, of_value, there, WIDTH, CHANNELS)

    tell(out, seen, gates, norm, (row * HEADS + head) * VALUE_DIM, value_dims, eps, VALUE_DIM)


@JITFunction
def walk(
    projected, decays, gates, out, arena, convolution, speed, bias, norm, follows,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, batch, groups, max_blocks, block_bytes, slot_bytes,
    eps,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROW: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    RECURRENT_AT: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """As `step`, where sequences may follow others: a program takes those that follow its own on, too; that of one that
    follows has nothing to do."""
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    if (count != 1) | (tl.load(follows + sequence) != 0):
        return
    tokens, known = run_of(follows, sequence, batch)
    # The last one's, which has all columns; with their own, sequences have those that they reach.
    table = table_of(block_tables, head_group, sequence + known - 1, head, groups, max_blocks)
    source = source_of(table, start, start + known, BLOCK_SIZE)
    old = member_at(arena, source, head_slot, head, block_bytes, slot_bytes)
    earliest = tl.where(source >= 0, -NEVER, 0)

    key_dims, value_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    of_key, of_value = key_dims[None, :], 2 * KEY_DIM + value_dims[None, :]
    in_key, in_value = (key_dims < KEY_DIM)[None, :], (value_dims < VALUE_DIM)[None, :]
    within = RECURRENT_AT + key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    read = (key_dims < tl.where(source >= 0, KEY_DIM, 0))[:, None] & in_value
    state = tl.load(old + within, mask=read, other=0.0)

    queries_at, keys_at, values_at = inputs_of(projected, head, HEADS, KEY_DIM, VALUE_DIM)
    weights = convolution + head * (WIDTH * CHANNELS)
    for token in range(tokens):
        query = convolved_row(
            queries_at, weights, None, old, earliest, token, begin, of_key, in_key, ROW, WIDTH, CHANNELS
        )
        key = convolved_row(
            keys_at, weights, None, old, earliest, token, begin, KEY_DIM + of_key, in_key, ROW, WIDTH, CHANNELS
        )
        value = convolved_row(
            values_at, weights, None, old, earliest, token, begin, of_value, in_value, ROW, WIDTH, CHANNELS
        )
        query, key, value = tl.sum(query, 0), tl.sum(key, 0), tl.sum(value, 0)
        query *= QUERY_SCALE / tl.sqrt(tl.sum(query * query, 0) + NORM_EPS)
        key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + NORM_EPS)

        row = (begin + token).to(tl.int64)
        rate, kept = controls_of(projected, decays, speed, bias, row, head, key_dims, HEADS, KEY_DIM, CHANNELS, ROW)
        state *= kept[:, None]
        correction = rate * (value - tl.sum(key[:, None] * state, 0))
        seen = tl.sum(query[:, None] * state, 0) + tl.sum(query * key, 0) * correction
        state += key[:, None] * correction[None, :]
        target = left_at(table, start, token, known, BLOCK_SIZE)
        new = member_at(arena, target, head_slot, head, block_bytes, slot_bytes)
        written = (key_dims < tl.where(target >= 0, KEY_DIM, 0))[:, None] & in_value
        tl.debug_barrier()
        tl.store(new + within, state, mask=written)
        tell(out, seen, gates, norm, (row * HEADS + head) * VALUE_DIM, value_dims, eps, VALUE_DIM)
    tl.debug_barrier()
    keep_ends(
        arena, table, head_slot, head, block_bytes, slot_bytes, old, earliest, projected, begin, start, start + known,
        HEADS, KEY_DIM, VALUE_DIM, ROW, WIDTH, CHANNELS, BLOCK_SIZE,
    )  # fmt: skip


@JITFunction
def keep_ends(
    arena, table, head_slot, head, block_bytes, slot_bytes, old, earliest, projected, begin, start, end,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The last inputs of a head, behind all that a sequence leaves states behind from ``start`` to ``end``."""
    # The last column first: the first one's block may be what was read, which others still need.
    queries_at, keys_at, values_at = inputs_of(projected, head, HEADS, KEY_DIM, VALUE_DIM)
    final = (end - 1) // BLOCK_SIZE
    for back in range(final - start // BLOCK_SIZE + 1):
        block = tl.load(table + final - back)
        new = member_at(arena, block, head_slot, head, block_bytes, slot_bytes)
        taken = tl.minimum((final - back + 1) * BLOCK_SIZE, end) - start
        if block >= 0:
            keep_inputs(new, old, earliest, queries_at, begin, taken, 0, KEY_DIM, ROW, WIDTH, CHANNELS)
            keep_inputs(new, old, earliest, keys_at, begin, taken, KEY_DIM, 2 * KEY_DIM, ROW, WIDTH, CHANNELS)
            keep_inputs(new, old, earliest, values_at, begin, taken, 2 * KEY_DIM, CHANNELS, ROW, WIDTH, CHANNELS)


@JITFunction
def convolve(
    projected, query, key, value, rate, arena, convolution,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, batch, groups, max_blocks, block_bytes, slot_bytes,
    fewest_queries,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROW: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """What the rule takes but for decays, of ``TOKENS`` tokens and one head; grid (tiles x heads).

    ``query``, ``key [T, heads, KEY_DIM]`` and ``value [T, heads, VALUE_DIM]`` are in the model's dtype, ``rate [T,
    heads]`` in float32.
    """
    head = tl.program_id(0) % HEADS
    sequence, number = find_chunk(cu_seqlens_q, batch, tl.program_id(0) // HEADS, TOKENS)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    first = number * TOKENS - start % TOKENS
    if (count < fewest_queries) | (first >= count):
        return
    table = table_of(block_tables, head_group, sequence, head, groups, max_blocks)
    source = source_of(table, start, start + count, BLOCK_SIZE)
    old = member_at(arena, source, head_slot, head, block_bytes, slot_bytes)
    earliest = tl.where(source >= 0, -NEVER, 0)

    queries_at, keys_at, values_at = inputs_of(projected, head, HEADS, KEY_DIM, VALUE_DIM)
    weights = convolution + head * (WIDTH * CHANNELS)
    place = first + tl.arange(0, TOKENS)
    token, in_step = place[:, None], (place >= 0) & (place < count)
    key_dims, value_dims = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    row = (begin + token).to(tl.int64) * HEADS + head
    here = in_step[:, None] & (key_dims < KEY_DIM)
    at = row * KEY_DIM + key_dims
    made = convolved(queries_at, weights, None, old, earliest, token, begin, key_dims, here, ROW, WIDTH, CHANNELS)
    made *= (QUERY_SCALE / tl.sqrt(tl.sum(made * made, 1) + NORM_EPS))[:, None]
    tl.store(query + at, made.to(query.dtype.element_ty), mask=here)
    channel = KEY_DIM + key_dims
    made = convolved(keys_at, weights, None, old, earliest, token, begin, channel, here, ROW, WIDTH, CHANNELS)
    made *= (1.0 / tl.sqrt(tl.sum(made * made, 1) + NORM_EPS))[:, None]
    tl.store(key + at, made.to(key.dtype.element_ty), mask=here)
    here = in_step[:, None] & (value_dims < VALUE_DIM)
    channel = 2 * KEY_DIM + value_dims
    made = convolved(values_at, weights, None, old, earliest, token, begin, channel, here, ROW, WIDTH, CHANNELS)
    tl.store(value + row * VALUE_DIM + value_dims, made.to(value.dtype.element_ty), mask=here)

    tokens = (begin + place).to(tl.int64)
    told = tl.load(projected + tokens * ROW + HEADS * CHANNELS + head, mask=in_step, other=0.0).to(tl.float32)
    tl.store(rate + tokens * HEADS + head, sigmoid(told), mask=in_step)


@JITFunction
def pair(
    decays, query, key, started, lasting, totals, rate, among, alike, speed, bias, cu_seqlens_q, seq_lens,
    batch, fewest_queries,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of ``PART`` tokens of a chunk with all before them, for one head; grid (tiles x parts x heads).

    Of token ``t``, at place ``i`` of its chunk: ``among [t, h, j]`` is ``sum_d q_i k_j exp(G_i - G_j)``, 0 where
    ``j > i``, and ``alike``, float32, likewise ``b_i k_i`` and ``k_j``, 0 where ``j >= i``. Of a chunk of ``C`` tokens
    ``totals [tile, h, d]`` are ``exp(G_C)``, ``query`` becomes ``exp(G_i) q_i``, and ``started`` and ``lasting [t, h,
    d]`` are ``exp(G_i) k_i`` and ``exp(G_C - G_i) k_i``.
    """
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    PARTS: tl.constexpr = ROWS // PART
    part = tile % PARTS
    sequence, number = find_chunk(cu_seqlens_q, batch, tile // PARTS, CHUNK)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    first = number * CHUNK - start % CHUNK
    if (count < fewest_queries) | (first + part * PART >= count) | (first + (part + 1) * PART <= 0):
        return
    place, own, dims = tl.arange(0, ROWS), tl.arange(0, PART), tl.arange(0, BLOCK_K)
    in_key = dims < KEY_DIM
    row = ((begin + first).to(tl.int64) * HEADS + head) * KEY_DIM  # of the first place, which may be no token
    its_speed = tl.load(speed + head)
    its_bias = tl.load(bias + head * KEY_DIM + dims, mask=in_key, other=0.0)[None, :]

    # Decays of all other parts' tokens, and what earlier ones' keys are multiplied with.
    token = first + place
    there = ((token >= 0) & (token < count) & (place < CHUNK))[:, None] & in_key[None, :]
    at = row + place[:, None] * (HEADS * KEY_DIM) + dims[None, :]
    told = tl.load(decays + at, mask=there, other=0.0).to(tl.float32)
    fading = tl.where(there, decay_of(told, its_speed, its_bias), 0.0)
    behind = tl.sum(tl.where((place >= (part + 1) * PART)[:, None], fading, 0.0), 0)
    earlier = there & (place < part * PART)[:, None]
    fading = tl.where(earlier, fading, 0.0)
    before = tl.sum(fading, 0)
    left = tl.exp(tl.minimum(before[None, :] - tl.cumsum(fading, 0), 0.0))
    keys = tl.load(key + at, mask=earlier, other=0.0).to(tl.float32) * left

    token = first + part * PART + own
    real = (token >= 0) & (token < count) & (part * PART + own < CHUNK)
    here = real[:, None] & in_key[None, :]
    at = row + (part * PART + own)[:, None] * (HEADS * KEY_DIM) + dims[None, :]
    told = tl.load(decays + at, mask=here, other=0.0).to(tl.float32)
    its_decays = tl.where(here, decay_of(told, its_speed, its_bias), 0.0)
    fading, total = tl.cumsum(its_decays, 0), tl.sum(its_decays, 0)
    own_query = tl.load(query + at, mask=here, other=0.0).to(tl.float32)
    own_key = tl.load(key + at, mask=here, other=0.0).to(tl.float32)
    tl.debug_barrier()
    start_left = tl.exp(before[None, :] + fading)
    tl.store(query + at, (own_query * start_left).to(query.dtype.element_ty), mask=here)
    tl.store(started + at, (own_key * start_left).to(query.dtype.element_ty), mask=here)
    end_left = tl.exp(tl.minimum(total[None, :] - fading, 0.0) + behind[None, :])
    tl.store(lasting + at, (own_key * end_left).to(query.dtype.element_ty), mask=here)
    # Of the parts, which sum in other orders, the last one that has tokens tells.
    is_last = (first + (part + 1) * PART >= count) | ((part + 1) * PART >= CHUNK)
    told_of = dims < tl.where(is_last, KEY_DIM, 0)
    all_left = tl.exp(before + total + behind)
    tl.store(totals + (tile // PARTS * HEADS + head).to(tl.int64) * KEY_DIM + dims, all_left, mask=told_of)
    faded = tl.exp(fading)
    asked = tl.dot(own_query * faded, tl.trans(keys), input_precision=PRECISION)
    known = tl.dot(own_key * faded, tl.trans(keys), input_precision=PRECISION)

    for other in range(PART):
        is_other = (own == other)[:, None]
        its_key = tl.sum(tl.where(is_other, own_key, 0.0), 0)[None, :]
        since = fading - tl.sum(tl.where(is_other, fading, 0.0), 0)[None, :]
        counted = its_key * tl.exp(tl.minimum(since, 0.0))
        column = (place == part * PART + other)[None, :]
        asked += tl.where(column & (own >= other)[:, None], tl.sum(own_query * counted, 1)[:, None], 0.0)
        known += tl.where(column & (own > other)[:, None], tl.sum(own_key * counted, 1)[:, None], 0.0)
    at = (begin + token).to(tl.int64) * HEADS + head
    known *= tl.load(rate + at, mask=real, other=0.0)[:, None]
    pairs = at[:, None] * ROWS + place[None, :]
    tl.store(among + pairs, asked.to(among.dtype.element_ty), mask=real[:, None])
    tl.store(alike + pairs, known, mask=real[:, None])


@JITFunction
def solve(
    rate, alike, solved, cu_seqlens_q, seq_lens, batch, fewest_queries,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``solved [t, h, j]``: ``[(1 + L)^-1]_ij b_j`` where ``alike`` is ``L``; grid (tiles x heads).

    As `delta_jit.solve` has it: the inverse is made of those of its diagonal blocks, twice as large each time.
    """
    head = tl.program_id(0) % HEADS
    sequence, number = find_chunk(cu_seqlens_q, batch, tl.program_id(0) // HEADS, CHUNK)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    first = number * CHUNK - start % CHUNK
    if (count < fewest_queries) | (first >= count):
        return
    place = tl.arange(0, ROWS)
    token = first + place
    real = (token >= 0) & (token < count) & (place < CHUNK)
    row = (begin + first).to(tl.int64) * HEADS + head  # of the first place, which may be no token
    at_pairs = (row + place * HEADS)[:, None] * ROWS + place[None, :]
    i, j = place[:, None], place[None, :]
    lower = tl.load(alike + at_pairs, mask=real[:, None] & (i > j), other=0.0)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        joins = (i // (2 << level) == j // (2 << level)) & (i // (1 << level) > j // (1 << level))
        joined = tl.dot(inverse, tl.where(joins, lower, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(joined, inverse, input_precision=PRECISION)
    rates = tl.load(rate + row + place * HEADS, mask=real, other=0.0)
    made = (inverse * rates[None, :]).to(solved.dtype.element_ty)
    tl.store(solved + at_pairs, made, mask=real[:, None])


@JITFunction
def carry(
    query, started, lasting, value, totals, among, solved, seen, projected, arena,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, groups, max_blocks, block_bytes, slot_bytes,
    fewest_queries,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROW: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    RECURRENT_AT: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A sequence's state through all of its chunks, for ``COLUMNS`` of a head's; grid (heads x pieces of their columns,
    sequences). ``seen [T, heads, VALUE_DIM]`` is what comes out, before its norm."""
    head, piece, sequence = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES, tl.program_id(1)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    if (count < fewest_queries) | (count < 1):
        return
    end = start + count
    table = table_of(block_tables, head_group, sequence, head, groups, max_blocks)
    source = source_of(table, start, end, BLOCK_SIZE)
    old = member_at(arena, source, head_slot, head, block_bytes, slot_bytes)

    place, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    columns = piece * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = dims < KEY_DIM, columns < VALUE_DIM
    read = (dims < tl.where(source >= 0, KEY_DIM, 0))[:, None] & in_value[None, :]
    within = RECURRENT_AT + dims[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(old + within, mask=read, other=0.0)
    tl.debug_barrier()
    each = place * HEADS
    at_keys = each[:, None] * KEY_DIM + dims[None, :]
    at_values = each[:, None] * VALUE_DIM + columns[None, :]
    at_pairs = each[:, None] * ROWS + place[None, :]
    for chunk in range(start // CHUNK, (end - 1) // CHUNK + 1):
        token = chunk * CHUNK - start + place
        real = (token >= 0) & (token < count) & (place < CHUNK)
        row = (begin + chunk * CHUNK - start).to(tl.int64) * HEADS + head  # of the first place, which may be no token
        in_keys, in_values = real[:, None] & in_key[None, :], real[:, None] & in_value[None, :]
        behind = tl.minimum((chunk + 1) * CHUNK, end)
        keys = tl.load(started + row * KEY_DIM + at_keys, mask=in_keys, other=0.0)
        known = product(keys, state, PRECISION)
        values = tl.load(value + row * VALUE_DIM + at_values, mask=in_values, other=0.0).to(tl.float32)
        system = tl.load(solved + row * ROWS + at_pairs, mask=real[:, None], other=0.0)
        corrections = product(system, values - known, PRECISION)
        queries = tl.load(query + row * KEY_DIM + at_keys, mask=in_keys, other=0.0)
        pairs = tl.load(among + row * ROWS + at_pairs, mask=real[:, None], other=0.0)
        out = product(queries, state, PRECISION) + product(pairs, corrections, PRECISION)
        tl.store(seen + row * VALUE_DIM + at_values, out, mask=in_values)

        tile = begin // CHUNK + 2 * sequence + chunk - start // CHUNK  # as `find_chunk` counts them
        left = tl.load(totals + (tile * HEADS + head).to(tl.int64) * KEY_DIM + dims, mask=in_key, other=0.0)
        keys = tl.load(lasting + row * KEY_DIM + at_keys, mask=in_keys, other=0.0)
        state = state * left[:, None] + product(tl.trans(keys), corrections, PRECISION)
        is_left = ((chunk + 1) * CHUNK % BLOCK_SIZE == 0) | (behind == end)
        block = tl.load(table + (behind - 1) // BLOCK_SIZE)
        new = member_at(arena, block, head_slot, head, block_bytes, slot_bytes)
        rows = tl.where(is_left & (block >= 0), KEY_DIM, 0)
        tl.store(new + within, state, mask=(dims < rows)[:, None] & in_value[None, :])

    if piece == 0:
        keep_ends(
            arena, table, head_slot, head, block_bytes, slot_bytes, old, tl.where(source >= 0, -NEVER, 0), projected,
            begin, start, end, HEADS, KEY_DIM, VALUE_DIM, ROW, WIDTH, CHANNELS, BLOCK_SIZE,
        )  # fmt: skip


@JITFunction
def finish(
    seen, gates, norm, out, tokens, eps,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gated norm of ``TOKENS`` tokens and one head; grid (tiles x heads)."""
    head = tl.program_id(0) % HEADS
    token = tl.program_id(0) // HEADS * TOKENS + tl.arange(0, TOKENS)[:, None]
    dims = tl.arange(0, BLOCK_V)[None, :]
    here = (token < tokens) & (dims < VALUE_DIM)
    at = (token.to(tl.int64) * HEADS + head) * VALUE_DIM + dims
    its_gates = tl.load(gates + at, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(norm + dims, mask=dims < VALUE_DIM, other=0.0)
    gated = gated_norm(tl.load(seen + at, mask=here, other=0.0), its_gates, weight, eps, VALUE_DIM)
    tl.store(out + at, gated.to(out.dtype.element_ty), mask=here)
