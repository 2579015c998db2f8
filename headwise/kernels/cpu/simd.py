# mypy: ignore-errors
"""Vectors in compiled code: what this CPU can, and the LLVM IR of vector arithmetic."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from headwise.kernels.cpu import amx

_SLOW_PAIRS = frozenset({"sapphirerapids", "emeraldrapids"})
"""CPUs, as LLVM names them, that multiply pairs of bfloat16 at half the rate of float32's multiply-and-add: a prompt's
products come at 290 GFLOP/s there if they are widened first, else at 190 (two cores of an Emerald Rapids). So it is
taken to be for all that have AMX, whatever a virtual machine says they are called."""


@dataclass(frozen=True)
class Isa:
    """Instructions of the CPU that Numba compiles for, and that are worth it; false for all that is not x86.

    amx: tiles of bfloat16 are multiplied, and this process may do that
    """

    avx2: bool
    avx512f: bool
    avx512bw: bool
    avx512bf16: bool
    f16c: bool
    amx: bool = False


def _features() -> dict[str, bool]:
    if numba.config.CPU_FEATURES is not None:  # Numba was told to compile for another CPU than this one
        return {item[1:]: item[0] == "+" for item in numba.config.CPU_FEATURES.split(",") if item}
    return dict(llvmlite.binding.get_host_cpu_features())


def _compiled_for(cpu: str, features: Mapping[str, bool]) -> Isa:
    is_old = llvmlite.binding.llvm_version_info[0] < 20  # whose intrinsics for bfloat16 had other types
    needed = ("amx-tile", "amx-bf16", "avx512f", "avx512bf16")
    has_tiles = not is_old and all(features.get(name) for name in needed) and amx.is_granted()
    if is_old or cpu in _SLOW_PAIRS or features.get("amx-bf16"):
        features = {**features, "avx512bf16": False}
    known = {name: bool(features.get(name)) for name in ("avx2", "avx512f", "avx512bw", "avx512bf16", "f16c")}
    return Isa(**known, amx=has_tiles)


ISA = _compiled_for(numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name(), _features())


def _named(isa: Isa, features: Mapping[str, bool], machine: str) -> str:
    if isa.amx:
        return "amx-bf16"
    if isa.avx512bf16:
        return "avx512-bf16"
    known = ("avx512f", "avx2", "avx", "sse2", "neon")
    return f"{next((name for name in known if features.get(name)), machine)}, bfloat16 widened to float32"


INSTRUCTIONS = _named(ISA, _features(), platform.machine())
"""For people."""

LANES = 16 if ISA.avx512f else 8
"""Floats in a vector. The wider one halves the instructions; LLVM splits vectors the machine lacks."""


class BFloat(ir.Type):
    """LLVM's ``bfloat``, which llvmlite has no type for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


FLOAT, INT = ir.FloatType(), ir.IntType(32)
VECTOR, INT_VECTOR = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
_BFLOATS = ir.VectorType(BFloat(), LANES)
_BFLOAT_PAIRS = ir.VectorType(BFloat(), 2 * LANES)
_FLAGS = ("contract", "nsz")
_LINE = 64


_ALL_LANES = (ir.Constant(VECTOR, [0.0] * LANES), ir.IntType(16)(-1), INT(4))
"""Last arguments of AVX-512's intrinsics: nothing is kept, all is computed, and rounded as usual."""

_DOWN = 9
"""To whole numbers below, of the instruction that takes these off; without a complaint that they are not exact."""


def _exp2_polynomial(degree: int, lowest: float = -0.5) -> list[float]:
    fit = np.polynomial.Chebyshev.interpolate(np.exp2, degree, domain=[lowest, lowest + 1])
    return [float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef]


class Emitter:
    """LLVM IR for one intrinsic: array arguments as pointers, vectors in and out of memory, arithmetic.

    A vector has LANES floats. In memory they are ``float32``; bfloat16 as bits in ``uint16``; or ``int8``.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self.args = [
            context.make_array(kind)(context, builder, arg).data if isinstance(kind, types.Array) else arg
            for kind, arg in zip(signature.args, args, strict=True)
        ]

    # --- memory ---

    def load(self, pointer: Any) -> Any:
        """The vector at ``pointer``, widened from what its elements are."""
        kind = pointer.type.pointee
        raw = self._load(pointer, ir.VectorType(kind, LANES))
        if kind == FLOAT:
            return raw
        if kind.width == 16:
            return self.builder.bitcast(self._shift("shl", self.builder.zext(raw, INT_VECTOR)), VECTOR)
        return self.builder.sitofp(self.builder.sext(raw, INT_VECTOR), VECTOR)

    def load_pairs(self, pointer: Any, partly: bool = False) -> Any:
        """LANES words at ``pointer`` to bfloat16 or int8: each is two neighbours as bfloat16, the first one low.

        ``partly`` reads the first half only; the other is zero.
        """
        kind = pointer.type.pointee
        if kind.width == 16:
            return self.builder.bitcast(self._load_int16(pointer, partly), INT_VECTOR)
        ints, floats = ir.VectorType(INT, 2 * LANES), ir.VectorType(FLOAT, 2 * LANES)
        raw = self.builder.sext(self._load(pointer, ir.VectorType(kind, 2 * LANES)), ints)
        bits = self._shift("lshr", self.builder.bitcast(self.builder.sitofp(raw, floats), ints))  # integers: exact
        return self.builder.bitcast(self.builder.trunc(bits, ir.VectorType(ir.IntType(16), 2 * LANES)), INT_VECTOR)

    def load_int16(self, pointer: Any, partly: bool = False) -> Any:
        """The same of int8, as pairs of int16."""
        return self.builder.bitcast(self._load_int16(pointer, partly), INT_VECTOR)

    def interleaved(self, low: Any, high: Any, columns: int) -> list[Any]:
        """``columns`` vectors of words, each of one element at ``low`` and one at ``high``, int8 made int16."""
        step = 1 if columns == 1 else 2
        vectors = []
        for column in range(0, columns, step):
            width = step * LANES
            a, b = (self._load_int16(self.at(row, ir.IntType(64)(column * LANES)), step == 1) for row in (low, high))
            for first in range(0, width, LANES):
                lanes = [lane + source for lane in range(first, first + LANES) for source in (0, 2 * LANES)]
                mixed = self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, 2 * LANES), lanes))
                vectors.append(self.builder.bitcast(mixed, INT_VECTOR))
        return vectors

    def _load_int16(self, pointer: Any, partly: bool) -> Any:
        """2 * LANES int16 (or bits) at ``pointer``, int8 widened; ``partly`` the first LANES only, then zeros."""
        kind, count = pointer.type.pointee, LANES if partly else 2 * LANES
        raw = self._load(pointer, ir.VectorType(kind, count))
        if kind.width == 8:
            raw = self.builder.sext(raw, ir.VectorType(ir.IntType(16), count))
        return self._filled(raw) if partly else raw

    def _filled(self, half: Any) -> Any:
        """A vector of twice as many elements, those behind zero."""
        count = half.type.count
        lanes = ir.Constant(ir.VectorType(INT, 2 * count), list(range(2 * count)))
        return self.builder.shuffle_vector(half, ir.Constant(half.type, [0] * count), lanes)

    def load_words(self, pointer: Any, partly: bool = False) -> Any:
        """LANES 32-bit words at ``pointer``, whatever they are; ``partly`` half of them, then zeros."""
        count = LANES // 2 if partly else LANES
        raw = self.builder.load(self.builder.bitcast(pointer, ir.VectorType(INT, count).as_pointer()), align=1)
        return self._filled(raw) if partly else raw

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=1)

    def prefetch(self, pointer: Any) -> None:
        """Start to bring the cache line at ``pointer`` into the L2 cache; harmless wherever it points."""
        address = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [address, INT, INT, INT])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [self.builder.bitcast(pointer, address), INT(0), INT(2), INT(1)])

    def prefetch_elements(self, pointer: Any, count: Any) -> None:
        """`prefetch` every line of ``count`` elements."""
        per_line = _LINE // element_bytes(pointer)
        with cgutils.for_range(self.builder, self.ceil_div(count, per_line)) as loop:
            self.prefetch(self.at(pointer, self.times(loop.index, per_line)))

    def at(self, pointer: Any, *offsets: Any) -> Any:
        for offset in offsets:
            pointer = self.builder.gep(pointer, [offset])
        return pointer

    def _load(self, pointer: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=1)

    # --- integers ---

    def times(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, value.type(factor))

    def ceil_div(self, value: Any, divisor: int) -> Any:
        return self.builder.udiv(self.builder.add(value, value.type(divisor - 1)), value.type(divisor))

    def smaller_int(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def _shift(self, way: str, value: Any) -> Any:
        return getattr(self.builder, way)(value, ir.Constant(value.type, [16] * value.type.count))

    # --- arithmetic ---

    def fill(self, scalar: Any) -> Any:
        """A vector of one scalar: a Python number, an LLVM float or an LLVM word."""
        if not isinstance(scalar, ir.Value):
            return ir.Constant(VECTOR, [float(scalar)] * LANES)
        undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, INT(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(INT_VECTOR, [0] * LANES))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FLAGS), c, flags=_FLAGS)

    def multiply_add_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """``c`` plus, lane by lane, the products of the two bfloat16 in each word of ``a`` and ``b``."""
        pairs = [self.builder.bitcast(words, _BFLOAT_PAIRS) for words in (a, b)]
        return self._call(f"llvm.x86.avx512bf16.dpbf16ps.{LANES * 32}", VECTOR, c, *pairs)

    def round_to_bfloat16(self, value: Any) -> Any:
        return self.builder.fptrunc(value, _BFLOATS)

    def bfloat16_of_two(self, low: Any, high: Any) -> Any:
        """Two vectors rounded to bfloat16, side by side, as words."""
        rounded = self._call(f"llvm.x86.avx512bf16.cvtne2ps2bf16.{LANES * 32}", _BFLOAT_PAIRS, high, low)
        return self.builder.bitcast(rounded, INT_VECTOR)

    def multiply_add_integers(self, a: Any, b: Any, c: Any) -> Any:
        """The same of the two int16 in each word, in int32."""
        kind = ir.VectorType(ir.IntType(16), 2 * LANES)
        pairs = [self.builder.bitcast(words, kind) for words in (a, b)]
        name = "llvm.x86.avx512.pmaddw.d.512" if ISA.avx512f else "llvm.x86.avx2.pmadd.wd"
        products = self._call(name, INT_VECTOR, *pairs)
        return self.builder.add(c, products)  # one instruction where the CPU has VNNI

    def absmax(self, row: Any, vectors: Any) -> Any:
        """The largest magnitude of ``vectors`` vectors at ``row``; NaN if there is one."""
        magnitude = ir.Constant(INT_VECTOR, [0x7FFFFFFF] * LANES)
        highest = self.variable(self.fill(0.0))
        with cgutils.for_range(self.builder, vectors) as loop:
            bits = self.builder.and_(self.bits(self.load(self.at(row, self.times(loop.index, LANES)))), magnitude)
            self.update(highest, self._larger_bits(self.builder.bitcast(bits, VECTOR), self.value(highest)))
        return self.builder.extract_element(self.fold([self.value(highest)], self._larger_bits), INT(0))

    def _larger_bits(self, a: Any, b: Any) -> Any:
        """The larger of two magnitudes, which are ordered as their bits are; of NaN and a number NaN."""
        return self.builder.select(self.builder.icmp_signed(">", self.bits(a), self.bits(b)), a, b)

    def bfloat16_bits(self, value: Any) -> Any:
        """The bits of a vector's floats as bfloat16, rounded half to even; NaN stays NaN."""
        bits, one = self.bits(value), ir.Constant(INT_VECTOR, [1] * LANES)
        odd = self.builder.and_(self._shift("lshr", bits), one)
        rounded = self.builder.add(self.builder.add(bits, ir.Constant(INT_VECTOR, [0x7FFF] * LANES)), odd)
        nan = self.builder.or_(bits, ir.Constant(INT_VECTOR, [0x400000] * LANES))
        kept = self.builder.select(self.builder.fcmp_unordered("uno", value, value), nan, rounded)
        return self.builder.trunc(self._shift("lshr", kept), ir.VectorType(ir.IntType(16), LANES))

    def round_to_int16(self, value: Any) -> Any:
        """Integers, rounded half to even, of a vector whose magnitudes are at most 32767; anything for NaN."""
        return self._to_int(self._rint(value), 16)

    def round_to_int8(self, value: Any) -> Any:
        """Integers of ``[-127, 127]``, rounded half to even and clipped; 0 for NaN."""
        number = self.builder.select(self.builder.fcmp_ordered("ord", value, value), self._rint(value), self.fill(0.0))
        low, high = self.fill(-127.0), self.fill(127.0)
        raised = self.larger(number, low)
        return self._to_int(self.builder.select(self.builder.fcmp_ordered("<", raised, high), raised, high), 8)

    def _rint(self, value: Any) -> Any:
        return self._call(f"llvm.rint.v{LANES}f32", VECTOR, value)

    def _to_int(self, whole: Any, width: int) -> Any:
        return self.builder.trunc(self.builder.fptosi(whole, INT_VECTOR), ir.VectorType(ir.IntType(width), LANES))

    def bits(self, value: Any) -> Any:
        return self.builder.bitcast(value, INT_VECTOR)

    def pair(self, low: Any, high: Any) -> Any:
        """Words of two vectors whose floats are bfloat16 already."""
        return self.builder.or_(self._shift("lshr", self.bits(low)), self.bits(high))

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=_FLAGS)

    def exp2(self, x: Any, degree: int = 6) -> Any:
        """``2 ** x`` for ``x <= 126``; exactly 0 far below -126, NaN for NaN.

        The relative error is about 1e-7, with ``degree=4`` 4e-6.
        """
        lowest = self.fill(-200.0 if ISA.avx512f else -126.0)
        whole = self._rint(self.larger(x, lowest))
        rest = self.builder.fsub(self.larger(lowest, x) if ISA.avx512f else x, whole)  # of NaN in this order NaN
        result = self._polynomial(_exp2_polynomial(degree), rest)
        if ISA.avx512f:
            return self._call("llvm.x86.avx512.mask.scalef.ps.512", VECTOR, result, whole, *_ALL_LANES)
        bits = self.builder.add(self.builder.fptosi(whole, INT_VECTOR), ir.Constant(INT_VECTOR, [127] * LANES))
        factor = self.builder.bitcast(self.builder.shl(bits, ir.Constant(INT_VECTOR, [23] * LANES)), VECTOR)
        kept = self.builder.fcmp_unordered(">", x, lowest)
        return self.builder.select(kept, self.builder.fmul(result, factor), self.fill(0.0))

    def quick_exp2(self, x: Any) -> Any:
        """``2 ** x`` for ``x <= 126`` with a relative error of 4e-6, in fewer instructions, all of AVX512-DQ's CPUs.

        The instruction that scales by a power of two takes ``x`` rounded down, and so another one gives what is left.
        """
        nothing, lanes, by_x = _ALL_LANES
        rest = self._call("llvm.x86.avx512.mask.reduce.ps.512", VECTOR, x, INT(_DOWN), nothing, lanes, by_x)
        result = self._polynomial(_exp2_polynomial(4, lowest=0.0), rest)
        return self._call("llvm.x86.avx512.mask.scalef.ps.512", VECTOR, result, x, *_ALL_LANES)

    def _polynomial(self, coefficients: list[float], x: Any) -> Any:
        result = self.fill(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            result = self.multiply_add(result, x, self.fill(coefficient))
        return result

    # --- between lanes ---

    def fold(self, vectors: list[Any], combine: Any, width: int = LANES, until: int = 1) -> Any:
        """Reduce LANES vectors to one whose lane ``i`` combines all lanes of ``vectors[i]`` (fewer: repeated).

        A tree whose leaves come late may be folded in stages: ``width`` is how many lanes belong together already
        separated by earlier stages, ``until`` how many shall at the end.
        """
        while width > until:
            width //= 2
            if len(vectors) == 1:
                vectors = vectors * 2
            pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
            vectors = [self._fold_pair(a, b, width, combine) for a, b in pairs]
        return vectors[0]

    def transpose(self, rows: list[Any]) -> list[Any]:
        """LANES vectors of words with rows and columns exchanged."""
        rows, distance = list(rows), 1
        while distance < LANES:
            for i in range(LANES):
                if not i & distance:
                    rows[i], rows[i + distance] = self._exchange(rows[i], rows[i + distance], distance)
            distance *= 2
        return rows

    def _exchange(self, a: Any, b: Any, distance: int) -> tuple[Any, Any]:
        """2 x 2 blocks of ``distance`` lanes transposed."""
        upper = [lane if not lane & distance else LANES + (lane ^ distance) for lane in range(LANES)]
        lower = [lane ^ distance if not lane & distance else LANES + lane for lane in range(LANES)]
        return self._shuffle(a, b, upper), self._shuffle(a, b, lower)

    def _fold_pair(self, a: Any, b: Any, width: int, combine: Any) -> Any:
        # Lanes come in runs of 2 * width that belong together; fold each run's halves, a's results before b's.
        runs = [run for source in (0, LANES) for run in range(source, source + LANES, 2 * width)]
        low = [run + lane for run in runs for lane in range(width)]
        return combine(self._shuffle(a, b, low), self._shuffle(a, b, [lane + width for lane in low]))

    def _shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(INT_VECTOR, lanes))

    # --- loops ---

    def variable(self, value: Any) -> Any:
        """A value that a loop changes; LLVM turns it into a register."""
        return cgutils.alloca_once_value(self.builder, value)

    def update(self, variable: Any, value: Any) -> None:
        self.builder.store(value, variable)

    def value(self, variable: Any) -> Any:
        return self.builder.load(variable)

    def _call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)


def element_bytes(pointer: Any) -> int:
    """Bytes of what an LLVM pointer to a number points to."""
    kind = pointer.type.pointee
    return 4 if kind == FLOAT else kind.width // 8


def bit_reversed(items: list[Any]) -> list[Any]:
    """Order in which `Emitter.fold` must be given vectors for lane ``i`` to be item ``i``."""
    if len(items) == 1:
        return items
    return bit_reversed(items[0::2]) + bit_reversed(items[1::2])
