"""What decodes that go on from one prefix see of it, in Triton: its keys and values are read once for all of them.

A program serves one KV head of one group: sequences beside each other, of one query each, whose first blocks are the
same. Their query heads of that KV head are the rows of its tile, sequence by sequence, as those of a prompt's tokens
are; every row sees every key, so nothing is masked. The prefix is cut into splits, as what a decode sees is, and the
last split of a group merges them.

What comes of it is not a result yet: the mean of values and the log-sum-exp of each row, from which `attention_jit`
goes on with what each sequence sees besides.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.attention_jit import attend_tile
from headwise.kernels.cuda.cached_jit import UNIT, as_float16
from headwise.kernels.cuda.merge_jit import BESIDE, merge_parts, place_of, store_part, store_seen
from headwise.kernels.cuda.overlap_jit import let_next_begin, wait_for_earlier
from headwise.kernels.cuda.walk_jit import NEVER, TOGETHER, find_unit, split_of, window_of


@JITFunction
def attend_joint(
    query, seen, counters, partial, partial_lse, key, value, key_scale, value_scale,
    cu_seqlens_q, seq_lens, block_tables, joint, head_group, head_slot, head_window, batch, kv_heads, groups,
    max_blocks, block_bytes, slot_bytes, query_stride, score_scale, cap, units, fewest_units,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr,
    SPLIT_TILES: tl.constexpr, KV_BYTES: tl.constexpr, SOFTCAP: tl.constexpr, QUANTISED: tl.constexpr,
    PACKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Attention of one group of decodes over some of the prefix that they share.

    The grid is (``units + batch``, KV heads); ``joint [3, batch]`` is `AttentionBatch.joint`. A group's rows of one KV
    head are no more than ``BLOCK_M``, and its prefix is whole tiles. ``seen [tokens, query heads, VALUE_DIM + BESIDE]``
    is as `merge_jit.store_seen` has it; of sequences in no group, and of heads with a window, nothing is written.
    Splits of a group leave ``partial [KV heads * BLOCK_M, 2 * units, VALUE_DIM]`` and ``partial_lse``; the rest is as
    for `attention_jit.attend`.
    """
    if OVERLAPS:
        let_next_begin()
    unit, kv_head = tl.program_id(0), tl.program_id(1)
    window = window_of(head_window, kv_head)
    per_split = split_of(
        cu_seqlens_q, seq_lens, batch, window, 0, units, fewest_units,
        BLOCK_N, MIN_SPLIT_TILES, SPLIT_TILES, False, joint, TOGETHER,
    )  # fmt: skip
    first, split = find_unit(
        unit, units + batch, per_split, cu_seqlens_q, seq_lens, batch, window, 0, BLOCK_N, False, joint, TOGETHER
    )  # fmt: skip
    if OVERLAPS:  # not before: what groups share is there since before the step
        wait_for_earlier()
    if first >= batch:
        return
    tokens = tl.load(joint + first)
    members = tl.load(joint + batch + first)
    tiles = tokens // BLOCK_N
    used = (tiles + per_split - 1) // per_split
    begin = split * per_split
    end = tl.minimum(begin + per_split, tiles)

    row = tl.arange(0, BLOCK_M)
    member = row // SHARE
    head = kv_head * SHARE + row % SHARE
    dims = tl.arange(0, BLOCK_D)
    real_row = member < members
    query_begin = tl.load(cu_seqlens_q + first)
    at_query = (query_begin + member).to(tl.int64) * query_stride + head * HEAD_DIM
    real = real_row[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(query + at_query[:, None] + dims[None, :], mask=real, other=0.0)
    score_scale = tl.full([BLOCK_M], 1.0, tl.float32) * score_scale
    if PACKED:
        score_scale /= UNIT
    if (PACKED or QUANTISED) and queries.dtype == tl.bfloat16:
        queries, largest = as_float16(queries)
        score_scale *= largest

    group = tl.load(head_group + kv_head)
    slot = tl.load(head_slot + kv_head).to(tl.int64)
    slot_base = slot * (slot_bytes // KV_BYTES)
    scale_base = slot * (slot_bytes // 4)
    table = block_tables + (first * groups + group).to(tl.int64) * max_blocks
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for step in range(begin, end):
        accumulator, highest, total = attend_tile(
            accumulator, highest, total, queries, 0, 0, step, 0, tokens - 1, NEVER, 0,
            key + slot_base, value + slot_base, key_scale + scale_base, value_scale + scale_base, table,
            block_bytes // KV_BYTES, block_bytes // 4, score_scale, cap,
            HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, False, True, SOFTCAP, QUANTISED, PACKED, False,
            VALUE_DIM, BLOCK_V, False,
        )  # fmt: skip
    if PACKED:
        accumulator /= UNIT

    seen += query_begin.to(tl.int64) * (kv_heads * SHARE) * (VALUE_DIM + BESIDE)
    if used > 1:
        first_row = (kv_head * BLOCK_M).to(tl.int64) * (2 * units) + unit
        store_part(
            partial, partial_lse, first_row + row.to(tl.int64) * (2 * units), accumulator, highest, total, real_row,
            VALUE_DIM, BLOCK_V,
        )  # fmt: skip
        first_place = first_row - split
        merge_parts(
            counters + kv_head * (2 * units) + unit - split, partial + first_place * VALUE_DIM,
            partial_lse + first_place, 2 * units, split, used, seen, partial_lse, members * SHARE,
            BLOCK_M, VALUE_DIM, BLOCK_V, False, True, kv_head, 0, kv_heads, SHARE,
        )  # fmt: skip
    else:
        place = place_of(kv_head, row, kv_heads, SHARE)
        store_seen(seen, place, accumulator, highest, total, real_row, VALUE_DIM, BLOCK_V)
