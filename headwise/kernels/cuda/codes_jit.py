"""Codes of weights as numbers to multiply with, in Triton: every code exactly, in whichever dtype activations have.

Numbers are made of four codes in a register, without arithmetic on single ones:

- **int8** in bfloat16: the low seven bits are the mantissa of a number between 128 and 256, from which 128 is taken, or
  256 where the eighth bit is set: 8 instructions for 4. In float16: `cached_jit.INT8`, 7 for 4.
- **4 bits**, -8 to 7, kept as 0 to 15: the mantissa of a number from 128 on (float16: 1024), less that and 8: 11
  instructions for 8.
- **float8_e4m3fn**: its bits, moved to where the wider number has sign, exponent and mantissa, are the number times a
  power of two, which a product makes good, of subnormal ones, too: 10 instructions for 4, on any card. Its two codes
  that are no numbers become 480: matrices with such are refused.

`cached_jit` says why the assembly is said to have effects. Those of float32, which are there to compare with, are made
one by one.
"""
# mypy: ignore-errors
# ruff: noqa: N803, SIM300

import triton.language as tl
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda.cached_jit import INT8

INT8_BF16 = tl.constexpr("""{
.reg .b32 low, high, minus;
mov.b32 minus, 0xbf80bf80;
and.b32 low, $2, 0x7f7f7f7f;
and.b32 high, $2, 0x80808080;
prmt.b32 $0, low, 0x43434343, 0x4140;
prmt.b32 $1, low, 0x43434343, 0x4342;
prmt.b32 low, high, 0x43434343, 0x4140;
prmt.b32 high, high, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, low, minus, $0;
fma.rn.bf16x2 $1, high, minus, $1;
}""")
"""0x4300 is 128 in bfloat16, 0x4380 is 256, 0xbf80 is -1."""

NIBBLES = """{
.reg .b32 low, high, one, offset;
mov.b32 one, ONE;
mov.b32 offset, OFFSET;
and.b32 low, $4, 0x0f0f0f0f;
shr.b32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
prmt.b32 $0, low, UPPER, 0x4140;
prmt.b32 $1, low, UPPER, 0x4342;
prmt.b32 $2, high, UPPER, 0x4140;
prmt.b32 $3, high, UPPER, 0x4342;
fma.rn.TYPE $0, $0, one, offset;
fma.rn.TYPE $1, $1, one, offset;
fma.rn.TYPE $2, $2, one, offset;
fma.rn.TYPE $3, $3, one, offset;
}"""


def _text(template, **words):
    for name, word in words.items():
        template = template.replace(name, word)
    return tl.constexpr(template)


NIBBLES_BF16 = _text(NIBBLES, ONE="0x3f803f80", OFFSET="0xc308c308", UPPER="0x43434343", TYPE="bf16x2")
NIBBLES_F16 = _text(NIBBLES, ONE="0x3c003c00", OFFSET="0xe408e408", UPPER="0x64646464", TYPE="f16x2")

E4M3 = """{
.reg .b32 sign, power, zero;
mov.b32 power, POWER;
mov.b32 zero, 0x80008000;
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
and.b32 sign, $0, 0x80008000;
shr.b32 $0, $0, SHIFT;
and.b32 $0, $0, MASK;
or.b32 $0, $0, sign;
and.b32 sign, $1, 0x80008000;
shr.b32 $1, $1, SHIFT;
and.b32 $1, $1, MASK;
or.b32 $1, $1, sign;
fma.rn.TYPE $0, $0, power, zero;
fma.rn.TYPE $1, $1, power, zero;
}"""
"""What is added is -0, which leaves 0 its sign."""

E4M3_BF16 = _text(E4M3, SHIFT="4", MASK="0x07f007f0", POWER="0x7b807b80", TYPE="bf16x2")
E4M3_F16 = _text(E4M3, SHIFT="1", MASK="0x3f803f80", POWER="0x5c005c00", TYPE="f16x2")
POWER_F32 = tl.constexpr(2.0**120)
"""POWER is 2 to the power of 120, in float16 of 8."""


@JITFunction
def numbers_of(codes, DTYPE: tl.constexpr, FLOATS: tl.constexpr):
    """int8 ``codes``, or with ``FLOATS`` the bits of float8_e4m3fn as uint8, as numbers of ``DTYPE``."""
    if DTYPE == tl.float32:
        if FLOATS:
            bits = codes.to(tl.int32)
            numbers = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * POWER_F32
        else:
            numbers = codes.to(tl.float32)
    else:
        if FLOATS:
            text: tl.constexpr = E4M3_BF16 if DTYPE == tl.bfloat16 else E4M3_F16
        else:
            text: tl.constexpr = INT8_BF16 if DTYPE == tl.bfloat16 else INT8
        made = tl.inline_asm_elementwise(text, "=&r,=&r,r", [codes], tl.uint16, False, 4)
        numbers = made.to(DTYPE, bitcast=True)
    return numbers


@JITFunction
def nibbles_of(codes, DTYPE: tl.constexpr):
    """The low and the high halves of uint8 ``codes``, less 8, as numbers of ``DTYPE``."""
    if DTYPE == tl.float32:
        low, high = (codes & 15).to(tl.float32) - 8.0, (codes >> 4).to(tl.float32) - 8.0
    else:
        text: tl.constexpr = NIBBLES_BF16 if DTYPE == tl.bfloat16 else NIBBLES_F16
        first, second = tl.inline_asm_elementwise(text, "=&r,=&r,=&r,=&r,r", [codes], (tl.uint16, tl.uint16), False, 4)
        low, high = first.to(DTYPE, bitcast=True), second.to(DTYPE, bitcast=True)
    return low, high
