# mypy: ignore-errors
"""Keys and values in eight bits of float, E4M3, in compiled code: ``uint8`` in memory.

They are read as ``FLOAT8_UNIT`` times smaller than they are, which whoever multiplies by their scales makes up for:
shifted into place their bits are those of a float16 with the exponent of another bias, numbers without a leading one
and zero included. NaN, which quantising a number never gives, is read as 480.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from headwise.kernels.cpu.simd import FLOAT, INT, INT_VECTOR, ISA, LANES, VECTOR, Emitter

FLOAT8 = types.uint8
FLOAT8_UNIT = 256.0
LARGEST_FLOAT8 = 448.0

_BYTE, _SHORT = ir.IntType(8), ir.IntType(16)


class Float8Emitter(Emitter):
    """An `Emitter` to which bytes are E4M3; the rest is as it is."""

    def load(self, pointer: Any) -> Any:
        return self._load_floats(pointer, LANES) if pointer.type.pointee == _BYTE else super().load(pointer)

    def load_pairs(self, pointer: Any, partly: bool = False) -> Any:
        return self.builder.bitcast(self._load_int16(pointer, partly), INT_VECTOR)

    def _load_int16(self, pointer: Any, partly: bool) -> Any:
        """Bits of bfloat16, which has all of E4M3."""
        if pointer.type.pointee != _BYTE:
            return super()._load_int16(pointer, partly)
        count = LANES if partly else 2 * LANES
        words = self.builder.bitcast(self._load_floats(pointer, count), ir.VectorType(INT, count))
        bits = self.builder.trunc(self._shift("lshr", words), ir.VectorType(_SHORT, count))
        return self._filled(bits) if partly else bits

    def _load_floats(self, pointer: Any, count: int) -> Any:
        builder, raw, floats = (
            self.builder,
            self._load(pointer, ir.VectorType(_BYTE, count)),
            ir.VectorType(FLOAT, count),
        )
        if not ISA.f16c:
            kind = ir.VectorType(INT, count)
            bits = builder.and_(builder.shl(builder.sext(raw, kind), _all(kind, 20)), _all(kind, 0x87FFFFFF))
            return builder.fmul(builder.bitcast(bits, floats), ir.Constant(floats, [2.0**120 / FLOAT8_UNIT] * count))
        kind = ir.VectorType(_SHORT, count)
        bits = builder.and_(builder.shl(builder.sext(raw, kind), _all(kind, 7)), _all(kind, 0xBFFF))
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), count)), floats)


def round_to_float8(e: Emitter, value: Any) -> Any:
    """A vector's floats as E4M3, rounded half to even; those beyond LARGEST_FLOAT8 become it, NaN stays NaN."""
    builder, bits = e.builder, e.bits(value)
    magnitude = builder.and_(bits, _all(INT_VECTOR, 0x7FFFFFFF))
    size = builder.bitcast(magnitude, VECTOR)
    odd = builder.and_(builder.lshr(magnitude, _all(INT_VECTOR, 20)), _all(INT_VECTOR, 1))
    rounded = builder.add(builder.add(magnitude, _all(INT_VECTOR, 0x7FFFF)), odd)
    normal = builder.sub(builder.lshr(rounded, _all(INT_VECTOR, 20)), _all(INT_VECTOR, 120 << 3))
    # Of this number the last bit is worth as much as that of E4M3 without a leading one: 2 ** -9.
    magic = e.fill(2.0**14)
    small = builder.sub(e.bits(builder.fadd(size, magic)), e.bits(magic))
    code = builder.select(builder.fcmp_ordered("<", size, e.fill(2.0**-6)), small, normal)
    largest = _all(INT_VECTOR, 0x7E)
    code = builder.select(builder.fcmp_ordered(">=", size, e.fill(LARGEST_FLOAT8)), largest, code)
    code = builder.select(builder.fcmp_unordered("uno", value, value), _all(INT_VECTOR, 0x7F), code)
    sign = builder.and_(builder.lshr(bits, _all(INT_VECTOR, 24)), _all(INT_VECTOR, 0x80))
    return builder.trunc(builder.or_(code, sign), ir.VectorType(_BYTE, LANES))


def _all(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * kind.count)
