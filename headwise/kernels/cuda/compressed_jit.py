"""Attention to a window of tokens, and behind it to entries of several tokens each (DeepSeek-V4), in Triton.

All of a query's heads share what it sees, and a row of that is key and value at once: a program has some heads of one
query, for which it reads each row once. First come tiles of the window, then tiles of entries: of all up to the query's
own, found by the block table, or with ``CHOSEN`` of those that an indexer chose (`indexer.cu`), by their places. Splits
cut the tiles of both as one walk.

Rows in int8 and E4M3 have a scale each, and bytes of rotated numbers behind their codes: see
`headwise.kernels.compressed_rows`. They become numbers of the queries' dtype on the way to shared memory; scales weigh
scores, and then what is summed up.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.cached_jit import converted
from headwise.kernels.cuda.dsa_jit import BROKEN, sequence_of
from headwise.kernels.cuda.merge_jit import merge_parts, store_mean, store_part, with_sink
from headwise.kernels.cuda.mla_jit import COARSE
from headwise.kernels.cuda.walk_jit import window_of

SCALE_BYTES = tl.constexpr(4)


@JITFunction
def turned_columns(SIZE: tl.constexpr, TURNING: tl.constexpr, BLOCK_T: tl.constexpr):
    """Which numbers of a row turn: some of its first half, then as many of the second."""
    column = tl.arange(0, BLOCK_T)
    return column // TURNING * (SIZE // 2) + column % TURNING


@JITFunction
def load_turned(rows, at, there, SIZE: tl.constexpr, TURNING: tl.constexpr, BLOCK_T: tl.constexpr, DTYPE: tl.constexpr):
    """Of rows in int8 or E4M3 the numbers that turn, of two bytes each, ``[BLOCK_N, BLOCK_T]``, but scales."""
    column = tl.arange(0, BLOCK_T)
    read = there[:, None] & (column < 2 * TURNING)[None, :]
    coarse = tl.load(rows + (at[:, None] + turned_columns(SIZE, TURNING, BLOCK_T)[None, :]), mask=read, other=0.0)
    fine = tl.load(rows + (at[:, None] + (SIZE + column)[None, :]), mask=read, other=0.0)
    if coarse.dtype == tl.int8:
        return (coarse.to(tl.float32) * COARSE + fine.to(tl.float32)).to(DTYPE)
    return (coarse.to(tl.float32) + fine.to(tl.float32) * (1 / COARSE)).to(DTYPE)


@JITFunction
def rows_step(
    accumulator, turned_sum, highest, total, queries, turned_queries, rows, scales, at, scale_at, there, score_scale,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr, TURNING: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over the rows that begin ``at`` numbers behind ``rows``, int64 ``[BLOCK_N]``.

    Of rows with scales, ``scale_at`` behind ``scales``, the numbers that turn are multiplied and summed up by
    themselves; ``queries`` are 0 there, and so many columns of ``accumulator`` mean nothing.
    """
    dims = tl.arange(0, BLOCK_D)
    read = there[:, None] if SIZE == BLOCK_D else there[:, None] & (dims < SIZE)[None, :]
    seen = tl.load(rows + (at[:, None] + dims[None, :]), mask=read, other=0.0)
    if SCALED:
        seen = converted(seen, queries.dtype)
        turned = load_turned(rows, at, there, SIZE, TURNING, BLOCK_T, queries.dtype)
        scores = tl.dot(turned_queries, tl.trans(turned), input_precision="ieee")
        scores = tl.dot(queries, tl.trans(seen), scores, input_precision="ieee")
        scale = tl.load(scales + scale_at, mask=there, other=0.0)
        scores *= scale[None, :]
    else:
        scores = tl.dot(queries, tl.trans(seen), input_precision="ieee")
    scores = tl.where(there[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * score_scale)
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a row that has seen nothing yet
    weights = tl.exp2(scores * score_scale - reference[:, None])
    fading = tl.exp2(highest - reference)
    total = total * fading + tl.sum(weights, 1)
    if SCALED:
        weights *= scale[None, :]
        turned_sum = tl.dot(weights.to(turned.dtype), turned, turned_sum * fading[:, None], input_precision="ieee")
    accumulator = tl.dot(weights.to(seen.dtype), seen, accumulator * fading[:, None], input_precision="ieee")
    return accumulator, turned_sum, new_highest, total


@JITFunction
def store_turned(
    out, at, turned_sum, total, real, SIZE: tl.constexpr, TURNING: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """The numbers that turn, of rows which `merge_jit.store_mean` has stored before."""
    tl.debug_barrier()  # other threads stored there
    columns = turned_columns(SIZE, TURNING, BLOCK_T)
    mean = (turned_sum / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    some = real[:, None] & (tl.arange(0, BLOCK_T) < 2 * TURNING)[None, :]
    tl.store(out + at[:, None] + columns[None, :], mean, mask=some)


@JITFunction
def attend_compressed(
    query, out, counters, partial, partial_lse, sink_logits, window_rows, entry_rows, window_scales,
    entry_scales, places, counts,
    cu_seqlens_q, seq_lens, block_tables, window_group, window_slot, head_window, entry_group, entry_slot,
    batch, groups, max_blocks, block_bytes, window_slot_bytes, entry_slot_bytes, query_stride, heads, score_scale,
    top, splits, tokens, entry_width, entry_beside,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr, NUMBER_BYTES: tl.constexpr, SCALED: tl.constexpr,
    TURNING: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    RATE: tl.constexpr, BLOCK_ENTRIES: tl.constexpr, CHOSEN: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of some heads of one query.

    window_rows, entry_rows: where the first block's rows of slot 0 are; of entries, ``entry_width`` numbers each, the
    layer's own part
    window_scales, entry_scales: likewise of scales, with ``SCALED``; of those an entry has ``entry_beside``
    places: ``[tokens, top]``, of which the first ``counts [tokens]`` are there; see `indexer.cu`

    ``RATE`` is tokens of an entry, or 0 where a layer has none; a block has ``BLOCK_ENTRIES``. The grid is tokens times
    ``splits`` times as many programs as heads take; splits, ``partial`` and ``counters`` are as of
    `dsa_jit.attend_chosen`. ``score_scale`` is ``scale * log2(e)``.
    """
    pieces = (heads + HEADS - 1) // HEADS
    piece, split = tl.program_id(0) % pieces, tl.program_id(0) // pieces % splits
    token = tl.program_id(0) // pieces // splits
    sequence = sequence_of(cu_seqlens_q, batch, token)
    if sequence >= batch:
        return
    position = tl.load(seq_lens + sequence) - tl.load(cu_seqlens_q + sequence + 1) + token
    first = tl.maximum(position - window_of(head_window, 0) + 1, 0)
    window_tiles = (position - first + BLOCK_N) // BLOCK_N
    tiles, entries = window_tiles, 0
    if RATE > 0:
        entries = tl.load(counts + token) if CHOSEN else (position + 1) // RATE
        tiles += (entries + BLOCK_N - 1) // BLOCK_N
    per_split = (tiles + splits - 1) // splits
    begin = split * per_split
    end = tl.minimum(begin + per_split, tiles)

    row, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = piece * HEADS + row
    real = (row < HEADS) & (head < heads)
    at_queries = token.to(tl.int64) * query_stride + head * SIZE
    some = real[:, None] & (dims < SIZE)[None, :]
    turned_queries = None
    if SCALED:
        some = some & (dims % (SIZE // 2) >= TURNING)[None, :]
        at_turned = at_queries[:, None] + turned_columns(SIZE, TURNING, BLOCK_T)[None, :]
        those = real[:, None] & (tl.arange(0, BLOCK_T) < 2 * TURNING)[None, :]
        turned_queries = tl.load(query + at_turned, mask=those, other=0.0)
    queries = tl.load(query + at_queries[:, None] + dims[None, :], mask=some, other=0.0)
    table = block_tables + (sequence * groups).to(tl.int64) * max_blocks
    within = tl.arange(0, BLOCK_N)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    turned_sum = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    window_table = table + tl.load(window_group).to(tl.int64) * max_blocks
    window_rows += tl.load(window_slot).to(tl.int64) * (window_slot_bytes // NUMBER_BYTES)
    window_scales += tl.load(window_slot).to(tl.int64) * (window_slot_bytes // SCALE_BYTES)
    for step in range(begin, tl.minimum(end, window_tiles)):
        place = first + step * BLOCK_N + within
        block = tl.load(window_table + place // BLOCK_SIZE, mask=place <= position, other=-1)
        there = block >= 0
        block = tl.maximum(block, 0).to(tl.int64)
        at = block * (block_bytes // NUMBER_BYTES) + place % BLOCK_SIZE * (SIZE + 2 * TURNING)
        scale_at = block * (block_bytes // SCALE_BYTES) + place % BLOCK_SIZE
        accumulator, turned_sum, highest, total = rows_step(
            accumulator, turned_sum, highest, total, queries, turned_queries, window_rows, window_scales, at, scale_at,
            there, score_scale, SIZE, BLOCK_D, SCALED, TURNING, BLOCK_T,
        )  # fmt: skip

    if RATE > 0:
        entry_table = table + tl.load(entry_group).to(tl.int64) * max_blocks
        entry_rows += tl.load(entry_slot).to(tl.int64) * (entry_slot_bytes // NUMBER_BYTES)
        entry_scales += tl.load(entry_slot).to(tl.int64) * (entry_slot_bytes // SCALE_BYTES)
        chosen = places + token.to(tl.int64) * top
        lowest = 0
        for step in range(tl.maximum(begin, window_tiles), end):
            entry = (step - window_tiles) * BLOCK_N + within
            if CHOSEN:
                found = tl.load(chosen + entry, mask=entry < entries, other=-1)
                lowest = tl.minimum(lowest, tl.min(found, 0))
                there = found >= 0
                found = tl.maximum(found, 0)
                block, place = found // BLOCK_ENTRIES, found % BLOCK_ENTRIES
            else:
                column = ((entry + 1) * RATE - 1) // BLOCK_SIZE
                block = tl.load(entry_table + column, mask=entry < entries, other=-1)
                there = block >= 0
                block, place = tl.maximum(block, 0), entry % BLOCK_ENTRIES
            at = block.to(tl.int64) * (block_bytes // NUMBER_BYTES) + place * entry_width
            scale_at = block.to(tl.int64) * (block_bytes // SCALE_BYTES) + place * entry_beside
            accumulator, turned_sum, highest, total = rows_step(
                accumulator, turned_sum, highest, total, queries, turned_queries, entry_rows, entry_scales, at,
                scale_at, there, score_scale, SIZE, BLOCK_D, SCALED, TURNING, BLOCK_T,
            )  # fmt: skip
        total = tl.where(lowest == BROKEN, float("nan"), total)

    first_head = piece * HEADS
    result = (token.to(tl.int64) * heads + first_head) * SIZE
    if splits > 1:
        place = (first_head.to(tl.int64) * tokens + token) * splits
        apart = tokens * splits
        part = place + row.to(tl.int64) * apart + split
        store_part(partial, partial_lse, part, accumulator, highest, total, real, SIZE, BLOCK_D)
        if SCALED:
            store_turned(partial, part * SIZE, turned_sum, total, real, SIZE, TURNING, BLOCK_T)
        merge_parts(
            counters + (token * pieces + piece) * splits, partial + place * SIZE, partial_lse + place, apart, split,
            splits, out + result, sink_logits + first_head, tl.minimum(heads - first_head, HEADS),
            BLOCK_M, SIZE, BLOCK_D, True,
        )  # fmt: skip
        return
    total = with_sink(total, highest, tl.load(sink_logits + head, mask=real, other=0.0))
    store_mean(out, result + row.to(tl.int64) * SIZE, accumulator, total, real, SIZE, BLOCK_D)
    if SCALED:
        store_turned(out, result + row.to(tl.int64) * SIZE, turned_sum, total, real, SIZE, TURNING, BLOCK_T)
