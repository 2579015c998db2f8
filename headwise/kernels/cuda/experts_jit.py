"""Products of tokens with the experts they go to, in Triton: one kernel for all experts of a layer.

Rows come in tiles, each of one expert (`experts.cu`, ``sort_by_expert``), and are gathered by their numbers as they are
read: nothing is copied into that order. Tiles that no expert has end at once, so the grid is known from shapes.

A row of padding reads row 0, and is not written. Columns beyond the last read the last, and are not written either.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

LOG2E = tl.constexpr(1.4426950408889634)


@JITFunction
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@JITFunction
def activated(gate, up, ACTIVATION: tl.constexpr):
    """``activation(gate) * up``, or of ``gate`` alone: see `headwise.kernels.fused.Activation`."""
    if ACTIVATION == "relu2":
        gate = tl.where(gate <= 0.0, 0.0, gate)  # a comparison: NaN stays NaN
        return gate * gate
    if ACTIVATION == "silu":
        return gate * sigmoid(gate) * up
    if ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(u)) is the sigmoid of 2 * u
        return gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    if ACTIVATION == "limited_silu":
        gate = tl.where(gate > 10.0, 10.0, gate)  # comparisons: NaN stays NaN
        return gate * sigmoid(gate) * tl.where(up > 10.0, 10.0, tl.where(up < -10.0, -10.0, up))
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    if ACTIVATION == "clipped_silu":
        gate = gate * sigmoid(gate)
        return tl.where(gate > 7.0, 7.0, gate) * up
    gate = tl.where(gate > 7.0, 7.0, gate)
    return gate * sigmoid(1.702 * gate) * (up + 1.0)


@JITFunction
def finish(
    gate, up, bias, shares, out, place, column, read, expert, width,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """Writes what comes of a tile's sums; see `multiply_experts`, which has ``expert`` doubled where ``GATED``."""
    real = (place >= 0)[:, None] & (column < width)[None, :]
    if WEIGHS:
        share = tl.load(shares + place, mask=place >= 0, other=0.0)[:, None]
        if ACTIVATION != "":
            gate *= share
            up *= share
    if BIAS:
        gate += tl.load(bias + expert * width + read).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + (expert + 1) * width + read).to(tl.float32)[None, :]
    if ACTIVATION != "":
        gate = activated(gate, up, ACTIVATION)
    elif WEIGHS:
        gate *= share
    at_out = place.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + at_out, gate.to(out.dtype.element_ty), mask=real)


@JITFunction
def multiply_experts(
    x, weight, bias, shares, out, order, tile_expert, width, depth, per_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """A tile of ``out [assignments, width]``: rows of ``x [rows, depth]`` times the weights of the tile's expert.

    Assignment ``i`` reads row ``i // per_row``. ``GATED``: weights are ``gate | up [experts, 2 * width, depth]``, and
    ``out`` is ``ACTIVATION(gate) * up``. Else they are ``[experts, width, depth]``, and ``out`` is the product, or
    ``ACTIVATION`` of it. ``WEIGHS``: a row is multiplied by its assignment's share: before an activation and its
    biases, which is as if the token were, else at the end. ``BIAS``: ``bias [experts, width]``, or twice as wide, is
    added.
    ``EVEN``: ``BLOCK_K`` divides ``depth``. The grid is tiles times columns of ``BLOCK_N``.
    """
    columns = (width + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // columns
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    column = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(column, width - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    rows = x + (tl.maximum(place, 0) // per_row).to(tl.int64)[:, None] * depth + inner[None, :]
    if GATED:
        expert *= 2
    left = weight + (expert * width + read)[:, None] * depth + inner[None, :]
    right = left + width.to(tl.int64) * depth
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, depth, BLOCK_K):
        if EVEN:
            values, weights = tl.load(rows + begin), tl.load(left + begin)
        else:
            some = (begin + inner < depth)[None, :]
            values, weights = tl.load(rows + begin, mask=some, other=0.0), tl.load(left + begin, mask=some, other=0.0)
        gate = tl.dot(values, tl.trans(weights), gate, input_precision="ieee")
        if GATED:
            weights = tl.load(right + begin) if EVEN else tl.load(right + begin, mask=some, other=0.0)
            up = tl.dot(values, tl.trans(weights), up, input_precision="ieee")
    finish(
        gate, up, bias, shares, out, place, column, read, expert, width,
        ACTIVATION=ACTIVATION, GATED=GATED, BIAS=BIAS, WEIGHS=WEIGHS,
    )  # fmt: skip
