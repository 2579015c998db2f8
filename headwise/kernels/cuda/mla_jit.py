"""Latent attention (MLA) over group block tables in Triton, in the absorbed form: for prefill chunks and decode.

A token's latent is its key and its value for every query head, so it is read once for all rows of a tile: ``TOKENS``
query tokens with ``HEADS`` heads each, row ``r`` being token ``r // HEADS`` and head ``r % HEADS``. A tile's scores are
two products, with the compressed part of latents and with the rotated one; what weights sum up is the compressed part,
which lies in shared memory already.

Walk, masks, softmax and splits are those of `walk_jit` and `attention_jit`. A step of the softmax is the same for
tokens that lie in a row and for ones that an indexer chose.

Latents in int8 are rows of integers with a scale each, ``compressed | coarse | fine``, see
`headwise.kernels.mla_quantised`: the rotated part is ``16 * coarse + fine``, and each of the two is multiplied exactly.
In E4M3 it is ``coarse + fine / 16``: the products with the two change places, and what lies between them is a 16th.

In four bits, see `headwise.kernels.mla_nibbles`, latents become float16 (of queries of float32: that), as `cached_jit`
says. The two parts of a rotated number are added up before, in float32: the coarse one is to be exact.

``SCALES`` says which of these latents are: how many scales each of them has, none, one, or one for each group of 32.

``OF_RANKS``, of a decode, is for ranks that keep latents together (`headwise.kernels.token_ranks`): queries are those
of all of them, and results have their log-sum-exps behind them, by which those of several ranks become one.
"""
# mypy: ignore-errors
# ruff: noqa: N803, SIM102

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.cached_jit import UNIT, converted, load_packed
from headwise.kernels.cuda.merge_jit import merge_parts, place_of, store_mean, store_part, store_seen
from headwise.kernels.cuda.walk_jit import NEVER, find_tile, find_unit, split_of, walk_of, window_of

COARSE = tl.constexpr(16.0)
"""Fine units in a coarse one."""


@JITFunction
def load_groups(
    latent, latent_scale, at, scales_at, there,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROTATED: tl.constexpr, BLOCK_P: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The two parts of latents in four bits, in `UNIT`: the compressed one of ``DTYPE``, the rotated one of float32."""
    compressed = load_packed(latent, latent_scale, at, scales_at, there, RANK, BLOCK_R, False, DTYPE)
    latent, latent_scale = latent + RANK // 2, latent_scale + RANK // 32
    coarse = load_packed(latent, latent_scale, at, scales_at, there, ROTATED, BLOCK_P, False, tl.float32)
    latent, latent_scale = latent + ROTATED // 2, latent_scale + ROTATED // 32
    fine = load_packed(latent, latent_scale, at, scales_at, there, ROTATED, BLOCK_P, False, tl.float32)
    return compressed, coarse + fine


@JITFunction
def in_units(compressed_query, rotated_query):
    """Queries as they are multiplied with latents in four bits, and ``[BLOCK_M]`` what their products count.

    Those of bfloat16 are float16, divided by what makes each of them fit; float16 and float32 stay as they are.
    """
    largest = tl.full([compressed_query.shape[0]], 1.0, tl.float32)
    if compressed_query.dtype == tl.bfloat16:
        wide, turned = compressed_query.to(tl.float32), rotated_query.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), 1), tl.max(tl.abs(turned), 1))
        largest = tl.where(largest > 0.0, largest, 1.0)
        compressed_query = (wide / largest[:, None]).to(tl.float16)
        rotated_query = (turned / largest[:, None]).to(tl.float16)
    return compressed_query, rotated_query, largest * (1 / UNIT)


@JITFunction
def scores_of(
    compressed_query, rotated_query, rows, there, latent, WIDTH: tl.constexpr, RANK: tl.constexpr,
    BLOCK_R: tl.constexpr, ROTATED: tl.constexpr, BLOCK_P: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Of latents in a byte a number or more: the compressed part, as it is stored and to multiply with, and scores,
    which scales are not part of yet."""
    dims, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    at = (rows * WIDTH)[:, None]
    read = there[:, None] if RANK == BLOCK_R else there[:, None] & (dims < RANK)[None, :]
    read_turned = there[:, None] if ROTATED == BLOCK_P else there[:, None] & (turned < ROTATED)[None, :]
    stored = tl.load(latent + (at + dims[None, :]), mask=read, other=0.0)
    carrying = tl.load(latent + RANK + (at + turned[None, :]), mask=read_turned, other=0.0)
    compressed = converted(stored, compressed_query.dtype)
    carrying = converted(carrying, compressed_query.dtype)
    if SCALES == 0 or stored.dtype == tl.int8:
        scores = tl.dot(rotated_query, tl.trans(carrying), input_precision="ieee")
    if SCALES == 1:
        fine = tl.load(latent + RANK + ROTATED + (at + turned[None, :]), mask=read_turned, other=0.0)
        fine = converted(fine, compressed_query.dtype)
        if stored.dtype == tl.int8:
            scores = tl.dot(rotated_query, tl.trans(fine), scores * COARSE, input_precision="ieee")
        else:
            finest = tl.dot(rotated_query, tl.trans(fine), input_precision="ieee")
            scores = tl.dot(rotated_query, tl.trans(carrying), finest * (1 / COARSE), input_precision="ieee")
    return compressed, stored, tl.dot(compressed_query, tl.trans(compressed), scores, input_precision="ieee")


@JITFunction
def latent_step(
    accumulator, highest, total, compressed_query, rotated_query, query_scale, visible, rows, there, latent,
    latent_scale, scales_at, score_scale, WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    ROTATED: tl.constexpr, BLOCK_P: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over the latents that begin ``rows`` rows behind ``latent``.

    query_scale: of latents in four bits, see `in_units`; what is summed up of these is in `UNIT`
    there:       bool ``[BLOCK_N]``, which of them may be read
    visible:     bool, one of ``[BLOCK_M, BLOCK_N]`` and ``[1, BLOCK_N]``: who sees what; within ``there``
    """
    if SCALES > 1:
        at = rows * WIDTH
        compressed, carrying = load_groups(
            latent, latent_scale, at, scales_at, there, RANK, BLOCK_R, ROTATED, BLOCK_P, compressed_query.dtype
        )  # fmt: skip
        scores = tl.dot(rotated_query, tl.trans(carrying.to(rotated_query.dtype)), input_precision="ieee")
        scores = tl.dot(compressed_query, tl.trans(compressed), scores, input_precision="ieee") * query_scale[:, None]
    else:
        compressed, stored, scores = scores_of(
            compressed_query, rotated_query, rows, there, latent, WIDTH, RANK, BLOCK_R, ROTATED, BLOCK_P, SCALES
        )  # fmt: skip
    if SCALES == 1:
        scales = tl.load(latent_scale + scales_at, mask=there, other=0.0)
        scores *= scales[None, :]
    scores = tl.where(visible, scores, float("-inf"))

    new_highest = tl.maximum(highest, tl.max(scores, 1) * score_scale)
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a row that has seen nothing yet
    weights = tl.exp2(scores * score_scale - reference[:, None])
    fading = tl.exp2(highest - reference)
    total = total * fading + tl.sum(weights, 1)
    if SCALES == 1:
        if compressed_query.dtype == tl.float16:  # weights times scales may be below its range
            compressed = (converted(stored, tl.float32) * scales[:, None]).to(tl.float16)
        else:
            weights *= scales[None, :]
    weights = weights.to(compressed.dtype)
    accumulator = tl.dot(weights, compressed, accumulator * fading[:, None], input_precision="ieee")
    return accumulator, new_highest, total


@JITFunction
def load_queries(
    absorbed, query, token, head, real, query_stride, heads, head_dim,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROTATED: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Of the rows' tokens and heads, the absorbed part of queries ``[BLOCK_M, BLOCK_R]``, and the rotated one."""
    dims, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    token = token.to(tl.int64)
    at = (token * heads + head) * RANK
    compressed = tl.load(absorbed + at[:, None] + dims[None, :], mask=real[:, None] & (dims < RANK)[None, :], other=0.0)
    at = token * query_stride + head * head_dim + head_dim - ROTATED
    some = real[:, None] & (turned < ROTATED)[None, :]
    return compressed, tl.load(query + at[:, None] + turned[None, :], mask=some, other=0.0)


@JITFunction
def load_gathered(
    gathered, place, real, RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROTATED: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """The same of queries of all ranks, ``[places, RANK + ROTATED]``: both parts lie side by side."""
    dims, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    at = (place * (RANK + ROTATED))[:, None]
    compressed = tl.load(gathered + (at + dims[None, :]), mask=real[:, None] & (dims < RANK)[None, :], other=0.0)
    some = real[:, None] & (turned < ROTATED)[None, :]
    return compressed, tl.load(gathered + RANK + (at + turned[None, :]), mask=some, other=0.0)


@JITFunction
def store_mixed(
    out, counters, partial, partial_lse, accumulator, highest, total, token, first_head, heads, real,
    place, apart, split, used,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    OF_RANKS: tl.constexpr = False, tokens=None, own_heads=None,
):  # fmt: skip
    """The weighted mean of latents of each row, to ``out [tokens, heads, RANK]``, or as part ``split`` of ``used``.

    With ``OF_RANKS``, ``out`` is ``[ranks, tokens, own_heads, RANK + BESIDE]``, see `merge_jit.store_seen`.
    ``token`` and ``first_head`` are the first row's, ``place`` that of its first part, those of other heads ``apart``;
    ``counters`` are those of these parts, see `merge_jit.merge_parts`.
    """
    row = tl.arange(0, BLOCK_M)
    if used > 1:
        at = place + (row % HEADS).to(tl.int64) * apart + split
        store_part(partial, partial_lse, at, accumulator, highest, total, real, RANK, BLOCK_R)
        if OF_RANKS:
            merge_parts(
                counters, partial + place * RANK, partial_lse + place, apart, split, used, out, partial_lse,
                tl.minimum(heads - first_head, HEADS), BLOCK_M, RANK, BLOCK_R, False,
                True, token, first_head, tokens, own_heads,
            )  # fmt: skip
        else:
            merge_parts(
                counters, partial + place * RANK, partial_lse + place, apart, split, used,
                out + (token.to(tl.int64) * heads + first_head) * RANK, partial_lse,
                tl.minimum(heads - first_head, HEADS), BLOCK_M, RANK, BLOCK_R, False,
            )  # fmt: skip
        return
    if OF_RANKS:
        at = place_of(token, first_head + row % HEADS, tokens, own_heads)
        store_seen(out, at, accumulator, highest, total, real, RANK, BLOCK_R)
    else:
        at = ((token + row // HEADS).to(tl.int64) * heads + first_head + row % HEADS) * RANK
        store_mean(out, at, accumulator, total, real, RANK, BLOCK_R)


@JITFunction
def attend_latents(
    absorbed, query, out, counters, partial, partial_lse, latent, latent_scale,
    cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, head_window, head_sink,
    batch, groups, max_blocks, block_bytes, slot_bytes, query_stride, heads, head_dim, score_scale, units,
    fewest_queries, tokens_of_step, own_heads,
    WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROTATED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr, LATENT_BYTES: tl.constexpr, DECODE: tl.constexpr, SCALES: tl.constexpr,
    OF_RANKS: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of query rows over a layer's latents.

    The grid is as many programs for each ``HEADS`` of the heads, side by side, since they read the same latents: with
    ``DECODE`` there are ``units + batch`` of these, for sequences with exactly one query; without, tiles of the batch,
    for those with at least ``fewest_queries``. Splits, ``partial [heads, 2 * units, RANK]``, ``partial_lse`` and
    counters, here for each ``HEADS``, are as of `attention_jit.attend`. ``score_scale`` is ``scale * log2(e)``.

    With ``OF_RANKS``, ``absorbed`` are queries of all ranks, ``[ranks, tokens_of_step, own_heads, RANK + ROTATED]``,
    whose heads, counted one rank after the other, are ``heads``; ``query`` is none. A sequence may have no token here:
    its one tile has none that is visible, and no block is read but for the first one's id.
    """
    pieces = (heads + HEADS - 1) // HEADS
    piece, program = tl.program_id(0) % pieces, tl.program_id(0) // pieces
    window, sink = window_of(head_window, 0), tl.load(head_sink)
    if DECODE:
        unit = program
        per_split = split_of(
            cu_seqlens_q, seq_lens, batch, window, sink, units, units, BLOCK_N, MIN_SPLIT_TILES, MIN_SPLIT_TILES, False
        )  # fmt: skip
        sequence, split = find_unit(
            unit, units + batch, per_split, cu_seqlens_q, seq_lens, batch, window, sink, BLOCK_N, False
        )  # fmt: skip
        if sequence >= batch:
            return
        first = 0
    else:  # the tiles that see most begin first
        split, unit = 0, 0
        sequence, first = find_tile(cu_seqlens_q, batch, tl.num_programs(0) // pieces - 1 - program, TOKENS)
    query_begin = tl.load(cu_seqlens_q + sequence)
    query_count = tl.load(cu_seqlens_q + sequence + 1) - query_begin
    if not DECODE:
        if (first >= query_count) | (query_count < fewest_queries):
            return
    offset = tl.load(seq_lens + sequence) - query_count
    last = offset + tl.minimum(first + TOKENS, query_count) - 1
    tiles, sink_tiles, window_tile = walk_of(offset + first, last, window, sink, BLOCK_N, False)
    begin, end, used = 0, tiles, 1
    if DECODE:
        used = (tiles + per_split - 1) // per_split
        begin = split * per_split
        end = tl.minimum(begin + per_split, tiles)

    row = tl.arange(0, BLOCK_M)
    token = first + row // HEADS
    head = piece * HEADS + row % HEADS
    real = (row < TOKENS * HEADS) & (token < query_count) & (head < heads)
    if OF_RANKS:
        places = place_of(query_begin + token, head, tokens_of_step, own_heads)
        compressed_query, rotated_query = load_gathered(absorbed, places, real, RANK, BLOCK_R, ROTATED, BLOCK_P)
    else:
        compressed_query, rotated_query = load_queries(
            absorbed, query, query_begin + token, head, real, query_stride, heads, head_dim,
            RANK, BLOCK_R, ROTATED, BLOCK_P,
        )  # fmt: skip
    query_scale = 1.0
    if SCALES > 1:
        compressed_query, rotated_query, query_scale = in_units(compressed_query, rotated_query)
    slot = tl.load(head_slot).to(tl.int64)
    latent += slot * (slot_bytes // LATENT_BYTES)
    latent_scale += slot * (slot_bytes // 4)
    table = block_tables + (sequence * groups + tl.load(head_group)).to(tl.int64) * max_blocks
    accumulator = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    within = tl.arange(0, BLOCK_N)
    positions = offset + token
    for step in range(begin, end):
        tile = step + tl.where(step >= sink_tiles, window_tile - sink_tiles, 0)
        tokens = tile * BLOCK_N + within
        if BLOCK_SIZE >= BLOCK_N:  # the tile lies within one block: one base, and offsets that no step computes anew
            block = tl.load(table + tile * BLOCK_N // BLOCK_SIZE)
            there = tokens <= tl.where(block >= 0, last, -1)
            block = tl.maximum(block, 0).to(tl.int64)
            skipped = tile * BLOCK_N % BLOCK_SIZE
            base = latent + block * (block_bytes // LATENT_BYTES) + skipped * WIDTH
            rows, scales_at = within, block * (block_bytes // 4) + (skipped + within) * SCALES
        else:
            block = tl.load(table + tokens // BLOCK_SIZE, mask=tokens <= last, other=-1)
            there = block >= 0
            block = tl.maximum(block, 0).to(tl.int64)
            base = latent + (block * (block_bytes // LATENT_BYTES))[:, None]
            rows, scales_at = tokens % BLOCK_SIZE, block * (block_bytes // 4) + tokens % BLOCK_SIZE * SCALES
        there = there & ((tokens > offset + first - window) | (tokens < sink))
        if DECODE:
            visible = there[None, :]
        else:
            after = tl.where(there, tokens, NEVER)[None, :]
            before = tl.where(tokens < sink, NEVER, tokens)[None, :]
            visible = (after <= positions[:, None]) & (before > (positions - window)[:, None])
        accumulator, highest, total = latent_step(
            accumulator, highest, total, compressed_query, rotated_query, query_scale, visible, rows, there,
            base, latent_scale, scales_at, score_scale, WIDTH, RANK, BLOCK_R, ROTATED, BLOCK_P, SCALES,
        )  # fmt: skip
    if SCALES > 1:
        accumulator *= 1 / UNIT
    first_unit, first_head = unit - split, piece * HEADS
    store_mixed(
        out, counters + piece * (2 * units) + first_unit, partial, partial_lse, accumulator, highest, total,
        query_begin + first, first_head, heads, real,
        first_head.to(tl.int64) * (2 * units) + first_unit, 2 * units, split, used,
        HEADS, BLOCK_M, RANK, BLOCK_R, OF_RANKS, tokens_of_step, own_heads,
    )  # fmt: skip
