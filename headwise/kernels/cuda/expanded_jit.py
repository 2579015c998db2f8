"""Latent attention (MLA) of prompts in the expanded form, in Triton: latents gathered, and attention to what they make.

A sequence's latents are brought side by side, some thousand at a time (a *piece* of its context); products with the
up-projections, which cuBLAS computes, make each head's keys and values of them. A program attends with ``BLOCK_M``
queries of one head to a piece; where there are several pieces, its softmax under way waits in memory for the next.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.cached_jit import UNIT, converted
from headwise.kernels.cuda.mla_jit import COARSE, load_groups
from headwise.kernels.cuda.walk_jit import window_of


@JITFunction
def blocks_of(block_tables, head_group, sequence, groups, max_blocks, positions, some, BLOCK_SIZE: tl.constexpr):
    """The blocks that hold a sequence's positions; -1 of those that are none of ``some``, or have no block."""
    table = block_tables + (sequence * groups + tl.load(head_group)).to(tl.int64) * max_blocks
    return tl.load(table + positions // BLOCK_SIZE, mask=some, other=-1)


@JITFunction
def gather_latents(
    latent, latent_scale, block_tables, head_group, head_slot, gathered, sequence, groups, max_blocks, block_bytes,
    slot_bytes, first, count,
    WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROTATED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LATENT_BYTES: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``gathered [count, RANK + ROTATED]``: a sequence's latents from position ``first`` on; without a block, zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    some = row < count
    block = blocks_of(block_tables, head_group, sequence, groups, max_blocks, first + row, some, BLOCK_SIZE)
    mapped, block = block >= 0, tl.maximum(block, 0).to(tl.int64)
    slot, within = tl.load(head_slot).to(tl.int64), (first + row) % BLOCK_SIZE
    at = block * (block_bytes // LATENT_BYTES) + slot * (slot_bytes // LATENT_BYTES) + within * WIDTH
    at_scale = block * (block_bytes // 4) + slot * (slot_bytes // 4) + within * SCALES
    dims, turned = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    if SCALES > 1:
        compressed, carrying = load_groups(
            latent, latent_scale, at, at_scale, mapped, RANK, BLOCK_R, ROTATED, BLOCK_P, tl.float32
        )  # fmt: skip
        compressed, carrying = compressed * (1 / UNIT), carrying * (1 / UNIT)
    else:
        there, at = mapped[:, None], at[:, None]
        compressed = converted(tl.load(latent + at + dims, mask=there & (dims < RANK), other=0.0), tl.float32)
        carrying = tl.load(latent + at + RANK + turned, mask=there & (turned < ROTATED), other=0.0)
        carrying = converted(carrying, tl.float32)
    if SCALES == 1:
        fine = tl.load(latent + at + RANK + ROTATED + turned, mask=there & (turned < ROTATED), other=0.0)
        scales = tl.load(latent_scale + at_scale[:, None], mask=there, other=0.0)
        compressed *= scales
        fine = converted(fine, tl.float32)
        if latent.dtype.element_ty == tl.int8:
            carrying = (carrying * COARSE + fine) * scales
        else:
            carrying = (carrying + fine * (1 / COARSE)) * scales
    at_out = row.to(tl.int64)[:, None] * (RANK + ROTATED)
    dtype = gathered.dtype.element_ty
    tl.store(gathered + at_out + dims, compressed.to(dtype), mask=some[:, None] & (dims < RANK))
    tl.store(gathered + at_out + RANK + turned, carrying.to(dtype), mask=some[:, None] & (turned < ROTATED))


@JITFunction
def load_rows(at, row, stride, some, dims, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``[row, SIZE]`` that begin ``stride`` elements apart; zeros where ``some`` says no."""
    mask = some[:, None] if SIZE == BLOCK else some[:, None] & (dims < SIZE)[None, :]
    return tl.load(at + row.to(tl.int64)[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@JITFunction
def attend_expanded(
    query, out, keys, values, latents, mixed, top, sums, block_tables, head_group, head_window, head_sink,
    sequence, groups, max_blocks, first, count, queries, context, heads, query_stride, out_stride, score_scale,
    is_first, is_last,
    PLAIN: tl.constexpr, BLOCK_K: tl.constexpr, ROTATED: tl.constexpr, BLOCK_P: tl.constexpr, RANK: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of a sequence's last ``queries`` tokens to ``count`` tokens of its ``context`` from ``first`` on.

    query:   ``[queries, heads, PLAIN + ROTATED]``, tokens ``query_stride`` apart; out: ``[queries, heads, VALUE]``
    keys:    ``[count, heads, PLAIN]``; values: ``[count, heads, VALUE]``; latents: ``[count, RANK + ROTATED]``
    mixed, top, sums: float32 ``[queries, heads, VALUE]`` and twice ``[queries, heads]``, the softmax under way
    The grid is tiles of queries times heads. ``score_scale`` is ``scale * log2(e)``.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the tiles that see most begin first
    head = program % heads
    row = program // heads * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < queries
    positions = context - queries + row
    dims, turned, value_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    query += head * (PLAIN + ROTATED)
    plain_query = load_rows(query, row, query_stride, real, dims, PLAIN, BLOCK_K)
    rotated_query = load_rows(query + PLAIN, row, query_stride, real, turned, ROTATED, BLOCK_P)
    window, sink = window_of(head_window, 0), tl.load(head_sink)
    at_state = row * heads + head
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if is_first == 0:
        highest = tl.load(top + at_state, mask=real, other=float("-inf"))
        total = tl.load(sums + at_state, mask=real, other=0.0)
        accumulator = load_rows(mixed, at_state, VALUE, real, value_dims, VALUE, BLOCK_V)
    last = tl.minimum(context - queries + program // heads * BLOCK_M + BLOCK_M, context) - first
    for begin in range(0, tl.minimum(count, last), BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        some = key < count
        block = blocks_of(block_tables, head_group, sequence, groups, max_blocks, first + key, some, BLOCK_SIZE)
        there, position = block >= 0, (first + key)[None, :]
        plain = load_rows(keys + head * PLAIN, key, heads * PLAIN, some, dims, PLAIN, BLOCK_K)
        carrying = load_rows(latents + RANK, key, RANK + ROTATED, some, turned, ROTATED, BLOCK_P)
        scores = tl.dot(rotated_query, tl.trans(carrying), input_precision="ieee")
        scores = tl.dot(plain_query, tl.trans(plain), scores, input_precision="ieee")
        visible = there[None, :] & (position <= positions[:, None])
        visible = visible & ((position > (positions - window)[:, None]) | (position < sink))
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * score_scale)
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a row that has seen nothing yet
        weights = tl.exp2(scores * score_scale - reference[:, None])
        fading = tl.exp2(highest - reference)
        total = total * fading + tl.sum(weights, 1)
        value = load_rows(values + head * VALUE, key, heads * VALUE, some, value_dims, VALUE, BLOCK_V)
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator * fading[:, None], input_precision="ieee")
        highest = new_highest
    if is_last == 0:
        tl.store(top + at_state, highest, mask=real)
        tl.store(sums + at_state, total, mask=real)
        at_mixed = at_state.to(tl.int64)[:, None] * VALUE + value_dims[None, :]
        tl.store(mixed + at_mixed, accumulator, mask=real[:, None] & (value_dims < VALUE)[None, :])
        return
    accumulator = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    at_out = row.to(tl.int64)[:, None] * out_stride + head * VALUE + value_dims[None, :]
    mask = real[:, None] & (value_dims < VALUE)[None, :]
    tl.store(out + at_out, accumulator.to(out.dtype.element_ty), mask=mask)
