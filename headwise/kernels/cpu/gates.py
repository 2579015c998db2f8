# mypy: ignore-errors
"""Gates in compiled code: rows times sigmoids of others. What has such factors is made of it, as SiLU and GELU are.

And exponentials, of which states fade.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.simd import LANES, Emitter

_N = types.intp
_GELU_SCALE = np.float32(2 * math.sqrt(2 / math.pi))
_pasted = numba.njit(inline="always", fastmath={"nsz", "arcp", "contract"}, nogil=True, error_model="numpy")


def padded(count: int) -> int:
    """Numbers of a row of ``count`` where whole vectors of it are computed."""
    return -(-count // LANES) * LANES


@_pasted
def sigmoid(x):
    """Of one number, without overflow."""
    return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)


@intrinsic
def times_sigmoid(typing, row, at, gate, gate_at, count):
    """``row[at:] *= 1 / (1 + exp(-gate[gate_at:]))`` for ``count`` numbers, and those up to the end of a vector."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        row, at, gate, gate_at, count = e.args
        rows, gates, limit, one = e.at(row, at), e.at(gate, gate_at), e.fill(126.0), e.fill(1.0)
        with cgutils.for_range(builder, e.ceil_div(count, LANES)) as loop:
            first = e.times(loop.index, LANES)
            exponent = builder.fmul(e.load(e.at(gates, first)), e.fill(-math.log2(math.e)))
            exponent = builder.select(builder.fcmp_ordered(">", exponent, limit), limit, exponent)
            place = e.at(rows, first)
            e.store(builder.fdiv(e.load(place), builder.fadd(one, e.exp2(exponent))), place)
        return context.get_dummy_value()

    return types.void(row, _N, gate, _N, _N), emit


@intrinsic
def set_exponentials(typing, row, at, count):
    """``row[at:] = exp(row[at:])``, which are at most 0, for ``count`` numbers, and those up to the end of a vector."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        row, at, count = e.args
        rows, scale = e.at(row, at), e.fill(math.log2(math.e))
        with cgutils.for_range(builder, e.ceil_div(count, LANES)) as loop:
            place = e.at(rows, e.times(loop.index, LANES))
            e.store(e.exp2(builder.fmul(e.load(place), scale)), place)
        return context.get_dummy_value()

    return types.void(row, _N, _N), emit


@_pasted
def times_gelu(row, at, gate, gate_at, count):
    """``row[at:] *= gelu(gate[gate_at:])``, with the tanh approximation; the gate is changed. As `times_sigmoid`.

    ``gelu(g) = g * sigmoid(2 z)``, ``z = sqrt(2 / pi) * (g + 0.044715 * g ** 3)``.
    """
    for i in range(count):
        g = gate[gate_at + i]
        row[at + i] *= g
        gate[gate_at + i] = _GELU_SCALE * (g + np.float32(0.044715) * g * g * g)
    times_sigmoid(row, at, gate, gate_at, count)
