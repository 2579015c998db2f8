"""Latent attention with an indexer (DSA) in Triton: scores of all tokens, and attention to those that were chosen.

A program of scores has one query: its heads are the rows of a tile, whose products with keys are cut off below 0,
weighed and added up. What is chosen of them is decided in between (`indexer.cu`). A program of attention has some heads
of one query, for which it reads the chosen latents one by one from where they lie.

``OF_RANKS`` is for ranks that keep tokens together, see `mla_jit`: queries are those of all of them, and each attends
to those of the chosen tokens that it keeps.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.cached_jit import UNIT, converted
from headwise.kernels.cuda.merge_jit import place_of
from headwise.kernels.cuda.mla_jit import in_units, latent_step, load_gathered, load_queries, store_mixed
from headwise.kernels.cuda.walk_jit import window_of

SEARCHED = tl.constexpr(128)
"""Sequences looked at at once."""

BROKEN = tl.constexpr(-2)
"""In place of a token that was chosen by a score of NaN."""


@JITFunction
def sequence_of(cu_seqlens_q, batch, token):
    """The sequence that a token is of; ``batch`` for one of none."""
    before = 0
    for at in range(0, batch, SEARCHED):
        index = at + tl.arange(0, SEARCHED)
        ends = tl.load(cu_seqlens_q + 1 + index, mask=index < batch, other=token + 1)
        before += tl.sum((ends <= token).to(tl.int32), 0)
    return before


@JITFunction
def score_tokens(
    query, weights, scores, key, key_scale, cu_seqlens_q, seq_lens, block_tables, head_group, head_slot, head_window,
    head_sink, first, batch, groups, max_blocks, block_bytes, slot_bytes, query_stride, weight_stride, score_stride,
    chunks, part, parts,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, KEY_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr,
):  # fmt: skip
    """A chunk of ``TILES * BLOCK_N`` scores ``[rows, score_stride]`` of query ``first + row``.

    Of tokens that are not seen, minus infinity; those behind the query's own are left out. The grid is rows times
    ``chunks``. Tokens are those at positions that are ``part`` modulo ``parts``, and are counted without the others.
    """
    chunk, row = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    token = first + row
    sequence = sequence_of(cu_seqlens_q, batch, token)
    if sequence >= batch:
        return
    of_all = tl.load(seq_lens + sequence) - tl.load(cu_seqlens_q + sequence + 1) + token
    position = (of_all + parts - part) // parts - 1  # of the last one up to the query's own; -1: there is none
    begin = chunk * TILES
    tiles = tl.minimum(TILES, (position + BLOCK_N) // BLOCK_N - begin)
    head, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    at = token.to(tl.int64) * query_stride + head * INDEX_DIM
    some = (head < HEADS)[:, None] & (dims < INDEX_DIM)[None, :]
    queries = tl.load(query + at[:, None] + dims[None, :], mask=some, other=0.0)
    shares = tl.load(weights + token.to(tl.int64) * weight_stride + head, mask=head < HEADS, other=0.0).to(tl.float32)
    slot = tl.load(head_slot).to(tl.int64)
    key += slot * (slot_bytes // KEY_BYTES)
    key_scale += slot * (slot_bytes // 4)
    table = block_tables + (sequence * groups + tl.load(head_group)).to(tl.int64) * max_blocks
    window, sink = window_of(head_window, 0), tl.load(head_sink)
    scores += row.to(tl.int64) * score_stride
    within = tl.arange(0, BLOCK_N)
    for step in range(tiles):
        tokens = (begin + step) * BLOCK_N + within
        block = tl.load(table + tokens // BLOCK_SIZE, mask=tokens <= position, other=-1)
        seen = (block >= 0) & ((tokens > position - window) | (tokens < sink))
        block = tl.maximum(block, 0).to(tl.int64)
        base = block * (block_bytes // KEY_BYTES) + tokens % BLOCK_SIZE * INDEX_DIM
        read = seen[:, None] & (dims < INDEX_DIM)[None, :]
        keys = tl.load(key + base[:, None] + dims[None, :], mask=read, other=0.0)
        of_heads = tl.dot(queries, tl.trans(converted(keys, queries.dtype)), input_precision="ieee")
        of_heads = tl.where(of_heads < 0.0, 0.0, of_heads)  # a comparison: NaN stays NaN
        found = tl.sum(of_heads * shares[:, None], 0)
        if QUANTISED:  # which are above 0: what is cut off is the same
            at_scales = block * (block_bytes // 4) + tokens % BLOCK_SIZE
            found *= tl.load(key_scale + at_scales, mask=seen, other=0.0)
        tl.store(scores + tokens, tl.where(seen, found, float("-inf")), mask=tokens <= position)


@JITFunction
def attend_chosen(
    absorbed, query, out, counters, partial, partial_lse, latent, latent_scale, places, counts, head_slot, block_bytes,
    slot_bytes, query_stride, heads, head_dim, score_scale, top, splits, tokens, own_heads,
    WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROTATED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LATENT_BYTES: tl.constexpr, SCALES: tl.constexpr, OF_RANKS: tl.constexpr,
):  # fmt: skip
    """Attention of some heads of one query to the latents at its places.

    places: ``[tokens, top]``, of which the first ``counts [tokens]`` are there; see `indexer.cu`

    The grid is tokens times ``splits`` times as many programs as heads take. With several splits each writes
    ``partial [heads, tokens, splits, RANK]`` and ``partial_lse``; ``counters [tokens, programs of a split, splits]``
    are 0, and are again at the end.

    With ``OF_RANKS``, ``absorbed`` is ``[ranks, tokens, own_heads, RANK + ROTATED]`` and ``out`` has ``RANK + BESIDE``
    numbers a head, as of `mla_jit.attend_latents`.
    """
    pieces = (heads + HEADS - 1) // HEADS
    piece, split = tl.program_id(0) % pieces, tl.program_id(0) // pieces % splits
    token = tl.program_id(0) // pieces // splits
    count = tl.load(counts + token)
    tiles = (count + BLOCK_N - 1) // BLOCK_N
    per_split = (tiles + splits - 1) // splits
    begin = split * per_split
    end = tl.minimum(begin + per_split, tiles)
    row = tl.arange(0, BLOCK_M)
    head = piece * HEADS + row
    real = (row < HEADS) & (head < heads)
    if OF_RANKS:
        asking = place_of(token, head, tokens, own_heads)
        compressed_query, rotated_query = load_gathered(absorbed, asking, real, RANK, BLOCK_R, ROTATED, BLOCK_P)
    else:
        compressed_query, rotated_query = load_queries(
            absorbed, query, token + row * 0, head, real, query_stride, heads, head_dim, RANK, BLOCK_R, ROTATED, BLOCK_P
        )  # fmt: skip
    query_scale = 1.0
    if SCALES > 1:
        compressed_query, rotated_query, query_scale = in_units(compressed_query, rotated_query)
    slot = tl.load(head_slot).to(tl.int64)
    latent += slot * (slot_bytes // LATENT_BYTES)
    latent_scale += slot * (slot_bytes // 4)
    places += token.to(tl.int64) * top
    accumulator = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lowest = 0
    for step in range(begin, end):
        index = step * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.load(places + index, mask=index < count, other=-1)
        lowest = tl.minimum(lowest, tl.min(place, 0))
        there = place >= 0
        place = tl.maximum(place, 0)
        block, within = (place // BLOCK_SIZE).to(tl.int64), place % BLOCK_SIZE
        base = latent + (block * (block_bytes // LATENT_BYTES))[:, None]
        at_scales = block * (block_bytes // 4) + within * SCALES
        accumulator, highest, total = latent_step(
            accumulator, highest, total, compressed_query, rotated_query, query_scale, there[None, :], within,
            there, base, latent_scale, at_scales, score_scale, WIDTH, RANK, BLOCK_R, ROTATED, BLOCK_P, SCALES,
        )  # fmt: skip
    if SCALES > 1:
        accumulator *= 1 / UNIT
    total = tl.where(lowest == BROKEN, float("nan"), total)
    first_head = piece * HEADS
    store_mixed(
        out, counters + (token * pieces + piece) * splits, partial, partial_lse, accumulator, highest, total,
        token, first_head, heads, real, (first_head.to(tl.int64) * tokens + token) * splits, tokens * splits,
        split, splits, HEADS, BLOCK_M, RANK, BLOCK_R, OF_RANKS, tokens, own_heads,
    )  # fmt: skip
