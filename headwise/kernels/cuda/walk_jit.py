"""Which tiles of positions a program of attention walks, in Triton: of what its head sees, and of whose queries.

Keys come in tiles of ``BLOCK_N`` positions. A windowed head sees two spans, its sinks and its window; the
walk numbers the tiles of both without a gap, so that one loop serves every head with nothing but its bounds coming from
the lengths, and its cost does not grow with the context between the spans. There is no branch in that loop, which
would keep the compiler from overlapping loads with arithmetic: what must not be seen is masked.

        position   0 ...        sink                      window start ...      last query
        tiles      [ 0 ][ 1 ]                             [ 2 ][ 3 ][ 4 ][ 5 ]

With ``CHUNKED`` a head's window is a chunk: it begins at the last multiple of its length, not that many tokens back.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

NEVER = tl.constexpr(1 << 30)
"""A position no query reaches."""

SEARCHED = tl.constexpr(128)
"""Sequences looked at at once when a program finds its own."""

MAX_SPLITS = tl.constexpr(128)
"""Of one sequence, for one head."""


TOGETHER = tl.constexpr(1)
"""What of sequences is counted: what groups of them see together, at the first of each (`joint_jit`)."""
APART = tl.constexpr(2)
"""Likewise: what each sees besides."""


# `JITFunction`, not `triton.jit`, which an environment variable turns into something else.
@JITFunction
def unseen_before(position, window, CHUNKED: tl.constexpr):
    """Position in front of a query's window, or with ``CHUNKED`` of its chunk; below 0 if there is none."""
    if CHUNKED:
        return position // window * window - 1
    return position - window


@JITFunction
def walk_of(first, last, window, sink, BLOCK_N: tl.constexpr, CHUNKED: tl.constexpr):
    """(tiles, tiles of the sink span, first tile of the window span) for queries at positions ``first`` to ``last``.

    Of a query without a token, at position -1, one tile: quotients are rounded towards 0.
    """
    window_tile = tl.maximum(unseen_before(first, window, CHUNKED) + 1, 0) // BLOCK_N
    sink_tiles = tl.minimum((sink + BLOCK_N - 1) // BLOCK_N, window_tile)
    return sink_tiles + last // BLOCK_N + 1 - window_tile, sink_tiles, window_tile


@JITFunction
def window_of(head_window, kv_head):
    """Tokens the head sees back from its query, without a special case for full attention."""
    window = tl.load(head_window + kv_head)
    return tl.where(window > 0, window, NEVER)


@JITFunction
def tiles_of(
    index, cu_seqlens_q, seq_lens, batch, window, sink, BLOCK_N: tl.constexpr, CHUNKED: tl.constexpr,
    joint=None, OF_JOINT: tl.constexpr = None,
):  # fmt: skip
    """Tiles that a head sees of each sequence of ``index``; 0 of those that do not decode, or are none. joint: see
    `AttentionBatch.joint`; which of these tiles are counted, ``OF_JOINT`` says: None, all."""
    here = index < batch
    if OF_JOINT == TOGETHER:
        return tl.where(window == NEVER, tl.load(joint + index, mask=here, other=0) // BLOCK_N, 0)
    queries = tl.load(cu_seqlens_q + index + 1, mask=here, other=0) - tl.load(cu_seqlens_q + index, mask=here, other=0)
    decodes = here & (queries == 1)
    position = tl.load(seq_lens + index, mask=decodes, other=1) - 1
    tiles, _, _ = walk_of(position, position, window, sink, BLOCK_N, CHUNKED)
    if OF_JOINT == APART:
        before = tl.load(joint + 2 * batch + index, mask=here, other=0)
        tiles -= tl.where(window == NEVER, before // BLOCK_N, 0)
    return tl.where(decodes, tiles, 0)


@JITFunction
def split_of(
    cu_seqlens_q, seq_lens, batch, window, sink, units, fewest_units,
    BLOCK_N: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, SPLIT_TILES: tl.constexpr, CHUNKED: tl.constexpr,
    joint=None, OF_JOINT: tl.constexpr = None,
):  # fmt: skip
    """Tiles per split, for all sequences alike: ``SPLIT_TILES``, but less where all that a head sees would not make
    ``fewest_units`` of them, more where it would make more than ``units``; and as many as pay at least."""
    total, longest = 0, 0
    for at in range(0, batch, SEARCHED):
        index = at + tl.arange(0, SEARCHED)
        tiles = tiles_of(index, cu_seqlens_q, seq_lens, batch, window, sink, BLOCK_N, CHUNKED, joint, OF_JOINT)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    wanted = tl.minimum((total + fewest_units - 1) // fewest_units, SPLIT_TILES)
    most = tl.maximum((total + units - 1) // units, (longest + MAX_SPLITS - 1) // MAX_SPLITS)
    return tl.maximum(tl.maximum(wanted, most), MIN_SPLIT_TILES)


@JITFunction
def find_unit(
    unit, programs, per_split, cu_seqlens_q, seq_lens, batch, window, sink,
    BLOCK_N: tl.constexpr, CHUNKED: tl.constexpr, joint=None, OF_JOINT: tl.constexpr = None,
):  # fmt: skip
    """(sequence, split) of a program's unit of work; a sequence that is none where there is nothing to do.

    Splits of sequences that have several come first, since they are the longest; sequences in one piece are counted
    from the last program on. So both are found in one pass, and a split's number is its place among partial results.
    """
    of_split, splits_before, of_whole, splits_all, whole_all = 0, 0, 0, 0, 0
    back = programs - 1 - unit
    for at in range(0, batch, SEARCHED):
        index = at + tl.arange(0, SEARCHED)
        tiles = tiles_of(index, cu_seqlens_q, seq_lens, batch, window, sink, BLOCK_N, CHUNKED, joint, OF_JOINT)
        splits = (tiles + per_split - 1) // per_split
        whole = (splits == 1).to(tl.int32)
        splits = tl.where(splits > 1, splits, 0)
        is_before = (splits_all + tl.cumsum(splits, 0) <= unit) & (index < batch)
        of_split += tl.sum(is_before.to(tl.int32), 0)
        splits_before += tl.sum(tl.where(is_before, splits, 0), 0)
        of_whole += tl.sum(((whole_all + tl.cumsum(whole, 0) <= back) & (index < batch)).to(tl.int32), 0)
        splits_all += tl.sum(splits, 0)
        whole_all += tl.sum(whole, 0)
    sequence = tl.where(unit < splits_all, of_split, of_whole)
    return sequence, tl.where(unit < splits_all, unit - splits_before, 0)


@JITFunction
def find_tile(cu_seqlens_q, batch, tile, TOKENS: tl.constexpr):
    """(sequence, its query token) that the ``tile``-th tile of the batch begins at.

    Sequence ``i`` owns the tiles from ``cu_seqlens_q[i] // TOKENS + i`` on: enough for its tokens whatever their
    number, and known without a prefix sum. Tiles left over begin behind their sequence's last token.
    """
    sequence = -1
    for at in range(0, batch, SEARCHED):
        index = at + tl.arange(0, SEARCHED)
        begins = tl.load(cu_seqlens_q + index, mask=index < batch, other=NEVER) // TOKENS + index
        sequence += tl.sum(((begins <= tile) & (index < batch)).to(tl.int32))
    begin = tl.load(cu_seqlens_q + sequence) // TOKENS + sequence
    return sequence, (tile - begin) * TOKENS
