"""Tiles of keys and values in four bits as numbers, in Triton; how they lie in memory: `headwise.kernels.nibbles`.

Numbers come out as `UNIT` of what they mean, which whoever multiplies by them makes good: so float16 holds each, and
what they are made of.

A code is the bits 4 to 7 of the mantissa of a float16 between 4 and 8, ``x = 4 + code / 16``, whose upper byte is
always the same. What is wanted is then one fused product and sum: ``(minimum + code * scale) / 16`` is ``x * scale``
and an addend that a group's elements share, ``minimum / 16 - 4 * scale``. It is rounded to float16, which moves a group
by at most a 32nd of a step. Two elements at a time, that is 11 instructions for 8.

The assembly is said to have effects. It has none, but so the compiler leaves it where tiles lie as they were loaded, 16
bytes to a thread, and takes them from there to matrix instructions by shared memory; else it would have the smaller
bytes moved, one instruction each.
"""
# mypy: ignore-errors
# ruff: noqa: N803, SIM300

import triton.language as tl
from triton.runtime.jit import JITFunction

UNIT = tl.constexpr(1.0 / 16.0)
"""Of a number in memory, what `numbers_of` makes of it."""

_NUMBERS = tl.constexpr("""{
.reg .b32 low, high;
and.b32 high, $4, 0xf0f0f0f0;
shl.b32 low, $4, 4;
and.b32 low, low, 0xf0f0f0f0;
prmt.b32 $0, low, 0x44444444, 0x4140;
prmt.b32 $1, low, 0x44444444, 0x4342;
prmt.b32 $2, high, 0x44444444, 0x4140;
prmt.b32 $3, high, 0x44444444, 0x4342;
fma.rn.f16x2 $0, $0, $5, $7;
fma.rn.f16x2 $1, $1, $6, $8;
fma.rn.f16x2 $2, $2, $5, $7;
fma.rn.f16x2 $3, $3, $6, $8;
}""")
_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@JITFunction
def numbers_of(codes, scales, DTYPE: tl.constexpr):
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
            _NUMBERS, _OPERANDS, [codes, scale, addend], (tl.float16, tl.float16), False, 4
        )
    both = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    return tl.reshape(both, [codes.shape[0], groups * 32])


@JITFunction
def as_float16(queries):
    """Rows of bfloat16 ``[M, D]`` as float16, and what each was divided by so that it fits, ``[M]``."""
    wide = queries.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    return (wide / largest[:, None]).to(tl.float16), largest
