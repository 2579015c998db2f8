"""Weights of few bits made floats, in Triton, for products of many rows: those of few are in `packed.cu`.

A weight ``[width, depth]`` is codes with a scale for each group of neighbours in a row, and a minimum where there are
any: ``scale * code + minimum``. Every dtype holds codes exactly (`codes_jit`).

Codes of 4 bits, plus 8, share a byte: byte ``i`` of a row has column ``i``'s in the low half, and ``depth / 2 + i``'s.
``FLOATS``: those of 8 bits are float8_e4m3fn, not int8. ``GROUP`` 0: a row is one group.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.codes_jit import nibbles_of, numbers_of


@JITFunction
def group_of(column, GROUP: tl.constexpr):
    if GROUP == 0:
        return 0
    return column // GROUP


@JITFunction
def expand_step(
    numbers, scale, minimum, out, column, row, width, GROUP: tl.constexpr, MINIMA: tl.constexpr
):  # fmt: skip
    """Write codes ``numbers`` from ``column`` on as weights to ``out``, where the rows begin."""
    at, some = group_of(column, GROUP) * width + row, row < width
    floats = numbers * tl.load(scale + at, mask=some, other=0.0)[:, None]
    if MINIMA:
        floats += tl.load(minimum + at, mask=some, other=0.0)[:, None]
    tl.store(out + column, floats.to(out.dtype.scalar.element_ty), mask=some[:, None])


@JITFunction
def expand_packed(
    codes, scale, minimum, out, width, depth,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr,
    MINIMA: tl.constexpr,
):  # fmt: skip
    """The weight as floats, ``out [width, depth]``; the grid is (steps of a row's bytes, rows of ``BLOCK_N``)."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row_bytes = depth * BITS // 8
    begin = tl.program_id(0) * BLOCK_K
    some = (row < width)[:, None]
    at_row = row.to(tl.int64)[:, None]
    bits = tl.load(codes + at_row * row_bytes + begin + inner[None, :], mask=some, other=0)
    out += at_row * depth + inner[None, :]
    if BITS == 4:
        low, numbers = nibbles_of(bits, tl.float32)
        expand_step(low, scale, minimum, out, begin, row, width, GROUP=GROUP, MINIMA=MINIMA)
        begin += row_bytes
    else:
        numbers = numbers_of(bits, tl.float32, FLOATS)
    expand_step(numbers, scale, minimum, out, begin, row, width, GROUP=GROUP, MINIMA=MINIMA)
