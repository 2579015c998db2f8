"""Tiles of cached keys and values as numbers to multiply with, in Triton.

Of caches in eight and four bits these are float16. Queries of bfloat16 are scaled to it row by row; those of float32
have numbers of float32, which are there to compare with. Float16 holds every int8 and float8_e4m3fn, and is made of
them without arithmetic on single elements:

- **int8**: the byte, plus 128, is the lower one of a float16 between 1024 and 1280, whose upper byte is always the
  same: 5 instructions for 4 elements.
- **float8_e4m3fn**: there is an instruction for two of them, from sm_89 on.
- **int4** (how it lies in memory: `headwise.kernels.nibbles`): a code is the bits 4 to 7 of the mantissa of a float16
  between 4 and 8, ``x = 4 + code / 16``. What is wanted is then one fused product and sum: ``(minimum + code * scale) /
  16`` is ``x * scale`` and an addend that a group's elements share, ``minimum / 16 - 4 * scale``. It is rounded to
  float16, which moves a group by at most a 32nd of a step: 11 instructions for 8. Whoever multiplies by these numbers
  makes good that they are `UNIT` of what they mean: so float16 holds each, and what they are made of.
- **As decode has them**: see `split_pairs` and `split_quarters`.

The assembly is said to have effects. It has none, but so the compiler leaves it where tiles lie as they were loaded, 16
bytes to a thread, and takes what comes out from there to matrix instructions by shared memory; else it would have
single bytes moved, one instruction each.
"""
# mypy: ignore-errors
# ruff: noqa: N803, SIM300

import triton.language as tl
from triton.runtime.jit import JITFunction

UNIT = tl.constexpr(1.0 / 16.0)
"""Of a number in four bits, what is made of it."""

LEAST_SCALE = tl.constexpr(2.0**-60)
"""Of values: smaller ones count as this, which is nothing beside any others."""


def _of_int8(first, second):
    """PTX that makes two words of float16 of four int8, of those bytes in each that the selectors name.

    0x6400 is 1024 in float16, 0xe480 is -1152.
    """
    return f"""{{
.reg .b32 positive, offset;
mov.b32 offset, 0xe480e480;
xor.b32 positive, $2, 0x80808080;
prmt.b32 $0, positive, 0x64646464, {first};
prmt.b32 $1, positive, 0x64646464, {second};
add.f16x2 $0, $0, offset;
add.f16x2 $1, $1, offset;
}}"""


def _of_int4(first, second, scales, addends):
    """The same of eight codes: four words, of low nibbles two, then of high ones, each times a scale and an addend."""
    made = "\n".join(f"fma.rn.f16x2 ${at}, ${at}, {scales[at % 2]}, {addends[at % 2]};" for at in range(4))
    return f"""{{
.reg .b32 low, high;
and.b32 high, $4, 0xf0f0f0f0;
shl.b32 low, $4, 4;
and.b32 low, low, 0xf0f0f0f0;
prmt.b32 $0, low, 0x44444444, {first};
prmt.b32 $1, low, 0x44444444, {second};
prmt.b32 $2, high, 0x44444444, {first};
prmt.b32 $3, high, 0x44444444, {second};
{made}
}}"""


_IN_ORDER = "0x4140", "0x4342"
_BY_PARITY = "0x4240", "0x4341"
"""Selectors: the first two bytes of a word and the last two; those at even places and those at odd ones."""

INT8 = tl.constexpr(_of_int8(*_IN_ORDER))
INT8_PAIRS = tl.constexpr(_of_int8(*_BY_PARITY))
INT4 = tl.constexpr(_of_int4(*_IN_ORDER, ("$5", "$6"), ("$7", "$8")))
INT4_WORDS = tl.constexpr(_of_int4(*_BY_PARITY, ("$5", "$5"), ("$6", "$6")))

E4M3 = tl.constexpr("""{
.reg .b16 first, second;
mov.b32 {first, second}, $2;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}""")

E4M3_PAIRS = tl.constexpr("""{
.reg .b32 sorted;
.reg .b16 first, second;
prmt.b32 sorted, $2, $2, 0x3120;
mov.b32 {first, second}, sorted;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}""")


@JITFunction
def converted(values, DTYPE: tl.constexpr):
    """Cached values as numbers of ``DTYPE``; integers by way of float32, from where every conversion exists."""
    if values.dtype == tl.int8:
        return values.to(tl.float32).to(DTYPE)
    return values.to(DTYPE)


@JITFunction
def widened(stored, DTYPE: tl.constexpr):
    """`converted`, of bytes to float16 as above."""
    if DTYPE == tl.float16 and stored.dtype == tl.int8:
        return tl.inline_asm_elementwise(INT8, "=&r,=&r,r", [stored], tl.float16, False, 4)
    if DTYPE == tl.float16 and stored.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(E4M3, "=&r,=&r,r", [stored], tl.float16, False, 4)
    return converted(stored, DTYPE)


@JITFunction
def split_pairs(pairs, IS_E4M3: tl.constexpr):
    """(first, second) numbers of pairs of bytes, which lie in an ``int16`` each: float16 of the pairs' shape.

    A pair is as wide as what is made of it, so it goes from shared memory to where matrix instructions take it, as
    float16 would, transposed if need be, and becomes numbers there. By its bytes a tile would first have to be made
    wide, and stored once more: that is twice the traffic of shared memory, which bounds such a decode on an H200.
    """
    if not IS_E4M3:
        return tl.inline_asm_elementwise(INT8_PAIRS, "=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 2)
    return tl.inline_asm_elementwise(E4M3_PAIRS, "=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 2)


@JITFunction
def split_quarters(words, scales):
    """What `unpacked` makes of codes, of which each ``int16`` of ``words`` has four: as many numbers of float16, in
    `UNIT`, of the words' shape each, and for the reason of `split_pairs`. ``scales`` are of that shape, too.

    Of a group's 32 elements word ``i`` has ``2 * i``, the next one, and those that are 16 further on, in this order.
    """
    scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    minimum = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    addend = minimum * UNIT - scale * 4.0
    return tl.inline_asm_elementwise(
        INT4_WORDS, "=&r,=&r,=&r,=&r,r,r,r", [words, scale, addend],
        (tl.float16, tl.float16, tl.float16, tl.float16), True, 2,
    )  # fmt: skip


@JITFunction
def unpacked(codes, scales, DTYPE: tl.constexpr):
    """Codes ``uint8 [N, D / 2]`` with scales and minima ``int32 [N, D / 32]`` as numbers ``[N, D]``, in `UNIT`.

    ``DTYPE`` is float16 or float32. Where both are 0, as a mask makes them, so are the numbers.
    """
    groups: tl.constexpr = scales.shape[1]
    codes = tl.reshape(codes, [codes.shape[0], groups, 16])
    scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)[:, :, None]
    minimum = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True)[:, :, None]
    if DTYPE == tl.float32:
        scale, minimum = scale.to(tl.float32) * UNIT, minimum.to(tl.float32) * UNIT
        low, high = (codes & 0xF).to(tl.float32) * scale + minimum, (codes >> 4).to(tl.float32) * scale + minimum
    else:
        addend = minimum * UNIT - scale * 4.0
        low, high = tl.inline_asm_elementwise(
            INT4, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, scale, addend], (tl.float16, tl.float16), False, 4
        )
    both = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    return tl.reshape(both, [codes.shape[0], groups * 32])


@JITFunction
def load_tile(at, mask, WHOLE: tl.constexpr):
    """What lies there; 0 where the mask says no, unless ``WHOLE`` says that all may be read."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0.0)


@JITFunction
def load_packed(
    codes, scales, at_codes, at_scales, mapped,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows in four bits as numbers ``[BLOCK_N, BLOCK_D]``, see `unpacked`; ``at_*`` are where a row begins."""
    columns, groups = tl.arange(0, BLOCK_D // 2), tl.arange(0, BLOCK_D // 32)
    some, some_groups = mapped[:, None], mapped[:, None]
    if HEAD_DIM < BLOCK_D:
        some, some_groups = some & (columns < HEAD_DIM // 2)[None, :], some & (groups < HEAD_DIM // 32)[None, :]
    whole: tl.constexpr = WHOLE and HEAD_DIM >= BLOCK_D
    codes = load_tile(codes + at_codes[:, None] + columns[None, :], some, whole)
    scales = load_tile(scales + at_scales[:, None] + groups[None, :], some_groups, whole)
    return unpacked(codes, scales, DTYPE)


@JITFunction
def as_exponents(scales):
    """(log2 of scales, what they are divided by): of each but an instruction, without a look at what is not normal."""
    scales = tl.maximum(scales, LEAST_SCALE)
    log = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [scales], tl.float32, True, 1)
    return log, tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scales], tl.float32, True, 1)


@JITFunction
def as_float16(queries):
    """Rows of bfloat16 ``[M, D]`` as float16, and what each was divided by so that it fits, ``[M]``."""
    wide = queries.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    return (wide / largest[:, None]).to(tl.float16), largest
