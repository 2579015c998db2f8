"""State space models over states in the cache, in Triton: what `headwise.kernels.ssm_base` says, by three ways.

**One token** (`step`): a program has one sequence's member and does all that the layer does between its projections:
convolution, steps, the rule, the gate. All of a member's heads are columns of one wide state, of which ``COLUMNS`` are
a tile in registers at a time, in which keys run over the warps and columns over the lanes: of small heads several. Each
state is read once and written once.

**Tokens that follow each other** (`walk`), each a sequence of one, as drafts make them: the same of each in turn, with
each tile in registers through all of them; it is left behind those that are no guesses.

**Several tokens**: chunks of ``CHUNK`` tokens, which end where blocks do, in three launches. `convolve` makes queries,
keys, values, steps and decays of what was projected. `relate` has the products among a chunk's tokens, for all chunks
side by side: ``among [i, j]``, what token ``i`` sees of token ``j``'s value, and of each token how much it sees of the
state before its chunk and how much of it is left behind the chunk; and keeps inputs of the convolution where blocks
end, for none is read any more. `carry` goes through a sequence's chunks one after the other, for some columns of a
head's state, leaves states where blocks end, and writes what comes out.
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


@JITFunction
def inputs_of(
    projected, group, member, GROUPS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Where in a row the inputs of a member's convolution are, from the number of a channel on: of the channels of
    queries and keys, and of those of values."""
    of_group = projected + tl.load(group + member) * (2 * KEY_DIM)
    return of_group, projected + (GROUPS - 1) * 2 * KEY_DIM + member * (2 * SHARE * VALUE_DIM)


@JITFunction
def places_of(key, column, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RECURRENT_AT: tl.constexpr):
    """Where a member's state has the number of a key, ``[K, 1]``, in one of all heads' columns, ``[1, N]``."""
    head, value = column // VALUE_DIM, column % VALUE_DIM
    return RECURRENT_AT + head * (KEY_DIM * VALUE_DIM) + key * VALUE_DIM + value


@JITFunction
def steps_of(told, speed, bias, head, here):
    """How long the steps of columns are, whose numbers of that are ``told``, and how much is kept of their states."""
    its_step = softplus(tl.load(told, mask=here, other=0.0).to(tl.float32) + tl.load(bias + head, mask=here, other=0.0))
    return its_step, tl.exp(-tl.load(speed + head, mask=here, other=0.0) * its_step)


@JITFunction
def tell(out, seen, gates, column, here):
    """What comes of a token and columns that have ``seen [1, N]``."""
    its_gates = tl.load(gates + column, mask=here, other=0.0).to(tl.float32)
    made = seen * (its_gates * sigmoid(its_gates))
    tl.store(out + column, made.to(out.dtype.element_ty), mask=here)


@JITFunction
def step(
    projected, out, arena, convolution, convolution_bias, speed, bias, skip, group,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, groups, max_blocks, block_bytes, slot_bytes,
    MEMBERS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr, RECURRENT_AT: tl.constexpr,
):  # fmt: skip
    """One token of one sequence and member, for sequences with exactly one; grid (sequences x members)."""
    sequence, member = tl.program_id(0) // MEMBERS, tl.program_id(0) % MEMBERS
    table = table_of(block_tables, head_group, sequence, member, groups, max_blocks)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    if count != 1:
        return
    source = source_of(table, start, start + 1, BLOCK_SIZE)
    target = tl.load(table + start // BLOCK_SIZE)
    old = member_at(arena, source, head_slot, member, block_bytes, slot_bytes)
    new = member_at(arena, target, head_slot, member, block_bytes, slot_bytes)

    key_dim, columns = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, COLUMNS)[None, :]
    key_row, values = tl.arange(0, BLOCK_K)[:, None], SHARE * VALUE_DIM
    # Rows that are there, of what is read and written: none, where there is no block.
    readable, writable = key_row < tl.where(source >= 0, KEY_DIM, 0), key_row < tl.where(target >= 0, KEY_DIM, 0)
    # States are asked for long before they are needed.
    at = places_of(key_row, columns, KEY_DIM, VALUE_DIM, RECURRENT_AT)
    coming = tl.load(old + at, mask=readable & (columns < values), other=0.0)

    of_group, of_member = inputs_of(projected, group, member, GROUPS, SHARE, KEY_DIM, VALUE_DIM)
    weights, biases = convolution + member * (WIDTH * CHANNELS), convolution_bias + member * CHANNELS
    known, kept_to = tl.where(source >= 0, CHANNELS, 0), tl.where(target >= 0, CHANNELS, 0)
    in_key = key_dim < KEY_DIM
    of_query = window_of(of_group, old, begin, known, key_dim, in_key, ROW, WIDTH, CHANNELS)
    of_key = window_of(of_group, old, begin, known, KEY_DIM + key_dim, in_key, ROW, WIDTH, CHANNELS)
    query = convolved_window(of_query, weights, biases, key_dim, in_key, WIDTH, CHANNELS)
    key = convolved_window(of_key, weights, biases, KEY_DIM + key_dim, in_key, WIDTH, CHANNELS)
    query, key = tl.sum(query, 0)[:, None], tl.sum(key, 0)[:, None]
    tl.debug_barrier()
    keep_window(new, of_query, kept_to, key_dim, in_key, WIDTH, CHANNELS)
    keep_window(new, of_key, kept_to, KEY_DIM + key_dim, in_key, WIDTH, CHANNELS)

    row = projected + begin.to(tl.int64) * ROW
    told = row + GROUPS * 2 * KEY_DIM + MEMBERS * 2 * values + member * SHARE
    for first in range(0, values, COLUMNS):
        state, column, after = coming, first + columns, first + COLUMNS + columns
        here, head = column < values, column // VALUE_DIM
        at_next = places_of(key_row, after, KEY_DIM, VALUE_DIM, RECURRENT_AT)
        coming = tl.load(old + at_next, mask=readable & (after < values), other=0.0)

        channel = 2 * KEY_DIM + column
        window = window_of(of_member, old, begin, known, channel, here, ROW, WIDTH, CHANNELS)
        value = convolved_window(window, weights, biases, channel, here, WIDTH, CHANNELS)
        of_head = member * SHARE + head
        its_step, kept = steps_of(told + head, speed, bias, of_head, here)
        state = state * kept + key * (its_step * value)
        seen = tl.sum(query * state, 0)[None, :] + tl.load(skip + of_head, mask=here, other=0.0) * value
        gates = row + GROUPS * 2 * KEY_DIM + (2 * member + 1) * values
        at_out = (begin.to(tl.int64) * MEMBERS + member) * values
        tell(out + at_out, seen, gates, column, here)
        tl.debug_barrier()
        place = places_of(key_row, column, KEY_DIM, VALUE_DIM, RECURRENT_AT)
        tl.store(new + place, state, mask=writable & here)
        keep_window(new, window, kept_to, channel, here, WIDTH, CHANNELS)


@JITFunction
def query_and_key(
    of_group, weights, biases, old, earliest, token, begin, dims,
    KEY_DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Those of the ``token``-th row from ``begin`` on, ``[K, 1]``; ``dims [1, K]``."""
    here, of_key = dims < KEY_DIM, KEY_DIM + dims
    query = convolved_row(of_group, weights, biases, old, earliest, token, begin, dims, here, ROW, WIDTH, CHANNELS)
    key = convolved_row(of_group, weights, biases, old, earliest, token, begin, of_key, here, ROW, WIDTH, CHANNELS)
    return tl.sum(query, 0)[:, None], tl.sum(key, 0)[:, None]


@JITFunction
def walk(
    projected, out, arena, convolution, convolution_bias, speed, bias, skip, group, follows,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, batch, groups, max_blocks, block_bytes, slot_bytes,
    MEMBERS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr, RECURRENT_AT: tl.constexpr,
):  # fmt: skip
    """As `step`, where sequences may follow others: a program takes those that follow its own on, too, with each tile
    in turn; that of one that follows has nothing to do."""
    sequence, member = tl.program_id(0) // MEMBERS, tl.program_id(0) % MEMBERS
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    if (count != 1) | (tl.load(follows + sequence) != 0):
        return
    tokens, known = run_of(follows, sequence, batch)
    # The last one's, which has all columns; with their own, sequences have those that they reach.
    table = table_of(block_tables, head_group, sequence + known - 1, member, groups, max_blocks)
    source = source_of(table, start, start + known, BLOCK_SIZE)
    old = member_at(arena, source, head_slot, member, block_bytes, slot_bytes)
    earliest = tl.where(source >= 0, -NEVER, 0)

    key_dim, columns = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, COLUMNS)[None, :]
    key_row, values = tl.arange(0, BLOCK_K)[:, None], SHARE * VALUE_DIM
    readable = key_row < tl.where(source >= 0, KEY_DIM, 0)
    at = places_of(key_row, columns, KEY_DIM, VALUE_DIM, RECURRENT_AT)
    coming = tl.load(old + at, mask=readable & (columns < values), other=0.0)

    of_group, of_member = inputs_of(projected, group, member, GROUPS, SHARE, KEY_DIM, VALUE_DIM)
    weights, biases = convolution + member * (WIDTH * CHANNELS), convolution_bias + member * CHANNELS
    first_query, first_key = query_and_key(
        of_group, weights, biases, old, earliest, 0, begin, key_dim, KEY_DIM, ROW, WIDTH, CHANNELS
    )
    told = projected + GROUPS * 2 * KEY_DIM + MEMBERS * 2 * values + member * SHARE
    gates = projected + GROUPS * 2 * KEY_DIM + (2 * member + 1) * values
    for first in range(0, values, COLUMNS):
        state, column, after = coming, first + columns, first + COLUMNS + columns
        here, head, channel = column < values, column // VALUE_DIM, 2 * KEY_DIM + column
        at_next = places_of(key_row, after, KEY_DIM, VALUE_DIM, RECURRENT_AT)
        coming = tl.load(old + at_next, mask=readable & (after < values), other=0.0)
        place, of_head = places_of(key_row, column, KEY_DIM, VALUE_DIM, RECURRENT_AT), member * SHARE + head
        query, key = first_query, first_key
        for token in range(tokens):
            if token > 0:
                query, key = query_and_key(
                    of_group, weights, biases, old, earliest, token, begin, key_dim, KEY_DIM, ROW, WIDTH, CHANNELS
                )
            value = convolved_row(
                of_member, weights, biases, old, earliest, token, begin, channel, here, ROW, WIDTH, CHANNELS
            )
            row = (begin + token).to(tl.int64)
            its_step, kept = steps_of(told + row * ROW + head, speed, bias, of_head, here)
            state = state * kept + key * (its_step * value)
            seen = tl.sum(query * state, 0)[None, :] + tl.load(skip + of_head, mask=here, other=0.0) * value
            tell(out + (row * MEMBERS + member) * values, seen, gates + row * ROW, column, here)
            target = left_at(table, start, token, known, BLOCK_SIZE)
            new = member_at(arena, target, head_slot, member, block_bytes, slot_bytes)
            tl.debug_barrier()
            tl.store(new + place, state, mask=(key_row < tl.where(target >= 0, KEY_DIM, 0)) & here)
    tl.debug_barrier()
    # The last column first: the first one's block may be what was read, which others still need.
    end = start + known
    final = (end - 1) // BLOCK_SIZE
    for back in range(final - start // BLOCK_SIZE + 1):
        block = tl.load(table + final - back)
        new = member_at(arena, block, head_slot, member, block_bytes, slot_bytes)
        taken = tl.minimum((final - back + 1) * BLOCK_SIZE, end) - start
        if block >= 0:
            keep_member(new, old, earliest, of_group, of_member, begin, taken, KEY_DIM, ROW, WIDTH, CHANNELS)


@JITFunction
def convolve(
    projected, query, key, value, rate, decay, arena, convolution, convolution_bias, speed, bias, group,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, batch, groups, max_blocks, block_bytes, slot_bytes,
    fewest_queries,
    MEMBERS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr, CONVOLVED_COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What the rule takes, of ``TOKENS`` tokens and one member; grid (tiles x members).

    ``query``, ``key [T, members, KEY_DIM]`` and ``value [T, members, SHARE * VALUE_DIM]`` in the model's dtype, and
    ``rate``, which is the step, and ``decay [T, members, SHARE]``.
    """
    member = tl.program_id(0) % MEMBERS
    sequence, number = find_chunk(cu_seqlens_q, batch, tl.program_id(0) // MEMBERS, TOKENS)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    first = number * TOKENS - start % TOKENS
    if (count < fewest_queries) | (first >= count):
        return
    table = table_of(block_tables, head_group, sequence, member, groups, max_blocks)
    source = source_of(table, start, start + count, BLOCK_SIZE)
    old = member_at(arena, source, head_slot, member, block_bytes, slot_bytes)
    earliest = tl.where(source >= 0, -NEVER, 0)

    of_group, of_member = inputs_of(projected, group, member, GROUPS, SHARE, KEY_DIM, VALUE_DIM)
    weights, biases = convolution + member * (WIDTH * CHANNELS), convolution_bias + member * CHANNELS
    token = (first + tl.arange(0, TOKENS))[:, None]
    real = (token >= 0) & (token < count)
    rows = (begin + token).to(tl.int64) * MEMBERS + member
    key_dims = tl.arange(0, BLOCK_K)[None, :]
    here = real & (key_dims < KEY_DIM)
    made = convolved(
        of_group, weights, biases, old, earliest, token, begin, key_dims, here, ROW, WIDTH, CHANNELS
    )  # fmt: skip
    tl.store(query + rows * KEY_DIM + key_dims, made.to(query.dtype.element_ty), mask=here)
    made = convolved(
        of_group, weights, biases, old, earliest, token, begin, KEY_DIM + key_dims, here, ROW, WIDTH, CHANNELS
    )  # fmt: skip
    tl.store(key + rows * KEY_DIM + key_dims, made.to(key.dtype.element_ty), mask=here)

    values = SHARE * VALUE_DIM
    for left in range(0, values, CONVOLVED_COLUMNS):
        column = left + tl.arange(0, CONVOLVED_COLUMNS)[None, :]
        in_values = real & (column < values)
        its_values = convolved(
            of_member, weights, biases, old, earliest, token, begin, 2 * KEY_DIM + column, in_values,
            ROW, WIDTH, CHANNELS,
        )  # fmt: skip
        tl.store(value + rows * values + column, its_values.to(value.dtype.element_ty), mask=in_values)

    shares = tl.arange(0, BLOCK_S)[None, :]
    here = real & (shares < SHARE)
    told = projected + (begin + token).to(tl.int64) * ROW + (GROUPS * 2 * KEY_DIM + MEMBERS * 2 * values)
    told = tl.load(told + member * SHARE + shares, mask=here, other=0.0).to(tl.float32)
    its_speed = tl.load(speed + member * SHARE + shares, mask=shares < SHARE, other=0.0)
    steps = softplus(told + tl.load(bias + member * SHARE + shares, mask=shares < SHARE, other=0.0))
    tl.store(rate + rows * SHARE + shares, steps, mask=here)
    tl.store(decay + rows * SHARE + shares, -its_speed * steps, mask=here)


@JITFunction
def keep_member(
    new, old, earliest, of_group, of_member, begin, taken,
    KEY_DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`keep_inputs` of all channels of a member."""
    keep_inputs(new, old, earliest, of_group, begin, taken, 0, 2 * KEY_DIM, ROW, WIDTH, CHANNELS)
    keep_inputs(new, old, earliest, of_member, begin, taken, 2 * KEY_DIM, CHANNELS, ROW, WIDTH, CHANNELS)


@JITFunction
def relate(
    query, key, rate, decay, among, projected, arena, group,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, batch, groups, max_blocks, block_bytes, slot_bytes,
    fewest_queries,
    MEMBERS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products among a chunk's tokens, for one member; grid (tiles x members).

    Of token ``t``, at place ``i`` of its chunk, and head ``h``: ``among [t, h, j]`` is ``exp(G_i - G_j) (q_i . k_j)
    d_j`` where ``j <= i``, and else 0. ``decay`` becomes ``exp(G_i)``, and ``rate`` ``exp(G_C - G_i) d_i``. Where a
    block ends with the chunk, or the sequence does, the last inputs of the convolution are kept.
    """
    member = tl.program_id(0) % MEMBERS
    sequence, number = find_chunk(cu_seqlens_q, batch, tl.program_id(0) // MEMBERS, CHUNK)
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    first = number * CHUNK - start % CHUNK
    if (count < fewest_queries) | (first >= count):
        return
    place, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    token = first + place
    real = (token >= 0) & (token < count) & (place < CHUNK)
    row = (begin + first).to(tl.int64) * MEMBERS + member  # of the first place, which may be no token
    at_keys = row * KEY_DIM + place[:, None] * (MEMBERS * KEY_DIM) + dims[None, :]
    here = real[:, None] & (dims < KEY_DIM)[None, :]
    keys = tl.load(key + at_keys, mask=here, other=0.0)
    queries = tl.load(query + at_keys, mask=here, other=0.0)
    asked = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)

    at_heads = place * (MEMBERS * SHARE)
    at_pairs = at_heads[:, None] * ROWS + place[None, :]
    up_to = place[:, None] >= place[None, :]
    for shared in range(SHARE):
        head = row * SHARE + shared
        steps = tl.load(rate + head + at_heads, mask=real, other=0.0)
        decays = tl.load(decay + head + at_heads, mask=real, other=0.0)
        sums, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        faded = tl.exp(tl.where(up_to, sums[:, None] - sums[None, :], float("-inf")))
        pairs = faded * asked * steps[None, :]
        tl.store(among + head * ROWS + at_pairs, pairs.to(among.dtype.element_ty), mask=real[:, None])
        tl.debug_barrier()
        tl.store(decay + head + at_heads, tl.exp(sums), mask=real)
        tl.store(rate + head + at_heads, tl.exp(tl.minimum(total - sums, 0.0)) * steps, mask=real)

    table = table_of(block_tables, head_group, sequence, member, groups, max_blocks)
    source = source_of(table, start, start + count, BLOCK_SIZE)
    old = member_at(arena, source, head_slot, member, block_bytes, slot_bytes)
    earliest = tl.where(source >= 0, -NEVER, 0)
    of_group, of_member = inputs_of(projected, group, member, GROUPS, SHARE, KEY_DIM, VALUE_DIM)
    # Where a block ends so near to the step's first token that inputs from before that are kept, what is read may be
    # overwritten: such ends are the first chunk's to do, the sequence's before that of a block.
    is_first, its_end = first <= 0, tl.minimum(first + CHUNK, count)
    for turn in range(2):
        taken = tl.where(turn == 0, count, its_end)
        ours = (turn == 0) & is_first & (count < WIDTH - 1) & (its_end < count)
        ours |= (turn == 1) & (is_first | (its_end >= WIDTH - 1))
        if ours & ((taken == count) | ((start + taken) % BLOCK_SIZE == 0)):
            block = tl.load(table + (start + taken - 1) // BLOCK_SIZE)
            if block >= 0:
                new = member_at(arena, block, head_slot, member, block_bytes, slot_bytes)
                keep_member(new, old, earliest, of_group, of_member, begin, taken, KEY_DIM, ROW, WIDTH, CHANNELS)


@JITFunction
def carry(
    query, key, value, before, behind, among, projected, skip, out, arena,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, groups, max_blocks, block_bytes, slot_bytes,
    fewest_queries,
    MEMBERS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    CARRIED: tl.constexpr, PIECES: tl.constexpr, RECURRENT_AT: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A sequence's state through all of its chunks, for ``CARRIED`` of a head's columns; grid (heads x pieces of their
    columns, sequences)."""
    head, piece, sequence = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES, tl.program_id(1)
    member, shared = head // SHARE, head % SHARE
    begin, count, start = span_of(cu_seqlens_q, seq_lens, sequence)
    if (count < fewest_queries) | (count < 1):
        return
    end = start + count
    table = table_of(block_tables, head_group, sequence, member, groups, max_blocks)
    source = source_of(table, start, end, BLOCK_SIZE)
    old = member_at(arena, source, head_slot, member, block_bytes, slot_bytes)

    place, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    columns = piece * CARRIED + tl.arange(0, CARRIED)
    in_key, in_value = dims < KEY_DIM, columns < VALUE_DIM
    read = (dims < tl.where(source >= 0, KEY_DIM, 0))[:, None] & in_value[None, :]
    within = RECURRENT_AT + shared * (KEY_DIM * VALUE_DIM) + dims[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(old + within, mask=read, other=0.0)
    tl.debug_barrier()
    each, passed = place * (MEMBERS * SHARE), tl.load(skip + head)
    gates = projected + GROUPS * 2 * KEY_DIM + (2 * member + 1) * (SHARE * VALUE_DIM) + shared * VALUE_DIM
    at_keys = place[:, None] * (MEMBERS * KEY_DIM) + dims[None, :]
    at_values = each[:, None] * VALUE_DIM + columns[None, :]
    at_pairs = each[:, None] * ROWS + place[None, :]
    at_gates = place[:, None] * ROW + columns[None, :]
    for chunk in range(start // CHUNK, (end - 1) // CHUNK + 1):
        token = chunk * CHUNK - start + place
        real = (token >= 0) & (token < count) & (place < CHUNK)
        row = (begin + chunk * CHUNK - start).to(tl.int64)  # of the first place, which may be no token
        of_key = (row * MEMBERS + member) * KEY_DIM
        of_head = row * (MEMBERS * SHARE) + head
        in_keys, in_values = real[:, None] & in_key[None, :], real[:, None] & in_value[None, :]
        last = tl.minimum((chunk + 1) * CHUNK, end)
        kept = tl.load(before + (begin + last - start - 1).to(tl.int64) * (MEMBERS * SHARE) + head)
        seen_before = tl.load(before + of_head + each, mask=real, other=0.0)
        left_behind = tl.load(behind + of_head + each, mask=real, other=0.0)
        gate = tl.load(gates + row * ROW + at_gates, mask=in_values, other=0.0).to(tl.float32)

        queries = tl.load(query + of_key + at_keys, mask=in_keys, other=0.0)
        values = tl.load(value + of_head * VALUE_DIM + at_values, mask=in_values, other=0.0)
        pairs = tl.load(among + of_head * ROWS + at_pairs, mask=real[:, None], other=0.0)
        seen = seen_before[:, None] * product(queries, state, PRECISION)
        seen = tl.dot(pairs, values, seen, input_precision=PRECISION)
        wide = values.to(tl.float32)
        made = (seen + passed * wide) * (gate * sigmoid(gate))
        tl.store(out + of_head * VALUE_DIM + at_values, made.to(out.dtype.element_ty), mask=in_values)

        keys = tl.load(key + of_key + at_keys, mask=in_keys, other=0.0)
        state = state * kept + product(tl.trans(keys), left_behind[:, None] * wide, PRECISION)
        is_left = (last % BLOCK_SIZE == 0) | (last == end)
        block = tl.load(table + (last - 1) // BLOCK_SIZE)
        new = member_at(arena, block, head_slot, member, block_bytes, slot_bytes)
        rows = tl.where(is_left & (block >= 0), KEY_DIM, 0)
        tl.store(new + within, state, mask=(dims < rows)[:, None] & in_value[None, :])
