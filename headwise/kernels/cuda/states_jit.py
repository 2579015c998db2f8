"""What kernels of recurrent states share, in Triton: where a sequence's states and tokens are, and convolutions.

Programs that overwrite what they have read do so behind a barrier: small tiles lie in several warps alike.
"""
# mypy: ignore-errors
# ruff: noqa: N803, RUF005

import triton.language as tl
from triton.runtime.jit import JITFunction

NEVER = tl.constexpr(1 << 30)
"""More tiles than there are."""

SEARCHED = tl.constexpr(128)
"""Sequences looked at at once when a program finds its own."""

COPIED = tl.constexpr(256)
"""Channels whose last inputs are kept at once."""

FOLLOWS = tl.constexpr(1)
"""`headwise.kernels.base.FOLLOWS`"""


@JITFunction
def sigmoid(x):
    small = tl.exp(-tl.abs(x))  # which does not overflow
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@JITFunction
def softplus(x):
    """``log(1 + exp(x))``, without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@JITFunction
def span_of(cu_seqlens_q, seq_lens, sequence):
    """(first row, tokens, position of the first) of a sequence in the step."""
    begin = tl.load(cu_seqlens_q + sequence)
    count = tl.load(cu_seqlens_q + sequence + 1) - begin
    return begin, count, tl.load(seq_lens + sequence) - count


@JITFunction
def run_of(follows, sequence, batch):
    """How many sequences there are from ``sequence`` on, of one token each, of which each but the first follows the one
    before it; and how many of them, the first ones, have tokens that are no guesses."""
    last, known = sequence, sequence
    while tl.load(follows + last + 1, mask=last + 1 < batch, other=0) != 0:
        last += 1
        known = tl.where(tl.load(follows + last) == FOLLOWS, last, known)
    return last - sequence + 1, known - sequence + 1


@JITFunction
def find_chunk(cu_seqlens_q, batch, tile, CHUNK: tl.constexpr):
    """(sequence, which of its chunks in the step) of the ``tile``-th tile of the batch.

    Sequence ``i`` owns the tiles from ``cu_seqlens_q[i] // CHUNK + 2 * i`` on: enough for its tokens wherever in a
    chunk they begin and end. Tiles left over begin behind their sequence's last token.
    """
    sequence = -1
    for at in range(0, batch, SEARCHED):
        index = at + tl.arange(0, SEARCHED)
        begins = tl.load(cu_seqlens_q + index, mask=index < batch, other=NEVER) // CHUNK + 2 * index
        sequence += tl.sum(((begins <= tile) & (index < batch)).to(tl.int32))
    return sequence, tile - tl.load(cu_seqlens_q + sequence) // CHUNK - 2 * sequence


@JITFunction
def table_of(block_tables, head_group, sequence, head, groups, max_blocks):
    """A sequence's row of the block tables, of a head's group."""
    return block_tables + (sequence * groups + tl.load(head_group + head)).to(tl.int64) * max_blocks


@JITFunction
def source_of(table, start, end, BLOCK_SIZE: tl.constexpr):
    """The block of the state before position ``start``; -1: it is 0."""
    left = tl.load(table + tl.maximum(start - 1, 0) // BLOCK_SIZE)
    moved = tl.load(table + (end - 1) // BLOCK_SIZE)
    return tl.where(start > 0, tl.where(left >= 0, left, moved), -1)


@JITFunction
def left_at(table, start, token, known, BLOCK_SIZE: tl.constexpr):
    """The block of the state behind the ``token``-th of tokens from position ``start`` on, of which the first ``known``
    are no guesses; -1: no state is left there."""
    is_left = (token + 1 == known) | ((token < known) & ((start + token + 1) % BLOCK_SIZE == 0))
    return tl.load(table + (start + token) // BLOCK_SIZE, mask=is_left, other=-1)


@JITFunction
def member_at(arena, block, head_slot, head, block_bytes, slot_bytes):
    """Where a head's states are in a block."""
    slot = tl.load(head_slot + head).to(tl.int64)
    return arena + tl.maximum(block, 0).to(tl.int64) * (block_bytes // 4) + slot * (slot_bytes // 4)


@JITFunction
def convolved(
    inputs, weights, bias, old, earliest, tokens, begin, channel, here,
    ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """SiLU of the causal convolution of the channels ``channel [1, N]`` at the step's ``tokens [M, 1]``, where ``here
    [M, N]`` says so, and else 0. ``bias`` of each channel, or None. ``old``: the inputs before the step's first token,
    of tokens from ``earliest`` on."""
    total = tl.zeros(here.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        back = tokens + (tap - (WIDTH - 1))
        fresh = tl.load(inputs + (begin + back).to(tl.int64) * ROW + channel, mask=here & (back >= 0), other=0.0)
        value = fresh.to(tl.float32)
        if tap < WIDTH - 1:
            before = here & (back < 0) & (back >= earliest)
            value += tl.load(old + (back + (WIDTH - 1)) * CHANNELS + channel, mask=before, other=0.0)
        weight = tl.load(weights + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        total += weight * value
    if bias is not None:
        total = tl.where(here, total + tl.load(bias + channel, mask=channel < CHANNELS, other=0.0), 0.0)
    return total * sigmoid(total)


@JITFunction
def convolved_row(
    inputs, weights, bias, old, earliest, token, begin, channel, here,
    ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`convolved` of one token, ``[1, N]``: the ``token``-th of the step's."""
    tokens = tl.full((1, 1), token, tl.int32)
    return convolved(inputs, weights, bias, old, earliest, tokens, begin, channel, here, ROW, WIDTH, CHANNELS)


@JITFunction
def keep_inputs(
    new, old, earliest, inputs, begin, taken,
    FIRST: tl.constexpr, BEHIND: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The last inputs behind ``taken`` of the step's tokens, of the channels from ``FIRST`` to ``BEHIND``. ``new`` may
    be ``old``: all that is written of a channel is read before, by the thread that has it."""
    for first in range(FIRST, BEHIND, COPIED):
        channel = first + tl.arange(0, COPIED)
        kept = ()
        for row in tl.static_range(WIDTH - 1):
            back = taken - (WIDTH - 1) + row
            at = inputs + (begin + back).to(tl.int64) * ROW + channel
            fresh = tl.load(at, mask=channel < tl.where(back >= 0, BEHIND, 0), other=0.0).to(tl.float32)
            before = channel < tl.where((back < 0) & (back >= earliest), BEHIND, 0)
            fresh += tl.load(old + (back + (WIDTH - 1)) * CHANNELS + channel, mask=before, other=0.0)
            kept = kept + (fresh,)
        for row in tl.static_range(WIDTH - 1):
            tl.store(new + row * CHANNELS + channel, kept[row], mask=channel < BEHIND)


@JITFunction
def window_of(inputs, old, begin, known, channel, here, ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """What a decode convolves, a tile for each tap: of the channels ``channel [1, N]``, where ``here [1, N]`` says so,
    the inputs before the token, if below ``known``, and its own."""
    window = ()
    for tap in tl.static_range(WIDTH - 1):
        before = tl.load(old + tap * CHANNELS + channel, mask=here & (channel < known), other=0.0)
        window = window + (before,)
    fresh = tl.load(inputs + begin.to(tl.int64) * ROW + channel, mask=here, other=0.0)
    return window + (fresh.to(tl.float32),)


@JITFunction
def convolved_window(window, weights, bias, channel, here, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """SiLU of a window's convolution, ``[1, N]``; ``bias`` as in `convolved`."""
    total = tl.zeros(here.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        total += tl.load(weights + tap * CHANNELS + channel, mask=here, other=0.0) * window[tap]
    if bias is not None:
        total += tl.load(bias + channel, mask=here, other=0.0)
    return total * sigmoid(total)


@JITFunction
def keep_window(new, window, kept, channel, here, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """All of a window but its first inputs, of channels below ``kept``, for the next token."""
    for tap in tl.static_range(WIDTH - 1):
        tl.store(new + tap * CHANNELS + channel, window[tap + 1], mask=here & (channel < kept))


@JITFunction
def product(left, right, PRECISION: tl.constexpr):
    """``left @ right``, which is float32. Of two bytes a number, ``left`` is multiplied as it is with ``right`` in two
    parts of as many: tensor cores take it from shared memory, and of ``right`` twice a part's bits are kept."""
    if left.dtype == tl.float32:
        return tl.dot(left, right, input_precision=PRECISION)
    high = right.to(left.dtype)
    low = (right - high.to(tl.float32)).to(left.dtype)
    return tl.dot(left, low, tl.dot(left, high))
