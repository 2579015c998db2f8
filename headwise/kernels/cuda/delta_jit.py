"""Gated delta-nets over states in the cache, in Triton: what `headwise.kernels.delta_base` says, by three ways.

**One token** (`step`): a program has one sequence's key head and the value heads that share it, and does all that the
layer does between its projections: convolution, lengths, gates, the rule, the norm. Each state is read once and written
once. States are tiles in registers, in which keys run over the warps and values over the lanes.

**Tokens that follow each other** (`walk`), each a sequence of one, as drafts make them: the same of each in turn, with
each state in registers through all of them; it is left behind those that are no guesses.

**Several tokens**: chunks of ``CHUNK`` tokens, which end where blocks do, in four launches. `convolve` makes queries,
keys, values, rates and decays of what was projected. `solve` has the products among a chunk's tokens, for all chunks
side by side: ``among [i, j]``, what token ``i`` sees of correction ``j``, and ``solved``, the inverse of the triangular
system that corrections solve, times the rates. `carry` goes through a sequence's chunks one after the other, for some
columns of a value head's state, and leaves states where blocks end. `finish` norms.

The inverse of ``1 + L`` is made of those of its diagonal blocks, twice as large each time: with ``X`` the inverse
within blocks and ``C`` what of ``L`` joins two of them, ``X - X C X`` is exact. No term grows as powers of ``L`` do.

A program reads what it will overwrite before a barrier, and writes behind it: small tiles lie in several warps alike.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

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
    softplus,
    source_of,
    span_of,
    table_of,
    window_of,
)

NORM_EPS = tl.constexpr(1e-6)
"""`headwise.kernels.delta_base.NORM_EPS`"""


@JITFunction
def decay_of(x, speed, bias):
    return -speed * softplus(x + bias)


@JITFunction
def gated_norm(seen, gates, weight, eps, VALUE_DIM: tl.constexpr):
    """RMS norm over the last axis of ``seen [M, N]``, of which ``VALUE_DIM`` are not 0, times SiLU of the gates."""
    variance = tl.sum(seen * seen, 1) / VALUE_DIM
    return weight * (seen / tl.sqrt(variance + eps)[:, None]) * (gates * sigmoid(gates))


@JITFunction
def controls_of(controls, speed, bias, head, shared, SHARE: tl.constexpr):
    """The rate of one of a key head's value heads, and how much of its state is kept; ``controls``: of a token."""
    controls += head * (2 * SHARE) + shared
    rate = sigmoid(tl.load(controls).to(tl.float32))
    its_speed, its_bias = tl.load(speed + head * SHARE + shared), tl.load(bias + head * SHARE + shared)
    return rate, tl.exp(decay_of(tl.load(controls + SHARE).to(tl.float32), its_speed, its_bias))


@JITFunction
def tell(out, seen, gates, norm, dims, eps, VALUE_DIM: tl.constexpr):
    """What comes of a token and value head that has ``seen [N]``."""
    here = (dims < VALUE_DIM)[None, :]
    its_gates = tl.load(gates + dims[None, :], mask=here, other=0.0).to(tl.float32)
    weight = tl.load(norm + dims, mask=dims < VALUE_DIM, other=0.0)[None, :]
    gated = gated_norm(seen[None, :], its_gates, weight, eps, VALUE_DIM)
    tl.store(out + dims[None, :], gated.to(out.dtype.element_ty), mask=here)


@JITFunction
def step(
    projected, out, arena, convolution, speed, bias, norm,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, groups, max_blocks, block_bytes, slot_bytes, eps,
    KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, EACH: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, RECURRENT_AT: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """One token of one sequence and key head, for sequences with exactly one; grid (sequences x key heads)."""
    sequence, head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
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
    rows = tl.where(source >= 0, KEY_DIM, 0)
    written = (key_dims < tl.where(target >= 0, KEY_DIM, 0))[:, None] & in_value[None, :]
    # States are asked for long before they are needed.
    coming = tl.load(old + within, mask=(key_dims < rows)[:, None] & in_value[None, :], other=0.0)

    inputs = projected + head * EACH
    weights = convolution + head * (WIDTH * CHANNELS)
    known, kept_to = tl.where(source >= 0, CHANNELS, 0), tl.where(target >= 0, CHANNELS, 0)
    of_query, of_key, here = key_dims[None, :], KEY_DIM + key_dims[None, :], in_key[None, :]
    query_window = window_of(inputs, old, begin, known, of_query, here, ROW, WIDTH, CHANNELS)
    key_window = window_of(inputs, old, begin, known, of_key, here, ROW, WIDTH, CHANNELS)
    query = tl.sum(convolved_window(query_window, weights, None, of_query, here, WIDTH, CHANNELS), 0)
    key = tl.sum(convolved_window(key_window, weights, None, of_key, here, WIDTH, CHANNELS), 0)
    tl.debug_barrier()
    keep_window(new, query_window, kept_to, of_query, here, WIDTH, CHANNELS)
    keep_window(new, key_window, kept_to, of_key, here, WIDTH, CHANNELS)
    query *= QUERY_SCALE / tl.sqrt(tl.sum(query * query, 0) + NORM_EPS)
    key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + NORM_EPS)
    agreement = tl.sum(query * key, 0)

    row = projected + begin.to(tl.int64) * ROW
    for shared in range(SHARE):
        state, at = coming, within + shared * (KEY_DIM * VALUE_DIM)
        more = (key_dims < tl.where(shared + 1 < SHARE, rows, 0))[:, None] & in_value[None, :]
        coming = tl.load(old + at + KEY_DIM * VALUE_DIM, mask=more, other=0.0)
        of_value = 2 * KEY_DIM + shared * VALUE_DIM + value_dims[None, :]
        window = window_of(inputs, old, begin, known, of_value, in_value[None, :], ROW, WIDTH, CHANNELS)
        value = tl.sum(convolved_window(window, weights, None, of_value, in_value[None, :], WIDTH, CHANNELS), 0)
        rate, kept = controls_of(row + KEY_HEADS * EACH, speed, bias, head, shared, SHARE)

        state *= kept
        correction = rate * (value - tl.sum(key[:, None] * state, 0))
        seen = tl.sum(query[:, None] * state, 0) + agreement * correction
        tl.debug_barrier()
        tl.store(new + at, state + key[:, None] * correction[None, :], mask=written)
        keep_window(new, window, kept_to, of_value, in_value[None, :], WIDTH, CHANNELS)

        gates = row + head * EACH + CHANNELS + shared * VALUE_DIM
        at_out = (begin.to(tl.int64) * KEY_HEADS + head) * (SHARE * VALUE_DIM) + shared * VALUE_DIM
        tell(out + at_out, seen, gates, norm, value_dims, eps, VALUE_DIM)


@JITFunction
def query_and_key(
    inputs, weights, old, earliest, token, begin, dims,
    KEY_DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """Those of the ``token``-th row from ``begin`` on, ``[K]``."""
    channel, here = dims[None, :], (dims < KEY_DIM)[None, :]
    query = convolved_row(inputs, weights, None, old, earliest, token, begin, channel, here, ROW, WIDTH, CHANNELS)
    key = convolved_row(
        inputs, weights, None, old, earliest, token, begin, KEY_DIM + channel, here, ROW, WIDTH, CHANNELS
    )
    query, key = tl.sum(query, 0), tl.sum(key, 0)
    query *= QUERY_SCALE / tl.sqrt(tl.sum(query * query, 0) + NORM_EPS)
    key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + NORM_EPS)
    return query, key


@JITFunction
def walk(
    projected, out, arena, convolution, speed, bias, norm, follows,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, batch, groups, max_blocks, block_bytes, slot_bytes,
    eps,
    KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, EACH: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, RECURRENT_AT: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """As `step`, where sequences may follow others: a program takes those that follow its own on, too, with each state
    in turn; that of one that follows has nothing to do."""
    sequence, head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
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
    in_value = (value_dims < VALUE_DIM)[None, :]
    within = RECURRENT_AT + key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    rows = tl.where(source >= 0, KEY_DIM, 0)
    coming = tl.load(old + within, mask=(key_dims < rows)[:, None] & in_value, other=0.0)

    inputs = projected + head * EACH
    weights = convolution + head * (WIDTH * CHANNELS)
    first_query, first_key = query_and_key(
        inputs, weights, old, earliest, 0, begin, key_dims, KEY_DIM, ROW, WIDTH, CHANNELS, QUERY_SCALE
    )
    for shared in range(SHARE):
        state, at = coming, within + shared * (KEY_DIM * VALUE_DIM)
        more = (key_dims < tl.where(shared + 1 < SHARE, rows, 0))[:, None] & in_value
        coming = tl.load(old + at + KEY_DIM * VALUE_DIM, mask=more, other=0.0)
        of_value = 2 * KEY_DIM + shared * VALUE_DIM + value_dims[None, :]
        query, key = first_query, first_key
        for token in range(tokens):
            if token > 0:
                query, key = query_and_key(
                    inputs, weights, old, earliest, token, begin, key_dims, KEY_DIM, ROW, WIDTH, CHANNELS, QUERY_SCALE
                )
            value = tl.sum(
                convolved_row(
                    inputs, weights, None, old, earliest, token, begin, of_value, in_value, ROW, WIDTH, CHANNELS
                ), 0,
            )  # fmt: skip
            row = (begin + token).to(tl.int64)
            controls = projected + row * ROW + KEY_HEADS * EACH
            rate, kept = controls_of(controls, speed, bias, head, shared, SHARE)

            state *= kept
            correction = rate * (value - tl.sum(key[:, None] * state, 0))
            seen = tl.sum(query[:, None] * state, 0) + tl.sum(query * key, 0) * correction
            state += key[:, None] * correction[None, :]
            target = left_at(table, start, token, known, BLOCK_SIZE)
            new = member_at(arena, target, head_slot, head, block_bytes, slot_bytes)
            written = (key_dims < tl.where(target >= 0, KEY_DIM, 0))[:, None] & in_value
            tl.debug_barrier()
            tl.store(new + at, state, mask=written)
            gates = inputs + row * ROW + CHANNELS + shared * VALUE_DIM
            at_out = (row * KEY_HEADS + head) * (SHARE * VALUE_DIM) + shared * VALUE_DIM
            tell(out + at_out, seen, gates, norm, value_dims, eps, VALUE_DIM)
    tl.debug_barrier()
    keep_ends(
        arena, table, head_slot, head, block_bytes, slot_bytes, old, earliest, inputs, begin, start, start + known,
        ROW, WIDTH, CHANNELS, BLOCK_SIZE,
    )  # fmt: skip


@JITFunction
def keep_ends(
    arena, table, head_slot, head, block_bytes, slot_bytes, old, earliest, inputs, begin, start, end,
    ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The last inputs of a key head, behind all that a sequence leaves states behind from ``start`` to ``end``."""
    # The last column first: the first one's block may be what was read, which others still need.
    final = (end - 1) // BLOCK_SIZE
    for back in range(final - start // BLOCK_SIZE + 1):
        block = tl.load(table + final - back)
        new = member_at(arena, block, head_slot, head, block_bytes, slot_bytes)
        taken = tl.minimum((final - back + 1) * BLOCK_SIZE, end) - start
        if block >= 0:
            keep_inputs(new, old, earliest, inputs, begin, taken, 0, CHANNELS, ROW, WIDTH, CHANNELS)


@JITFunction
def convolve(
    projected, query, key, value, rate, decay, arena, convolution, speed, bias,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, batch, groups, max_blocks, block_bytes, slot_bytes,
    fewest_queries,
    KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, EACH: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VALUE_HEADS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
    TOKENS: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """What the rule takes, of ``TOKENS`` tokens and one key head; grid (tiles x key heads).

    ``query``, ``key [T, key_heads, KEY_DIM]`` and ``value [T, value_heads, VALUE_DIM]`` in the model's dtype, ``rate``
    and ``decay [T, value_heads]``.
    """
    head = tl.program_id(0) % KEY_HEADS
    sequence, number = find_chunk(cu_seqlens_q, batch, tl.program_id(0) // KEY_HEADS, TOKENS)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    first = number * TOKENS - start % TOKENS
    if (count < fewest_queries) | (first >= count):
        return
    table = table_of(block_tables, head_group, sequence, head, groups, max_blocks)
    source = source_of(table, start, start + count, BLOCK_SIZE)
    old = member_at(arena, source, head_slot, head, block_bytes, slot_bytes)
    earliest = tl.where(source >= 0, -NEVER, 0)

    inputs = projected + head * EACH
    weights = convolution + head * (WIDTH * CHANNELS)
    token = (first + tl.arange(0, TOKENS))[:, None]
    real = (token >= 0) & (token < count)
    key_dims, value_dims = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    here = real & (key_dims < KEY_DIM)
    at = ((begin + token).to(tl.int64) * KEY_HEADS + head) * KEY_DIM + key_dims
    made = convolved(inputs, weights, None, old, earliest, token, begin, key_dims, here, ROW, WIDTH, CHANNELS)
    made *= (QUERY_SCALE / tl.sqrt(tl.sum(made * made, 1) + NORM_EPS))[:, None]
    tl.store(query + at, made.to(query.dtype.element_ty), mask=here)
    made = convolved(inputs, weights, None, old, earliest, token, begin, KEY_DIM + key_dims, here, ROW, WIDTH, CHANNELS)
    made *= (1.0 / tl.sqrt(tl.sum(made * made, 1) + NORM_EPS))[:, None]
    tl.store(key + at, made.to(key.dtype.element_ty), mask=here)

    value_head = (begin + token).to(tl.int64) * VALUE_HEADS + head * SHARE
    here = real & (value_dims < VALUE_DIM)
    for shared in range(SHARE):
        channel = 2 * KEY_DIM + shared * VALUE_DIM + value_dims
        its_value = convolved(inputs, weights, None, old, earliest, token, begin, channel, here, ROW, WIDTH, CHANNELS)
        at_value = (value_head + shared) * VALUE_DIM + value_dims
        tl.store(value + at_value, its_value.to(value.dtype.element_ty), mask=here)

    shares = tl.arange(0, BLOCK_S)[None, :]
    here = real & (shares < SHARE)
    controls = projected + (begin + token).to(tl.int64) * ROW + KEY_HEADS * EACH + head * (2 * SHARE) + shares
    tl.store(rate + value_head + shares, sigmoid(tl.load(controls, mask=here, other=0.0).to(tl.float32)), mask=here)
    its_speed = tl.load(speed + head * SHARE + shares, mask=shares < SHARE, other=0.0)
    its_bias = tl.load(bias + head * SHARE + shares, mask=shares < SHARE, other=0.0)
    decays = decay_of(tl.load(controls + SHARE, mask=here, other=0.0).to(tl.float32), its_speed, its_bias)
    tl.store(decay + value_head + shares, decays, mask=here)


@JITFunction
def solve(
    query, key, rate, decay, among, solved, cu_seqlens_q, seq_lens, batch, fewest_queries,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products among a chunk's tokens, for one value head; grid (tiles x value heads).

    Of token ``t``, at place ``i`` of its chunk: ``among [t, h, j]`` is ``exp(G_i - G_j) q_i . k_j``, and ``solved [t,
    h, j]`` is ``[(1 + L)^-1]_ij b_j`` with ``L_ij = b_i exp(G_i - G_j) k_i . k_j`` where ``j < i``. ``decay`` becomes
    ``G``, its sum within the chunk. ``1 << LEVELS`` is ``ROWS``, and at least ``CHUNK``.
    """
    value_head = tl.program_id(0) % VALUE_HEADS
    sequence, number = find_chunk(cu_seqlens_q, batch, tl.program_id(0) // VALUE_HEADS, CHUNK)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    first = number * CHUNK - start % CHUNK
    if (count < fewest_queries) | (first >= count):
        return
    place, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    token = first + place
    real = (token >= 0) & (token < count) & (place < CHUNK)
    row = (begin + first).to(tl.int64)  # of the first place, which may be no token
    of_key = row * (KEY_HEADS * KEY_DIM) + value_head // SHARE * KEY_DIM
    of_value = row * VALUE_HEADS + value_head
    at_keys = place[:, None] * (KEY_HEADS * KEY_DIM) + dims[None, :]
    at_values = place * VALUE_HEADS
    at_pairs = at_values[:, None] * ROWS + place[None, :]
    rate += of_value
    decay += of_value
    i, j = place[:, None], place[None, :]
    rates = tl.load(rate + at_values, mask=real, other=0.0)
    sums = tl.cumsum(tl.load(decay + at_values, mask=real, other=0.0), 0)
    tl.debug_barrier()
    tl.store(decay + at_values, sums, mask=real)
    faded = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], float("-inf")))

    here = real[:, None] & (dims < KEY_DIM)[None, :]
    keys = tl.load(key + of_key + at_keys, mask=here, other=0.0)
    queries = tl.load(query + of_key + at_keys, mask=here, other=0.0)
    asked = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    tl.store(among + of_value * ROWS + at_pairs, (faded * asked).to(among.dtype.element_ty), mask=real[:, None])
    alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    lower = tl.where(i > j, rates[:, None] * faded * alike, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        joins = (i // (2 << level) == j // (2 << level)) & (i // (1 << level) > j // (1 << level))
        joined = tl.dot(inverse, tl.where(joins, lower, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(joined, inverse, input_precision=PRECISION)
    made = (inverse * rates[None, :]).to(solved.dtype.element_ty)
    tl.store(solved + of_value * ROWS + at_pairs, made, mask=real[:, None])


@JITFunction
def carry(
    query, key, value, sums, among, solved, seen, projected, arena,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, groups, max_blocks, block_bytes, slot_bytes,
    fewest_queries,
    KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, EACH: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VALUE_HEADS: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    RECURRENT_AT: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A sequence's state through all of its chunks, for ``COLUMNS`` of a value head's; grid (value heads x pieces of
    their columns, sequences). ``seen [T, value_heads, VALUE_DIM]`` is what comes out, before its norm."""
    value_head, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    head, sequence = value_head // SHARE, tl.program_id(1)
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
    within = RECURRENT_AT + value_head % SHARE * (KEY_DIM * VALUE_DIM) + dims[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(old + within, mask=read, other=0.0)
    tl.debug_barrier()
    each = place * VALUE_HEADS
    at_keys = place[:, None] * (KEY_HEADS * KEY_DIM) + dims[None, :]
    at_values = each[:, None] * VALUE_DIM + columns[None, :]
    at_pairs = each[:, None] * ROWS + place[None, :]
    for chunk in range(start // CHUNK, (end - 1) // CHUNK + 1):
        token = chunk * CHUNK - start + place
        real = (token >= 0) & (token < count) & (place < CHUNK)
        row = (begin + chunk * CHUNK - start).to(tl.int64)  # of the first place, which may be no token
        of_key = row * (KEY_HEADS * KEY_DIM) + head * KEY_DIM
        of_value = row * VALUE_HEADS + value_head
        in_keys, in_values = real[:, None] & in_key[None, :], real[:, None] & in_value[None, :]
        fading = tl.load(sums + of_value + each, mask=real, other=0.0)
        behind = tl.minimum((chunk + 1) * CHUNK, end)
        last = tl.load(sums + (begin + behind - start - 1).to(tl.int64) * VALUE_HEADS + value_head)

        keys = tl.load(key + of_key + at_keys, mask=in_keys, other=0.0)
        known = product(keys, state, PRECISION)
        values = tl.load(value + of_value * VALUE_DIM + at_values, mask=in_values, other=0.0).to(tl.float32)
        system = tl.load(solved + of_value * ROWS + at_pairs, mask=real[:, None], other=0.0)
        corrections = product(system, values - tl.exp(fading)[:, None] * known, PRECISION)
        queries = tl.load(query + of_key + at_keys, mask=in_keys, other=0.0)
        pairs = tl.load(among + of_value * ROWS + at_pairs, mask=real[:, None], other=0.0)
        out = tl.exp(fading)[:, None] * product(queries, state, PRECISION) + product(pairs, corrections, PRECISION)
        tl.store(seen + of_value * VALUE_DIM + at_values, out, mask=in_values)

        faded = corrections * tl.exp(tl.where(real, last - fading, 0.0))[:, None]
        state = state * tl.exp(last) + product(tl.trans(keys), faded, PRECISION)
        is_left = ((chunk + 1) * CHUNK % BLOCK_SIZE == 0) | (behind == end)
        block = tl.load(table + (behind - 1) // BLOCK_SIZE)
        new = member_at(arena, block, head_slot, head, block_bytes, slot_bytes)
        rows = tl.where(is_left & (block >= 0), KEY_DIM, 0)
        tl.store(new + within, state, mask=(dims < rows)[:, None] & in_value[None, :])

    if (piece == 0) & (value_head % SHARE == 0):
        keep_ends(
            arena, table, head_slot, head, block_bytes, slot_bytes, old, tl.where(source >= 0, -NEVER, 0),
            projected + head * EACH, begin, start, end, ROW, WIDTH, CHANNELS, BLOCK_SIZE,
        )  # fmt: skip


@JITFunction
def finish(
    seen, projected, norm, out, tokens, eps,
    SHARE: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    EACH: tl.constexpr, ROW: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gated norm of ``TOKENS`` tokens and one value head; grid (tiles x value heads)."""
    value_head = tl.program_id(0) % VALUE_HEADS
    token = tl.program_id(0) // VALUE_HEADS * TOKENS + tl.arange(0, TOKENS)[:, None]
    dims = tl.arange(0, BLOCK_V)[None, :]
    here = (token < tokens) & (dims < VALUE_DIM)
    at = (token.to(tl.int64) * VALUE_HEADS + value_head) * VALUE_DIM + dims
    behind = value_head // SHARE * EACH + CHANNELS + value_head % SHARE * VALUE_DIM
    gates = tl.load(projected + token.to(tl.int64) * ROW + behind + dims, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(norm + dims, mask=dims < VALUE_DIM, other=0.0)
    gated = gated_norm(tl.load(seen + at, mask=here, other=0.0), gates, weight, eps, VALUE_DIM)
    tl.store(out + at, gated.to(out.dtype.element_ty), mask=here)
