# mypy: ignore-errors
"""Keys and values in four bits (`headwise.kernels.nibbles`) in compiled code: made floats before they are multiplied.

To compiled code an arena of them is int16: four codes, or a float16. What a thread attends to next is expanded into a
buffer of its own, which stays in its caches, as bfloat16 where the CPU multiplies these, else as float32. So products
know nothing of four bits, and from memory comes a third of what bfloat16 would take.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.addresses import floats_from, halves_from
from headwise.kernels.cpu.simd import FLOAT, INT, ISA, Emitter
from headwise.kernels.nibbles import GROUP

INT4 = types.int16
CODES = 4
"""In an element of the arena."""

expanded_from = halves_from if ISA.avx512bf16 else floats_from
"""The function of an address that gives a pointer to expanded numbers."""

_compiled = numba.njit(inline="always", nogil=True, error_model="numpy")
_N = types.intp
_HALF = GROUP // 2
_LARGEST_FLOAT16, _LARGEST_CODE = 65504.0, 15.0
_BYTES, _SHORT = ir.VectorType(ir.IntType(8), _HALF), ir.IntType(16)
_FLOATS, _INTS = ir.VectorType(FLOAT, _HALF), ir.VectorType(INT, _HALF)
_AT_ONCE = 8
"""Groups whose scales are read at once."""
_FLAGS = ("contract", "nsz")


@intrinsic
def is_int4(typing, codes):
    """Whether an arena is one of four bits, known when compiling."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.boolean, codes.dtype == INT4)

    return types.boolean(codes), emit


@_compiled
def scales_of_row(dim):
    """Float16s that a row of ``dim`` numbers has: a scale and a minimum for each group."""
    return dim // GROUP * 2


@intrinsic
def expand_rows(typing, codes, codes_at, scales_at, dim, count, target, target_at, ahead, scales_ahead):
    """``target[target_at:]``: ``count`` rows of ``dim`` numbers, whose codes and scales lie one behind the other.

    What lies ``ahead`` and ``scales_ahead`` elements behind them is prefetched. Nothing of other arenas is.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if codes.dtype != INT4:
            return context.get_dummy_value()
        e = Emitter(context, builder, signature, args)
        source, codes_at, scales_at, dim, count, target, target_at, ahead, scales_ahead = e.args
        scales, packed, target = e.at(source, scales_at), e.at(source, codes_at), e.at(target, target_at)
        groups = builder.mul(count, builder.udiv(dim, dim.type(GROUP)))
        e.prefetch_elements(e.at(packed, ahead), e.times(groups, GROUP // CODES))
        e.prefetch_elements(e.at(scales, scales_ahead), e.times(groups, 2))

        def expand(first: Any, some: int) -> None:
            pairs = _load(e, e.at(scales, e.times(first, 2)), ir.VectorType(_SHORT, 2 * some))
            floats = _floats_of(builder, pairs)
            for group in range(some):
                scale, minimum = (_spread(builder, floats, 2 * group + which) for which in range(2))
                at = builder.add(first, first.type(group))
                raw = _load(e, e.at(packed, e.times(at, GROUP // CODES)), _BYTES)
                _expand_group(e, raw, scale, minimum, e.at(target, e.times(at, GROUP)))

        whole = builder.udiv(groups, groups.type(_AT_ONCE))
        with cgutils.for_range(builder, whole) as loop:
            expand(e.times(loop.index, _AT_ONCE), _AT_ONCE)
        done = e.times(whole, _AT_ONCE)
        with cgutils.for_range(builder, builder.sub(groups, done)) as loop:
            expand(builder.add(done, loop.index), 1)
        return context.get_dummy_value()

    return types.void(codes, _N, _N, _N, _N, target, _N, _N, _N), emit


def _expand_group(e: Emitter, raw: Any, scale: Any, minimum: Any, cell: Any) -> None:
    builder = e.builder

    def of_codes(codes: Any) -> Any:
        return builder.fadd(builder.fmul(codes, scale, flags=_FLAGS), minimum, flags=_FLAGS)

    if cell.type.pointee == _SHORT:  # there are 16 values, which codes choose from
        values = e.round_to_bfloat16(of_codes(ir.Constant(_FLOATS, list(map(float, range(_HALF))))))
        table = builder.bitcast(values, ir.VectorType(_SHORT, _HALF))
        bits = builder.zext(raw, table.type)
        low = builder.and_(bits, ir.Constant(bits.type, [15] * _HALF))
        high = builder.lshr(bits, ir.Constant(bits.type, [4] * _HALF))
        both = ir.VectorType(_SHORT, GROUP)
        lanes = ir.Constant(ir.VectorType(INT, GROUP), list(range(GROUP)))
        codes, table = (builder.shuffle_vector(a, b, lanes) for a, b in ((low, high), (table, table)))
        kind = ir.FunctionType(both, [both, both])
        choose = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
        e.store(builder.call(choose, [table, codes]), cell)
        return
    low = builder.and_(raw, ir.Constant(_BYTES, [15] * _HALF))
    high = builder.lshr(raw, ir.Constant(_BYTES, [4] * _HALF))
    for half, codes in enumerate((low, high)):
        numbers = builder.sitofp(builder.zext(codes, _INTS), _FLOATS)
        e.store(of_codes(numbers), e.at(cell, INT(half * _HALF)))


@intrinsic
def store_groups(typing, row, kv, at, scales_at, dim):
    """Store ``dim`` floats as codes at ``kv[at:]``, their scales and minima at ``kv[scales_at:]``: `nibbles.pack`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if kv.dtype != INT4:
            return context.get_dummy_value()
        e = Emitter(context, builder, signature, args)
        row, arena, at, scales_at, dim = e.args
        codes, scales = e.at(arena, at), e.at(arena, scales_at)
        with cgutils.for_range(builder, builder.udiv(dim, dim.type(GROUP))) as loop:
            source = e.at(row, e.times(loop.index, GROUP))
            halves = [_clipped(builder, _load(e, e.at(source, dim.type(half * _HALF)), _FLOATS)) for half in range(2)]
            minimum16, minimum = _rounded(builder, _smallest(e, halves))
            span = builder.fsub(_reduced(e, "fmax", halves), minimum)
            scale16, scale = _rounded(builder, builder.fdiv(span, FLOAT(_LARGEST_CODE)))
            some = builder.fcmp_ordered(">", scale, FLOAT(0.0))
            divisor = _fill(builder, builder.select(some, scale, FLOAT(float("inf"))))  # then all codes are 0
            low, high = (
                _codes(e, builder.fdiv(builder.fsub(half, _fill(builder, minimum)), divisor)) for half in halves
            )
            packed = builder.or_(low, builder.shl(high, ir.Constant(_BYTES, [4] * _HALF)))
            e.store(packed, e.at(codes, e.times(loop.index, GROUP // CODES)))
            none = builder.fcmp_ordered("<", scale, FLOAT(0.0))
            cell = e.at(scales, e.times(loop.index, 2))
            e.store(builder.select(none, _SHORT(0), scale16), cell)
            e.store(minimum16, e.at(cell, dim.type(1)))
        return context.get_dummy_value()

    return types.void(row, kv, _N, _N, _N), emit


def _load(e: Emitter, pointer: Any, kind: Any) -> Any:
    return e.builder.load(e.builder.bitcast(pointer, kind.as_pointer()), align=1)


def _spread(builder: Any, vector: Any, lane: int) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(_INTS, [lane] * _HALF))


def _fill(builder: Any, scalar: Any) -> Any:
    return _spread(builder, builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scalar, INT(0)), 0)


# --- float16 ------------------------------------------------------------------------------------------------------


def _floats_of(builder: Any, halves: Any) -> Any:
    """A vector of float16s' bits as floats."""
    count = halves.type.count
    if ISA.f16c:
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), count)), ir.VectorType(FLOAT, count))
    floats = ir.Constant(ir.VectorType(FLOAT, count), ir.Undefined)
    for index in range(count):
        number = _float_of(builder, builder.extract_element(halves, INT(index)))
        floats = builder.insert_element(floats, number, INT(index))
    return floats


def _float_of(builder: Any, half: Any) -> Any:
    """The float of a float16's bits, without the instruction for it: shifted into place, with another bias."""
    bits = builder.zext(half, INT)
    magnitude = builder.shl(builder.and_(bits, INT(0x7FFF)), INT(13))
    size = builder.fmul(builder.bitcast(magnitude, FLOAT), FLOAT(2.0**112))
    is_finite = builder.icmp_unsigned("<", magnitude, INT(0x7C00 << 13))
    size_bits = builder.select(is_finite, builder.bitcast(size, INT), builder.or_(magnitude, INT(0x7F800000)))
    return builder.bitcast(builder.or_(size_bits, builder.shl(builder.and_(bits, INT(0x8000)), INT(16))), FLOAT)


def _rounded(builder: Any, value: Any) -> tuple[Any, Any]:
    """The bits of a float as float16, rounded half to even, and the float that they are; of at most 65504, or NaN."""
    bits = builder.bitcast(value, INT)
    magnitude = builder.and_(bits, INT(0x7FFFFFFF))
    size = builder.bitcast(magnitude, FLOAT)
    odd = builder.and_(builder.lshr(magnitude, INT(13)), INT(1))
    normal = builder.sub(
        builder.lshr(builder.add(builder.add(magnitude, INT(0xFFF)), odd), INT(13)), INT((127 - 15) << 10)
    )
    # Of this number the last bit is worth as much as that of a float16 without a leading one: 2 ** -24.
    magic = FLOAT(0.5)
    small = builder.sub(builder.bitcast(builder.fadd(size, magic), INT), builder.bitcast(magic, INT))
    code = builder.select(builder.fcmp_ordered("<", size, FLOAT(2.0**-14)), small, normal)
    code = builder.select(builder.fcmp_unordered("uno", value, value), INT(0x7E00), code)
    sign = builder.and_(builder.lshr(bits, INT(16)), INT(0x8000))
    half = builder.trunc(builder.or_(code, sign), _SHORT)
    return half, _float_of(builder, half)


# --- a group ------------------------------------------------------------------------------------------------------


def _clipped(builder: Any, value: Any) -> Any:
    for order, bound in ((">", _LARGEST_FLOAT16), ("<", -_LARGEST_FLOAT16)):  # NaN stays
        limit = ir.Constant(_FLOATS, [bound] * _HALF)
        value = builder.select(builder.fcmp_ordered(order, value, limit), limit, value)
    return value


def _reduced(e: Emitter, way: str, halves: list[Any]) -> Any:
    order = ">" if way == "fmax" else "<"
    first, second = halves
    both = e.builder.select(e.builder.fcmp_ordered(order, first, second), first, second)
    kind = ir.FunctionType(FLOAT, [_FLOATS])
    name = f"llvm.vector.reduce.{way}.v{_HALF}f32"
    return e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), [both])


def _smallest(e: Emitter, halves: list[Any]) -> Any:
    """The smallest number of a group; NaN if there is one."""
    builder = e.builder
    lost = [builder.fcmp_unordered("uno", half, half) for half in halves]
    bits = ir.VectorType(ir.IntType(1), _HALF)
    kind = ir.FunctionType(ir.IntType(1), [bits])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.or.v{_HALF}i1")
    is_lost = builder.call(function, [builder.or_(*lost)])
    return builder.select(is_lost, FLOAT(float("nan")), _reduced(e, "fmin", halves))


def _codes(e: Emitter, steps: Any) -> Any:
    """Steps as codes of 0 to 15, rounded half to even."""
    builder = e.builder
    for order, bound in (("<", 0.0), (">", _LARGEST_CODE)):
        limit = ir.Constant(_FLOATS, [bound] * _HALF)
        steps = builder.select(builder.fcmp_unordered(order, steps, limit), limit, steps)  # NaN becomes a number
    magic = ir.Constant(_FLOATS, [2.0**23] * _HALF)  # whose last bit is worth 1
    bits = builder.bitcast(builder.fadd(steps, magic), _INTS)
    return builder.trunc(builder.and_(bits, ir.Constant(_INTS, [15] * _HALF)), _BYTES)
