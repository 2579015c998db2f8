"""Attention over group block tables in Triton: one kernel for prefill chunks and decode.

**Rows.** A program serves one KV head of one sequence. The ``SHARE`` query heads of that KV head and ``TOKENS``
consecutive query tokens make the ``BLOCK_M`` rows of its tile, token by token: row ``r`` is token ``r // SHARE`` and
head ``r % SHARE``. So keys and values are read once for all of them.

**Walk.** See `walk_jit`: one loop over the tiles of both spans that a head sees, without a branch, which would keep the
compiler from overlapping loads with arithmetic: what must not be seen is masked.

**Masks.** Slots behind the last token and blocks nobody may see can hold NaN, and ``0 * NaN`` is NaN: they are masked
where they are loaded, keys and values alike. No pointer is made from a block id below 0. Tiles of a prompt that all its
rows see whole have a loop of their own, in which nothing is masked.

The softmax is the online one (Milakov and Gimelshein, arXiv 1805.02867), in base 2; splits of one sequence are merged
by the last of them, see `merge_jit`.

``OF_RANKS``, of a decode, is for ranks that keep a KV head together (`headwise.kernels.token_ranks`): queries are those
of all of them, and results have their log-sum-exps behind them, by which those of several ranks become one.

``JOINT``, of a decode, is for sequences some of which go on from one prefix: what those see together has been seen
already, by `joint_jit`.
"""
# mypy: ignore-errors
# ruff: noqa: N803, SIM102

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.cached_jit import (
    UNIT,
    as_exponents,
    as_float16,
    load_packed,
    load_tile,
    split_pairs,
    split_quarters,
    widened,
)
from headwise.kernels.cuda.merge_jit import (
    merge_parts,
    place_of,
    store_mean,
    store_part,
    store_seen,
    with_seen,
    with_sink,
)
from headwise.kernels.cuda.overlap_jit import let_next_begin, wait_for_earlier
from headwise.kernels.cuda.walk_jit import (
    APART,
    NEVER,
    SEARCHED,
    find_tile,
    find_unit,
    split_of,
    unseen_before,
    walk_of,
    window_of,
)

MOST_BLOCKS = tl.constexpr(1 << 30)
"""More than any arena has."""


@JITFunction
def has_all_blocks(table, first, end):
    """Whether columns ``first`` to ``end``, this one excluded, all have a block."""
    lowest = 0
    for at in range(first, end, SEARCHED):
        column = at + tl.arange(0, SEARCHED)
        lowest = tl.minimum(lowest, tl.min(tl.load(table + column, mask=column < end, other=0), 0))
    return lowest >= 0


@JITFunction
def place_tile(
    key, value, tile, earliest, latest, window, sink, table, block_stride, scale_stride,
    ROW: tl.constexpr, VALUE_ROW: tl.constexpr, SCALE_ROW: tl.constexpr, VALUE_SCALE_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, INTERIOR: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """(tokens, mapped, key, value, keys_at, values_at, scales_at, value_scales_at) of a tile, see `attend_tile`: its
    positions, which of them some query may see, and where it lies. ``..._ROW`` are numbers in memory of a key, of a
    value, and of the scales of either."""
    within = tl.arange(0, BLOCK_N)
    tokens = tile * BLOCK_N + within
    if BLOCK_SIZE >= BLOCK_N:  # the tile lies within one block: one base, and offsets that no step computes anew
        block = tl.load(table + tile * BLOCK_N // BLOCK_SIZE)
        mapped = tokens <= tl.where(block >= 0, latest, -1)
        base = tl.maximum(block, 0).to(tl.int64) * block_stride
        skipped = tile * BLOCK_N % BLOCK_SIZE
        key += base + skipped * ROW
        value += base + skipped * VALUE_ROW
        keys_at = within * ROW
        scales_at = tl.maximum(block, 0).to(tl.int64) * scale_stride + (skipped + within) * SCALE_ROW
        values_at, value_scales_at = keys_at, scales_at
        if VALUE_ROW != ROW:
            values_at = within * VALUE_ROW
            value_scales_at = tl.maximum(block, 0).to(tl.int64) * scale_stride + (skipped + within) * VALUE_SCALE_ROW
    else:
        if INTERIOR:
            block = tl.load(table + tokens // BLOCK_SIZE)
        else:
            block = tl.load(table + tokens // BLOCK_SIZE, mask=tokens <= latest, other=-1)
        mapped = block >= 0
        block = tl.maximum(block, 0).to(tl.int64)
        keys_at = block * block_stride + tokens % BLOCK_SIZE * ROW
        scales_at = block * scale_stride + tokens % BLOCK_SIZE * SCALE_ROW
        values_at, value_scales_at = keys_at, scales_at
        if VALUE_ROW != ROW:
            values_at = block * block_stride + tokens % BLOCK_SIZE * VALUE_ROW
            value_scales_at = block * scale_stride + tokens % BLOCK_SIZE * VALUE_SCALE_ROW
    if not INTERIOR:
        mapped = mapped & ((tokens > unseen_before(earliest, window, CHUNKED)) | (tokens < sink))
    return tokens, mapped, key, value, keys_at, values_at, scales_at, value_scales_at


@JITFunction
def attend_tile(
    accumulator, highest, total, queries, positions, reaches, tile, earliest, latest, window, sink,
    key, value, key_scale, value_scale, table, block_stride, scale_stride, score_scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr, INTERIOR: tl.constexpr, SOFTCAP: tl.constexpr, QUANTISED: tl.constexpr,
    PACKED: tl.constexpr, CHUNKED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_D: tl.constexpr,
    BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the tile's ``BLOCK_N`` keys and values go into the running state.

    ``earliest`` is the position of the first query, ``latest`` the last one that any sees, ``positions`` those of all
    rows, and with ``BOTH_WAYS`` ``reaches`` the last ones that these see. With
    ``INTERIOR`` every query sees every token of the tile, and its blocks are there: nothing is masked. Of values the
    first ``VALUE_D`` elements from ``value`` on are read. ``score_scale`` is ``[BLOCK_M]``.
    """
    row: tl.constexpr = HEAD_DIM // 2 if PACKED else HEAD_DIM
    value_row: tl.constexpr = VALUE_DIM // 2 if PACKED else VALUE_DIM
    tokens, mapped, key, value, keys_at, values_at, scales_at, value_scales_at = place_tile(
        key, value, tile, earliest, latest, window, sink, table, block_stride, scale_stride,
        row, value_row, HEAD_DIM // 32 if PACKED else 1, VALUE_DIM // 32 if PACKED else 1,
        BLOCK_N, BLOCK_SIZE, INTERIOR, CHUNKED,
    )  # fmt: skip

    if PACKED:
        keys = load_packed(key, key_scale, keys_at, scales_at, mapped, HEAD_DIM, BLOCK_D, INTERIOR, queries.dtype)
    else:
        dims = tl.arange(0, BLOCK_D)
        at = keys_at[:, None] + dims[None, :]
        loaded = (dims < HEAD_DIM)[None, :]
        if not INTERIOR:
            loaded = mapped[:, None] & loaded if HEAD_DIM != BLOCK_D else mapped[:, None]
        value_at, value_loaded = at, loaded
        if VALUE_D != BLOCK_D or VALUE_DIM != HEAD_DIM:
            value_dims = tl.arange(0, VALUE_D)
            value_at, value_loaded = values_at[:, None] + value_dims[None, :], mapped[:, None]
            if VALUE_DIM < VALUE_D:
                value_loaded = (value_dims < VALUE_DIM)[None, :]
                if not INTERIOR:
                    value_loaded = mapped[:, None] & value_loaded
        keys = widened(load_tile(key + at, loaded, INTERIOR and HEAD_DIM == BLOCK_D), queries.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if QUANTISED:
        scores *= load_tile(key_scale + scales_at, mapped, INTERIOR)[None, :]
    if SOFTCAP:  # cap * tanh(x) with exp2, which stays finite for any score
        scores = cap - 2.0 * cap / (tl.exp2(scores * score_scale[:, None]) + 1.0)
        score_scale = tl.full(score_scale.shape, 1.0, tl.float32)

    if DECODE:
        scores = tl.where(mapped[None, :], scores, float("-inf"))
    elif not INTERIOR:
        # Two comparisons per score: sinks pass every window, unmapped tokens lie behind every query.
        after = tl.where(mapped, tokens, NEVER)[None, :]
        before = tl.where(tokens < sink, NEVER, tokens)[None, :]
        last_seen = reaches if BOTH_WAYS else positions
        visible = (after <= last_seen[:, None]) & (before > unseen_before(positions, window, CHUNKED)[:, None])
        scores = tl.where(visible, scores, float("-inf"))

    if QUANTISED:
        value_scales = load_tile(value_scale + scales_at, mapped, INTERIOR)
        if queries.dtype == tl.float16:
            # Weights times scales may be below its range: they are powers of two that scales are part of, so the
            # largest is 1. That their sum is of weights alone is made good there.
            exponents, inverses = as_exponents(value_scales)
            scores = scores * score_scale[:, None] + exponents[None, :]
            score_scale = tl.full(score_scale.shape, 1.0, tl.float32)
    new_highest = tl.maximum(highest, tl.max(scores, 1) * score_scale)
    # A row that has seen nothing yet would compute inf - inf.
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores * score_scale[:, None] - reference[:, None])
    fading = tl.exp2(highest - reference)
    if QUANTISED and queries.dtype == tl.float16:
        total = total * fading + tl.sum(weights * inverses[None, :], 1)
    else:
        total = total * fading + tl.sum(weights, 1)
    if PACKED:
        values = load_packed(
            value, value_scale, values_at, value_scales_at, mapped, VALUE_DIM, VALUE_D, INTERIOR, queries.dtype
        )  # fmt: skip
    else:
        values = widened(load_tile(value + value_at, value_loaded, INTERIOR and VALUE_DIM >= VALUE_D), queries.dtype)
    if QUANTISED and queries.dtype != tl.float16:
        weights *= value_scales[None, :]
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator * fading[:, None], input_precision="ieee")
    return accumulator, new_highest, total


@JITFunction
def weigh(scores, highest):
    """(weights, what earlier ones are multiplied with, highest score) of scores in base 2, of which a row may have seen
    none yet: it would compute inf - inf."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    return tl.exp2(scores - reference[:, None]), tl.exp2(highest - reference), new_highest


@JITFunction
def attend_paired_tile(
    first, second, highest, total, first_queries, second_queries, tile, position, window, sink,
    key, value, key_scale, value_scale, table, block_stride, scale_stride, score_scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr, CHUNKED: tl.constexpr,
    IS_E4M3: tl.constexpr,
):  # fmt: skip
    """`attend_tile` of one query over a cache of 8 bits, which is read as pairs of elements: see `split_pairs`.

    Queries and results are in two halves, of first and of second elements: all sums are the same in any order.
    """
    pair: tl.constexpr = HEAD_DIM // 2
    value_pair: tl.constexpr = VALUE_DIM // 2
    _, mapped, key, value, keys_at, values_at, scales_at, _ = place_tile(
        key, value, tile, position, position, window, sink, table, block_stride, scale_stride,
        pair, value_pair, 1, 1, BLOCK_N, BLOCK_SIZE, False, CHUNKED,
    )  # fmt: skip
    dims, value_dims = tl.arange(0, BLOCK_D // 2), tl.arange(0, VALUE_D // 2)
    loaded, upright = mapped[None, :], mapped[:, None]
    if HEAD_DIM != BLOCK_D:
        loaded = loaded & (dims < pair)[:, None]
    if VALUE_DIM != VALUE_D:
        upright = upright & (value_dims < value_pair)[None, :]
    keys = tl.load(key + keys_at[None, :] + dims[:, None], mask=loaded, other=0)
    first_keys, second_keys = split_pairs(keys, IS_E4M3)
    scores = tl.dot(second_queries, second_keys, tl.dot(first_queries, first_keys))
    scores = capped(scores * tl.load(key_scale + scales_at, mask=mapped, other=0.0)[None, :], score_scale, cap, SOFTCAP)
    if SOFTCAP:
        score_scale = tl.full(score_scale.shape, 1.0, tl.float32)
    scores = tl.where(mapped[None, :], scores, float("-inf"))
    exponents, inverses = as_exponents(tl.load(value_scale + scales_at, mask=mapped, other=0.0))
    weights, fading, highest = weigh(scores * score_scale[:, None] + exponents[None, :], highest)
    total = total * fading + tl.sum(weights * inverses[None, :], 1)
    weights = weights.to(tl.float16)
    values = tl.load(value + values_at[:, None] + value_dims[None, :], mask=upright, other=0)
    first_values, second_values = split_pairs(values, IS_E4M3)
    first = tl.dot(weights, first_values, first * fading[:, None])
    second = tl.dot(weights, second_values, second * fading[:, None])
    return first, second, highest, total


@JITFunction
def attend_quartered_tile(
    first, second, third, fourth, highest, total, first_queries, second_queries, third_queries, fourth_queries,
    tile, position, window, sink,
    key, value, key_scale, value_scale, table, block_stride, scale_stride, score_scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """`attend_paired_tile` over a cache of 4 bits, which is read as words of four elements: see `split_quarters`."""
    word: tl.constexpr = HEAD_DIM // 4
    value_word: tl.constexpr = VALUE_DIM // 4
    groups: tl.constexpr = BLOCK_D // 32
    value_groups: tl.constexpr = VALUE_D // 32
    _, mapped, key, value, keys_at, values_at, scales_at, value_scales_at = place_tile(
        key, value, tile, position, position, window, sink, table, block_stride, scale_stride,
        word, value_word, HEAD_DIM // 32, VALUE_DIM // 32, BLOCK_N, BLOCK_SIZE, False, CHUNKED,
    )  # fmt: skip
    dims, group = tl.arange(0, BLOCK_D // 4), tl.arange(0, groups)
    value_dims, value_group = tl.arange(0, VALUE_D // 4), tl.arange(0, value_groups)
    loaded, upright, some, some_upright = mapped[None, :], mapped[:, None], mapped[None, :], mapped[:, None]
    if HEAD_DIM != BLOCK_D:
        loaded, some = loaded & (dims < word)[:, None], some & (group < HEAD_DIM // 32)[:, None]
    if VALUE_DIM != VALUE_D:
        upright = upright & (value_dims < value_word)[None, :]
        some_upright = some_upright & (value_group < VALUE_DIM // 32)[None, :]
    keys = tl.load(key + keys_at[None, :] + dims[:, None], mask=loaded, other=0)
    scales = tl.load(key_scale + scales_at[None, :] + group[:, None], mask=some, other=0)
    scales = tl.reshape(tl.broadcast_to(scales[:, None, :], [groups, 8, BLOCK_N]), [BLOCK_D // 4, BLOCK_N])
    first_keys, second_keys, third_keys, fourth_keys = split_quarters(keys, scales)
    scores = tl.dot(second_queries, second_keys, tl.dot(first_queries, first_keys))
    scores = tl.dot(fourth_queries, fourth_keys, tl.dot(third_queries, third_keys, scores))
    scores = capped(scores, score_scale, cap, SOFTCAP)
    if SOFTCAP:
        score_scale = tl.full(score_scale.shape, 1.0, tl.float32)
    scores = tl.where(mapped[None, :], scores * score_scale[:, None], float("-inf"))
    weights, fading, highest = weigh(scores, highest)
    total = total * fading + tl.sum(weights, 1)
    weights = weights.to(tl.float16)
    values = tl.load(value + values_at[:, None] + value_dims[None, :], mask=upright, other=0)
    scales = tl.load(value_scale + value_scales_at[:, None] + value_group[None, :], mask=some_upright, other=0)
    scales = tl.reshape(tl.broadcast_to(scales[:, :, None], [BLOCK_N, value_groups, 8]), [BLOCK_N, VALUE_D // 4])
    first_values, second_values, third_values, fourth_values = split_quarters(values, scales)
    first = tl.dot(weights, first_values, first * fading[:, None])
    second = tl.dot(weights, second_values, second * fading[:, None])
    third = tl.dot(weights, third_values, third * fading[:, None])
    fourth = tl.dot(weights, fourth_values, fourth * fading[:, None])
    return first, second, third, fourth, highest, total


@JITFunction
def load_piece(pieces, table, token, BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """``[PIECE, HEAD_DIM]`` of what ``pieces`` describes, from position ``token`` on, all within one block."""
    block = tl.load(table + token // BLOCK_SIZE)
    return tl.reshape(pieces.load([block, token % BLOCK_SIZE, 0]), [PIECE, HEAD_DIM])


@JITFunction
def capped(scores, score_scale, cap, SOFTCAP: tl.constexpr):
    """Scores ``[M, N]`` in base 2, of which ``score_scale [M]`` is not yet part unless there is a cap."""
    if SOFTCAP:  # cap * tanh(x) with exp2, which stays finite for any score
        return cap - 2.0 * cap / (tl.exp2(scores * score_scale[:, None]) + 1.0)
    return scores


@JITFunction
def attend_bulk_tile(
    accumulator, highest, total, queries, tile, key_pieces, value_pieces, table, score_scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """As `attend_tile` with ``INTERIOR``. Keys and values come by TMA, in one piece or two, each of one block."""
    piece: tl.constexpr = min(BLOCK_N, BLOCK_SIZE)
    at = tile * BLOCK_N
    keys = load_piece(key_pieces, table, at, BLOCK_SIZE, piece, HEAD_DIM)
    scores = capped(tl.dot(queries, tl.trans(keys)), score_scale, cap, SOFTCAP)
    most = tl.max(scores, 1)
    if piece < BLOCK_N:
        more_keys = load_piece(key_pieces, table, at + piece, BLOCK_SIZE, piece, HEAD_DIM)
        more_scores = capped(tl.dot(queries, tl.trans(more_keys)), score_scale, cap, SOFTCAP)
        most = tl.maximum(most, tl.max(more_scores, 1))
    if SOFTCAP:
        score_scale = tl.full(score_scale.shape, 1.0, tl.float32)
    new_highest = tl.maximum(highest, most * score_scale)  # of a row that sees a whole tile: finite
    weights = tl.exp2(scores * score_scale[:, None] - new_highest[:, None])
    fading = tl.exp2(highest - new_highest)
    total = total * fading + tl.sum(weights, 1)
    values = load_piece(value_pieces, table, at, BLOCK_SIZE, piece, HEAD_DIM)
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator * fading[:, None])
    if piece < BLOCK_N:
        more_weights = tl.exp2(more_scores * score_scale[:, None] - new_highest[:, None])
        total += tl.sum(more_weights, 1)
        more_values = load_piece(value_pieces, table, at + piece, BLOCK_SIZE, piece, HEAD_DIM)
        accumulator = tl.dot(more_weights.to(values.dtype), more_values, accumulator)
    return accumulator, new_highest, total


@JITFunction
def attend(
    query, out, counters, partial, partial_lse, sink_logits, key, value, key_scale, value_scale,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, head_window, head_sink,
    batch, kv_heads, groups, max_blocks, block_bytes, slot_bytes, query_stride, out_stride,
    score_scale, cap, units, fewest_units, fewest_queries, tokens_of_step, own_heads, sees, joint, seen,
    SHARE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr,
    KV_BYTES: tl.constexpr, DECODE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    QUANTISED: tl.constexpr, PACKED: tl.constexpr, CHUNKED: tl.constexpr, VALUE_D: tl.constexpr, BULK: tl.constexpr,
    PAIRED: tl.constexpr, IS_E4M3: tl.constexpr, SPLIT_TILES: tl.constexpr, OVERLAPS: tl.constexpr,
    OF_RANKS: tl.constexpr, BOTH_WAYS: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of query rows over one KV head.

    With ``DECODE`` the grid is (``units + batch``, KV heads), for sequences with exactly one query; without, (KV heads
    x tiles of the batch), for those with at least ``fewest_queries``. Where ``VALUE_D`` is less than ``BLOCK_V``, as of
    heads whose results have no room in registers, so many more programs each make ``VALUE_D`` of a result's elements,
    of all scores. Without ``SOFTCAP``, ``score_scale`` is
    ``scale * log2(e)``; with it, ``2 * log2(e) * scale / softcap``, and ``cap`` is ``softcap * log2(e)``.

    Decode is cut into splits of equal length by what the head sees of all sequences, at most about ``units`` in all
    (`walk_jit.split_of`): a long one among short ones has as many programs as it needs. A sequence that is one split
    goes straight to ``out``. Of others each split writes its normalised ``partial [q_heads, 2 * units, VALUE_DIM]`` and
    ``partial_lse [q_heads, 2 * units]``, in base 2. There are no more: what has several splits is longer than one, so
    twice its length holds them.
    ``counters [KV heads, 2 * units]`` are 0, and are again at the end.

    With ``PAIRED`` a decode reads several elements of its cache as one of 16 bits, which with ``IS_E4M3`` are e4m3.

    With ``BULK`` those tiles of a prompt that all rows see come by the tensor memory accelerator, block by block.

    With ``BOTH_WAYS``, of a prompt, each row sees the first ``sees [rows]`` of its sequence's tokens, in place of those
    up to itself: no fewer than the row before it.

    With ``OVERLAPS``, of a decode, it is launched, and has the next kernel launched, as `overlap.cuh` says. What each
    program is to do it finds out before it waits, so while what comes before writes keys and values.

    With ``OF_RANKS`` there is one KV head, and ``query`` is ``[ranks, tokens_of_step, own_heads, HEAD_DIM]``: the
    ``SHARE`` heads over it are those of one rank after the other. ``out`` is ``[ranks, tokens_of_step, own_heads,
    VALUE_DIM + BESIDE]``, see `merge_jit.store_seen`. A sequence may have no token here: its one tile has none that is
    visible, and no block is read but for the first one's id.

    With ``JOINT`` a sequence begins behind what its group has read for it, ``joint``, and goes on from what that gave,
    in ``seen``: see `joint_jit.attend_joint`.
    """
    of_joint: tl.constexpr = APART if JOINT else None
    if OVERLAPS:
        let_next_begin()
    if DECODE:
        unit, kv_head = tl.program_id(0), tl.program_id(1)
        window = window_of(head_window, kv_head)
        sink = tl.load(head_sink + kv_head)
        per_split = split_of(
            cu_seqlens_q, seq_lens, batch, window, sink, units, fewest_units,
            BLOCK_N, MIN_SPLIT_TILES, SPLIT_TILES, CHUNKED, joint, of_joint,
        )  # fmt: skip
        sequence, split = find_unit(
            unit, units + batch, per_split, cu_seqlens_q, seq_lens, batch, window, sink, BLOCK_N, CHUNKED,
            joint, of_joint,
        )  # fmt: skip
        if OVERLAPS:  # not before: lengths and what heads see are there since before the step
            wait_for_earlier()
        if sequence >= batch:
            return
        first = 0
    else:
        # The tiles that see most begin first, so that none of them is left alone at the end.
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        if VALUE_D != BLOCK_V:  # programs beside each other read the same keys
            part = program % (BLOCK_V // VALUE_D)
            program = program // (BLOCK_V // VALUE_D)
        split, kv_head = 0, program % kv_heads
        sequence, first = find_tile(cu_seqlens_q, batch, program // kv_heads, TOKENS)
    query_begin = tl.load(cu_seqlens_q + sequence)
    query_count = tl.load(cu_seqlens_q + sequence + 1) - query_begin
    if not DECODE:
        if (first >= query_count) | (query_count < fewest_queries):
            return
        window = window_of(head_window, kv_head)
        sink = tl.load(head_sink + kv_head)

    group = tl.load(head_group + kv_head)
    slot = tl.load(head_slot + kv_head).to(tl.int64)
    offset = tl.load(seq_lens + sequence) - query_count
    last = offset + tl.minimum(first + TOKENS, query_count) - 1
    least, latest = offset + first, last  # what the first query sees up to, and what the last one does
    if BOTH_WAYS:
        least = tl.load(sees + query_begin + first) - 1
        latest = tl.load(sees + query_begin + last - offset) - 1
    tiles, sink_tiles, window_tile = walk_of(offset + first, latest, window, sink, BLOCK_N, CHUNKED)
    jump = window_tile - sink_tiles
    if JOINT:  # of heads that see all: there is one span then
        before = tl.where(window == NEVER, tl.load(joint + 2 * batch + sequence), 0)
        tiles -= before // BLOCK_N
        jump += before // BLOCK_N
    begin, end, used = 0, tiles, 1
    if DECODE:
        used = (tiles + per_split - 1) // per_split
        begin = split * per_split
        end = tl.minimum(begin + per_split, tiles)

    row = tl.arange(0, BLOCK_M)
    token = first + row // SHARE
    head = kv_head * SHARE + row % SHARE
    dims = tl.arange(0, BLOCK_D)
    real_row = (row < TOKENS * SHARE) & (token < query_count)
    real = real_row[:, None] & (dims < HEAD_DIM)[None, :]
    reaches = 0
    if BOTH_WAYS:
        reaches = tl.load(sees + query_begin + token, mask=real_row, other=1) - 1
    if OF_RANKS:
        at_seen = place_of(query_begin + token, head, tokens_of_step, own_heads)
        at_query = at_seen * HEAD_DIM
    else:
        at_query = (query_begin + token).to(tl.int64) * query_stride + head * HEAD_DIM
    queries = tl.load(query + at_query[:, None] + dims[None, :], mask=real, other=0.0)
    score_scale = tl.full([BLOCK_M], 1.0, tl.float32) * score_scale
    if PACKED:
        score_scale /= UNIT
    if (PACKED or QUANTISED) and queries.dtype == tl.bfloat16:
        queries, largest = as_float16(queries)
        score_scale *= largest
    if PAIRED and PACKED:
        halves = tl.permute(tl.reshape(queries, [BLOCK_M, BLOCK_D // 32, 2, 8, 2]), [0, 1, 3, 2, 4])
        even, odd = tl.split(tl.reshape(halves, [BLOCK_M, BLOCK_D // 4, 2, 2]))
        first_queries, third_queries = tl.split(even)
        second_queries, fourth_queries = tl.split(odd)
    elif PAIRED:
        first_queries, second_queries = tl.split(tl.reshape(queries, [BLOCK_M, BLOCK_D // 2, 2]))

    slot_base = slot * (slot_bytes // KV_BYTES)
    scale_base = slot * (slot_bytes // 4)
    table = block_tables + (sequence * groups + group).to(tl.int64) * max_blocks
    if VALUE_D != BLOCK_V:
        value += part * (VALUE_D // 2 if PACKED else VALUE_D)
        if PACKED:
            value_scale += part * (VALUE_D // 32)
        out += part * VALUE_D
    accumulator = tl.zeros([BLOCK_M, VALUE_D], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    skipped_at, skipped = tiles, 0
    if not DECODE:
        # Tiles that every query sees whole: not those of the sinks, of the window's left edge, of the diagonal.
        whole = (tl.maximum(unseen_before(last, window, CHUNKED) + 1, 0) + BLOCK_N - 1) // BLOCK_N
        skipped_at = tl.maximum(whole - jump, sink_tiles)
        whole_end = tl.maximum((least + 1) // BLOCK_N - jump, skipped_at)
        columns_end = ((whole_end + jump) * BLOCK_N + BLOCK_SIZE - 1) // BLOCK_SIZE
        if not has_all_blocks(table, (skipped_at + jump) * BLOCK_N // BLOCK_SIZE, columns_end):
            whole_end = skipped_at  # as before there is a cache: each tile is masked
        skipped = whole_end - skipped_at
        if BULK:
            # Of all blocks what this head's slot has. Which there are is not known here, and none else is asked for.
            key_pieces = tl.make_tensor_descriptor(
                key + slot_base, [MOST_BLOCKS, BLOCK_SIZE, HEAD_DIM], [block_bytes // KV_BYTES, HEAD_DIM, 1],
                [1, min(BLOCK_N, BLOCK_SIZE), HEAD_DIM],
            )  # fmt: skip
            value_pieces = tl.make_tensor_descriptor(
                value + slot_base, [MOST_BLOCKS, BLOCK_SIZE, HEAD_DIM], [block_bytes // KV_BYTES, HEAD_DIM, 1],
                [1, min(BLOCK_N, BLOCK_SIZE), HEAD_DIM],
            )  # fmt: skip
            for step in range(skipped_at, whole_end):
                accumulator, highest, total = attend_bulk_tile(
                    accumulator, highest, total, queries, step + jump, key_pieces, value_pieces, table, score_scale,
                    cap, HEAD_DIM, BLOCK_N, BLOCK_SIZE, SOFTCAP,
                )  # fmt: skip
        else:
            for step in range(skipped_at, whole_end):
                accumulator, highest, total = attend_tile(
                    accumulator, highest, total, queries, offset + token, reaches, step + jump,
                    offset + first, latest, window, sink,
                    key + slot_base, value + slot_base, key_scale + scale_base, value_scale + scale_base, table,
                    block_bytes // KV_BYTES, block_bytes // 4, score_scale, cap,
                    HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, DECODE, True, SOFTCAP, QUANTISED, PACKED, CHUNKED,
                    VALUE_DIM, VALUE_D, BOTH_WAYS,
                )  # fmt: skip
    if PAIRED and PACKED:
        first_sums = tl.zeros([BLOCK_M, VALUE_D // 4], tl.float32)
        second_sums = tl.zeros([BLOCK_M, VALUE_D // 4], tl.float32)
        third_sums = tl.zeros([BLOCK_M, VALUE_D // 4], tl.float32)
        fourth_sums = tl.zeros([BLOCK_M, VALUE_D // 4], tl.float32)
        for step in range(begin, end):
            first_sums, second_sums, third_sums, fourth_sums, highest, total = attend_quartered_tile(
                first_sums, second_sums, third_sums, fourth_sums, highest, total,
                first_queries, second_queries, third_queries, fourth_queries,
                step + tl.where(step >= sink_tiles, jump, 0), last, window, sink,
                key + slot_base, value + slot_base, key_scale + scale_base, value_scale + scale_base, table,
                block_bytes // KV_BYTES, block_bytes // 4, score_scale, cap,
                HEAD_DIM, BLOCK_D, VALUE_DIM, VALUE_D, BLOCK_N, BLOCK_SIZE, SOFTCAP, CHUNKED,
            )  # fmt: skip
        halves = tl.join(tl.join(first_sums, third_sums), tl.join(second_sums, fourth_sums))
        halves = tl.permute(tl.reshape(halves, [BLOCK_M, VALUE_D // 32, 8, 2, 2]), [0, 1, 3, 2, 4])
        accumulator = tl.reshape(halves, [BLOCK_M, VALUE_D])
    elif PAIRED:
        first_sums = tl.zeros([BLOCK_M, VALUE_D // 2], tl.float32)
        second_sums = tl.zeros([BLOCK_M, VALUE_D // 2], tl.float32)
        for step in range(begin, end):
            first_sums, second_sums, highest, total = attend_paired_tile(
                first_sums, second_sums, highest, total, first_queries, second_queries,
                step + tl.where(step >= sink_tiles, jump, 0), last, window, sink,
                key + slot_base, value + slot_base, key_scale + scale_base, value_scale + scale_base, table,
                block_bytes // KV_BYTES, block_bytes // 4, score_scale, cap,
                HEAD_DIM, BLOCK_D, VALUE_DIM, VALUE_D, BLOCK_N, BLOCK_SIZE, SOFTCAP, CHUNKED, IS_E4M3,
            )  # fmt: skip
        accumulator = tl.interleave(first_sums, second_sums)
    else:
        for step in range(begin, end - skipped):
            step = step + tl.where(step >= skipped_at, skipped, 0)
            accumulator, highest, total = attend_tile(
                accumulator, highest, total, queries, offset + token, reaches,
                step + tl.where(step >= sink_tiles, jump, 0), offset + first, latest, window, sink,
                key + slot_base, value + slot_base, key_scale + scale_base, value_scale + scale_base, table,
                block_bytes // KV_BYTES, block_bytes // 4, score_scale, cap,
                HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, DECODE, False, SOFTCAP, QUANTISED, PACKED, CHUNKED,
                VALUE_DIM, VALUE_D, BOTH_WAYS,
            )  # fmt: skip

    if PACKED:
        accumulator /= UNIT
    if JOINT:
        at_seen = (query_begin + token).to(tl.int64) * (kv_heads * SHARE) + head
        goes_on = real_row & (row >= tl.where((split == 0) & (before > 0), 0, BLOCK_M))
        accumulator, total, highest = with_seen(
            seen, at_seen, accumulator, total, highest, goes_on, VALUE_DIM, BLOCK_V
        )  # fmt: skip
    if DECODE:
        if used > 1:
            place = head.to(tl.int64) * (2 * units) + unit
            store_part(partial, partial_lse, place, accumulator, highest, total, real_row, VALUE_DIM, BLOCK_V)
            first_head = kv_head * SHARE
            first_place = first_head.to(tl.int64) * (2 * units) + unit - split
            if OF_RANKS:
                merge_parts(
                    counters + unit - split, partial + first_place * VALUE_DIM, partial_lse + first_place, 2 * units,
                    split, used, out, partial_lse, SHARE, HEADS, VALUE_DIM, BLOCK_V, False,
                    True, query_begin, first_head, tokens_of_step, own_heads,
                )  # fmt: skip
            else:
                merge_parts(
                    counters + kv_head * (2 * units) + unit - split,
                    partial + first_place * VALUE_DIM, partial_lse + first_place, 2 * units, split, used,
                    out + query_begin.to(tl.int64) * out_stride + first_head * VALUE_DIM, sink_logits + first_head,
                    SHARE, HEADS, VALUE_DIM, BLOCK_V, SINKS,
                )  # fmt: skip
            return
    if OF_RANKS:
        store_seen(out, at_seen, accumulator, highest, total, real_row, VALUE_DIM, BLOCK_V)
    else:
        if SINKS:  # once for a sequence: of splits by the last
            total = with_sink(total, highest, tl.load(sink_logits + head, mask=real_row, other=0.0))
        at_out = (query_begin + token).to(tl.int64) * out_stride + head * VALUE_DIM
        store_mean(out, at_out, accumulator, total, real_row, VALUE_DIM, VALUE_D)
