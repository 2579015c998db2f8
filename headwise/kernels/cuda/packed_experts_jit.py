"""Products of tokens with experts whose weights are codes, in Triton: `experts_jit` with weights of `packed_jit`.

Codes are read as they lie, for any number of rows: nothing is expanded in memory. A tile's weights are made in
registers, rounded to the dtype of tokens. Tiles of few rows multiply codes, and apply scales to sums: they are in
`packed_experts.cu`, but for those of float32, which tensor cores would round.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.codes_jit import nibbles_of, numbers_of
from headwise.kernels.cuda.experts_jit import finish
from headwise.kernels.cuda.packed_jit import group_of


@JITFunction
def with_codes(total, values, numbers, scale, minimum, MINIMA: tl.constexpr):
    """``total [M, N]`` and what ``values [M, K]`` and ``numbers [N, K]`` of one group add; ``scale``: where its are."""
    weights = numbers.to(tl.float32) * tl.load(scale)[:, None]
    if MINIMA:
        weights += tl.load(minimum)[:, None]
    return tl.dot(values, tl.trans(weights.to(values.dtype)), total, input_precision="ieee")


@JITFunction
def multiply_packed_experts(
    x, codes, scale, minimum, bias, shares, out, order, tile_expert, width, depth, per_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    FLOATS: tl.constexpr, MINIMA: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """`multiply_experts` of codes ``[experts, width, depth * BITS / 8]``, or where it is ``GATED`` twice as wide.

    scale, minimum: ``[experts, depth / GROUP, width]``, or twice as wide
    ``BLOCK_K`` is bytes of a row's codes; it divides them, and ``GROUP``.
    """
    columns = (width + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // columns
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    column = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(column, width - 1)
    inner = tl.arange(0, BLOCK_K)
    rows = x + (tl.maximum(place, 0) // per_row).to(tl.int64)[:, None] * depth + inner[None, :]
    row_bytes = tl.multiple_of(depth * BITS // 8, 16)
    every = width
    if GATED:
        expert *= 2
        every = 2 * width
    left = codes + (expert * width + read)[:, None] * row_bytes + inner[None, :]
    right = left + width.to(tl.int64) * row_bytes
    groups = 1 if GROUP == 0 else depth // GROUP
    scale += expert * width * groups + read
    minimum += expert * width * groups + read
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, row_bytes, BLOCK_K):
        at = group_of(begin, GROUP) * every
        values = tl.load(rows + begin)
        if BITS == 4:
            at_high = group_of(begin + row_bytes, GROUP) * every
            values_high = tl.load(rows + begin + row_bytes)
            low, high = nibbles_of(tl.load(left + begin), x.dtype.element_ty)
            gate = with_codes(gate, values, low, scale + at, minimum + at, MINIMA)
            gate = with_codes(gate, values_high, high, scale + at_high, minimum + at_high, MINIMA)
        else:
            numbers = numbers_of(tl.load(left + begin), x.dtype.element_ty, FLOATS)
            gate = with_codes(gate, values, numbers, scale + at, minimum + at, MINIMA)
        if GATED:
            at += width
            if BITS == 4:
                at_high += width
                low, high = nibbles_of(tl.load(right + begin), x.dtype.element_ty)
                up = with_codes(up, values, low, scale + at, minimum + at, MINIMA)
                up = with_codes(up, values_high, high, scale + at_high, minimum + at_high, MINIMA)
            else:
                numbers = numbers_of(tl.load(right + begin), x.dtype.element_ty, FLOATS)
                up = with_codes(up, values, numbers, scale + at, minimum + at, MINIMA)
    finish(
        gate, up, bias, shares, out, place, column, read, expert, width,
        ACTIVATION=ACTIVATION, GATED=GATED, BIAS=BIAS, WEIGHS=WEIGHS,
    )  # fmt: skip
