# mypy: ignore-errors
"""Vectors in compiled code: what this CPU can, and the LLVM IR of vector arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils


@dataclass(frozen=True)
class Isa:
    """Instructions of the CPU that Numba compiles for; false for all that is not x86."""

    avx512f: bool
    avx512bw: bool
    avx512bf16: bool


def _compiled_for() -> Isa:
    if numba.config.CPU_FEATURES is not None:  # Numba was told to compile for another CPU than this one
        features = {item[1:]: item[0] == "+" for item in numba.config.CPU_FEATURES.split(",") if item}
    else:
        features = llvmlite.binding.get_host_cpu_features()
    return Isa(**{name: bool(features.get(name)) for name in ("avx512f", "avx512bw", "avx512bf16")})


ISA = _compiled_for()

LANES = 16 if ISA.avx512f else 8
"""Floats in a vector. The wider one halves the instructions; LLVM splits vectors the machine lacks."""

_EXP2 = np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT_VECTOR = ir.VectorType(ir.IntType(32), LANES)
_FLAGS = ("contract", "nsz")


class Emitter:
    """LLVM IR for one intrinsic: array arguments as pointers, vectors in and out of memory, arithmetic."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self.args = [
            context.make_array(kind)(context, builder, arg).data if isinstance(kind, types.Array) else arg
            for kind, arg in zip(signature.args, args, strict=True)
        ]

    def load(self, pointer: Any) -> Any:
        return self.builder.load(self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def prefetch(self, pointer: Any) -> None:
        """Start to bring the cache line at ``pointer`` into the L2 cache; harmless wherever it points."""
        address, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address, flag, flag, flag])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [self.builder.bitcast(pointer, address), flag(0), flag(2), flag(1)])

    def at(self, pointer: Any, *offsets: Any) -> Any:
        for offset in offsets:
            pointer = self.builder.gep(pointer, [offset])
        return pointer

    def times(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, value.type(factor))

    def fill(self, scalar: Any) -> Any:
        """A vector of one scalar: a Python number or an LLVM float."""
        if not isinstance(scalar, ir.Value):
            return ir.Constant(_VECTOR, [float(scalar)] * LANES)
        first = self.builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
        zeros = ir.Constant(_INT_VECTOR, [0] * LANES)
        return self.builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), zeros)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FLAGS), c, flags=_FLAGS)

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def variable(self, value: Any) -> Any:
        """A value that a loop changes; LLVM turns it into a register."""
        return cgutils.alloca_once_value(self.builder, value)

    def update(self, variable: Any, value: Any) -> None:
        self.builder.store(value, variable)

    def value(self, variable: Any) -> Any:
        return self.builder.load(variable)

    def fold(self, vectors: list[Any], combine: Any) -> Any:
        """Reduce LANES vectors to one whose lane ``i`` combines all lanes of ``vectors[i]`` (fewer: repeated)."""
        width = LANES
        while width > 1:
            width //= 2
            if len(vectors) == 1:
                vectors = vectors * 2
            pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
            vectors = [self._fold_pair(a, b, width, combine) for a, b in pairs]
        return vectors[0]

    def _fold_pair(self, a: Any, b: Any, width: int, combine: Any) -> Any:
        # Lanes come in runs of 2 * width that belong together; fold each run's halves, a's results before b's.
        runs = [run for source in (0, LANES) for run in range(source, source + LANES, 2 * width)]
        low = [run + lane for run in runs for lane in range(width)]
        high = [lane + width for lane in low]
        shuffled = [self.builder.shuffle_vector(a, b, ir.Constant(_INT_VECTOR, lanes)) for lanes in (low, high)]
        return combine(*shuffled)

    def add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=_FLAGS)

    def exp2(self, x: Any) -> Any:
        """``2 ** x`` for ``x <= 126``; exactly 0 below -126, NaN for NaN. Relative error about 1e-7."""
        lowest = self.fill(-126.0)
        whole = self._round(self.larger(x, lowest))
        rest = self.builder.fsub(x, whole)
        *coefficients, power = [float(c) for c in _EXP2.coef]
        result = self.fill(power)
        for coefficient in reversed(coefficients):
            result = self.multiply_add(result, rest, self.fill(coefficient))
        bits = self.builder.add(self.builder.fptosi(whole, _INT_VECTOR), ir.Constant(_INT_VECTOR, [127] * LANES))
        factor = self.builder.bitcast(self.builder.shl(bits, ir.Constant(_INT_VECTOR, [23] * LANES)), _VECTOR)
        kept = self.builder.fcmp_unordered(">", x, lowest)
        return self.builder.select(kept, self.builder.fmul(result, factor), self.fill(0.0))

    def _round(self, x: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.rint.v{LANES}f32")
        return self.builder.call(function, [x])


def bit_reversed(items: list[Any]) -> list[Any]:
    """Order in which `Emitter.fold` must be given vectors for lane ``i`` to be item ``i``."""
    if len(items) == 1:
        return items
    return bit_reversed(items[0::2]) + bit_reversed(items[1::2])
