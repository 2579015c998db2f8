"""Products with weights of small integers, in Triton: few rows times codes, and codes made floats for many rows.

A weight ``[width, depth]`` is codes with a scale for each group of neighbours in a row, and a minimum where there are
any. Codes are multiplied as they are, which every dtype holds exactly (`codes_jit`); a step stays within a group, so
that its scale and minimum are applied to the step's sums, in float32, and not to every weight:

    out[m, n] = sum over steps of scale[n] * (x[m, step] . codes[n, step]) + minimum[n] * sum(x[m, step])

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
def with_step(total, values, numbers, scale, minimum, MINIMA: tl.constexpr):
    """``total [M, N]`` and what ``values [M, K]`` and ``numbers [N, K]`` of one group add; ``scale``: where its are."""
    product = tl.dot(values, tl.trans(numbers), input_precision="ieee")
    total += product * tl.load(scale)[None, :]
    if MINIMA:
        total += tl.sum(values.to(tl.float32), 1)[:, None] * tl.load(minimum)[None, :]
    return total


@JITFunction
def multiply_packed(
    x, codes, scale, minimum, out, partial, rows, width, depth, x_stride, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    FLOATS: tl.constexpr, MINIMA: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """``out [rows, width] = x [rows, depth] @ weight.T`` of at most ``BLOCK_M`` rows, ``x_stride`` elements apart.

    codes: ``[width, depth * BITS / 8]``; scale, minimum: ``[depth / GROUP, width]``
    The grid is (columns of ``BLOCK_N``, ``splits`` of the depth). With ``SPLIT`` each writes its sums to ``partial
    [splits, rows, width]``. Rows and columns beyond the last read the last, and are not written.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(column, width - 1)
    row = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    row_bytes = tl.multiple_of(depth * BITS // 8, 16)
    steps = row_bytes // BLOCK_K
    per_split = (steps + splits - 1) // splits
    split = tl.program_id(1)
    values = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + inner[None, :]
    packed = codes + read.to(tl.int64)[:, None] * row_bytes + inner[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, steps)):
        begin = step * BLOCK_K
        bits = tl.load(packed + begin)
        at = group_of(begin, GROUP) * width + read
        if BITS == 4:
            low, numbers = nibbles_of(bits, x.dtype.element_ty)
            total = with_step(total, tl.load(values + begin), low, scale + at, minimum + at, MINIMA)
            begin += row_bytes
            at = group_of(begin, GROUP) * width + read
        else:
            numbers = numbers_of(bits, x.dtype.element_ty, FLOATS)
        total = with_step(total, tl.load(values + begin), numbers, scale + at, minimum + at, MINIMA)
    real = (row < rows)[:, None] & (column < width)[None, :]
    if SPLIT:
        at_out = (split * rows + row).to(tl.int64)[:, None] * width + column[None, :]
        tl.store(partial + at_out, total, mask=real)
    else:
        at_out = row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(out + at_out, total.to(out.dtype.element_ty), mask=real)


@JITFunction
def add_splits(partial, out, count, splits, BLOCK: tl.constexpr):
    """``out [count]``, the sums of ``partial [splits, count]``, in order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    some = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial + split * count + at, mask=some, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=some)


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
