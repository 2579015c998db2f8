"""What lies between the matrix products of a model on a GPU, one kernel each: the host half of `elementwise.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import numpy as np

from headwise.errors import ConfigError
from headwise.kernels.cuda.launch import Grid, Kernel, address_of, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.fused import Activation, is_gated

Array = Any

NUMBERS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
"""What `elementwise.cu` calls each dtype."""

SOURCE = "elementwise.cu"
VECTOR_BYTES = 16
"""Rows are read and written in vectors of this size, and aligned to it."""

THREADS = 128
NORM_THREADS = (THREADS, 256, 512)
"""Of a block that norms: the wider ones hold one row that is wider than a warp."""

HELD = 4
"""Vectors of a row that one thread holds, at most, while the row is normed."""

MOST_THREADS = 2**31 - 2**10
"""Of a grid: the kernels count them in 32 bits."""

_WARP = 32


@dataclass(frozen=True)
class _Kernels:
    """Those of one dtype. rms_norm, add_rms_norm: by the threads of a block; activated: by the activation."""

    rms_norm: dict[int, Kernel]
    add_rms_norm: dict[int, Kernel]
    activated: dict[str, Kernel]
    sigmoid_mul: Kernel
    sigmoid_mul_rows: Kernel
    gather_rows: Kernel


class CudaElementwise:
    """Norms, activations and embedding rows on device arrays, on the current stream.

    Arrays are float16, bfloat16 or float32, with arithmetic in float32 and one rounding at the end. Inputs may have
    gaps between rows (slices of a fused projection are fine); ``out`` is C-contiguous, of the input's dtype. Launches
    are decided by shapes and strides alone, and nothing is allocated.

    Every operation answers whether it was enqueued. It is not, and nothing is done, where rows are not whole vectors
    of 16 bytes aligned to as much, or shapes do not belong together: that is for other code to compute, or to refuse.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[np.dtype[Any], _Kernels] = {}

    def prepare(self, dtype: np.dtype[Any]) -> None:
        """Compile or load all that calls on arrays of ``dtype`` need, so that they only enqueue.

        Raises:
            ConfigError: there are no kernels for ``dtype``.
        """
        program = self._programs(SOURCE, variant_of(dtype))
        self._kernels[dtype] = _Kernels(
            rms_norm={threads: program.kernel("rms_norm", threads) for threads in NORM_THREADS},
            add_rms_norm={threads: program.kernel("add_rms_norm", threads) for threads in NORM_THREADS},
            activated={
                name: program.kernel(f"{name}_mul" if is_gated(name) else name, THREADS)
                for name in get_args(Activation)
            },
            sigmoid_mul=program.kernel("sigmoid_mul", THREADS),
            sigmoid_mul_rows=program.kernel("sigmoid_mul_rows", THREADS),
            gather_rows=program.kernel("gather_rows", THREADS),
        )

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> bool:
        """``out = x / sqrt(mean(x**2, -1) + eps) * weight`` for ``x [T, N]`` or ``[T, H, N]``, ``weight`` float32.

        ``weight [N]``, or ``[H, N]`` of each head its own. ``out`` may be ``x``.
        """
        vectors = x.shape[-1] * x.dtype.itemsize // VECTOR_BYTES
        heads = x.shape[1] if len(x.shape) == 3 else 1
        rows = x.shape[0] * heads
        group = _norm_group(vectors)
        is_of_heads = len(weight.shape) == 2
        if (
            vectors > HELD * group
            or rows * group > MOST_THREADS
            or out.shape != x.shape
            or not (
                _in_vectors(x)
                and is_dense(weight, x.shape[1 if is_of_heads else -1 :])
                and is_dense(out, x.shape, x.dtype)
            )
        ):
            return False
        threads = max(group, THREADS)
        self._of(x).rms_norm[threads](
            _grid(rows * group, threads),
            (
                *addresses_of(x, weight, out), x.strides[0], x.strides[1] if heads > 1 else 0,
                x.shape[-1] if is_of_heads else 0, rows, heads, vectors, group, eps,
            ),
        )  # fmt: skip
        return True

    def add_rms_norm(
        self, x: Array, addend: Array, weight: Array, eps: float, total: Array, out: Array, bias: Array | None = None
    ) -> bool:
        """``total = x + addend`` of ``[T, N]`` without gaps, and ``out`` is its `rms_norm`. ``total`` may be ``x``.

        To ``addend``, ``bias [N]`` of the same dtype is added before.
        """
        tokens, width = x.shape
        vectors = width * x.dtype.itemsize // VECTOR_BYTES
        group = _norm_group(vectors)
        if (
            vectors > HELD * group
            or tokens * group > MOST_THREADS
            or not (_in_vectors(x) and is_dense(weight, (width,)))
            or not all(is_dense(array, x.shape, x.dtype) for array in (x, addend, total, out))
            or not (bias is None or is_dense(bias, (width,), x.dtype))
        ):
            return False
        threads = max(group, THREADS)
        self._of(x).add_rms_norm[threads](
            _grid(tokens * group, threads),
            (*addresses_of(x, addend, bias, weight, total, out), tokens, vectors, group, eps),
        )
        return True

    def activated(self, x: Array, out: Array, activation: Activation, bias: Array | None = None) -> bool:
        """``out [T, N] = activation(gate) * up`` of ``x [T, 2 * N] = gate | up``, to which ``bias [2 * N]`` of the same
        dtype is added before; or ``activation(x)`` of ``x [T, N]`` and ``bias [N]``, where there is no gate.

        ``gelu_tanh`` is the tanh approximation.
        """
        (tokens, width), each = out.shape, 2 if is_gated(activation) else 1
        vectors = width * out.dtype.itemsize // VECTOR_BYTES
        count = tokens * vectors
        if (
            x.shape != (tokens, each * width)
            or count > MOST_THREADS
            or width * out.dtype.itemsize % VECTOR_BYTES
            or not (_in_vectors(x) and is_dense(out, out.shape, x.dtype))
            or not (bias is None or is_dense(bias, (each * width,), x.dtype))
        ):
            return False
        self._of(out).activated[activation](
            _grid(count, THREADS),
            (*addresses_of(x, out, bias), x.strides[0], count, vectors),
        )
        return True

    def sigmoid_mul(self, x: Array, gate: Array, out: Array) -> bool:
        """``out [T, N] = x [T, N] * sigmoid(gate)`` for ``gate [T, N]`` or ``[T, 1]``; ``x`` has no gaps."""
        tokens, width = out.shape
        vectors = width * out.dtype.itemsize // VECTOR_BYTES
        count, is_of_rows = tokens * vectors, gate.shape == (tokens, 1)
        if (
            count > MOST_THREADS
            or gate.dtype != out.dtype
            or not (_in_vectors(out) and is_dense(x, out.shape, out.dtype) and is_dense(out, out.shape, out.dtype))
            or not (is_of_rows or (gate.shape == out.shape and _in_vectors(gate)))
        ):
            return False
        kernels = self._of(out)
        (kernels.sigmoid_mul_rows if is_of_rows else kernels.sigmoid_mul)(
            _grid(count, THREADS),
            (*addresses_of(x, gate, out), gate.strides[0], count, vectors),
        )
        return True

    def gather_rows(self, table: Array, ids: Array, out: Array, scale: float = 1.0) -> bool:
        """``out [T, N] = table[ids] * scale`` for ``table [V, N]``; ``ids int32 [T]`` are known to be rows of it."""
        vectors = table.shape[1] * table.dtype.itemsize // VECTOR_BYTES
        count = ids.shape[0] * vectors
        shape = (ids.shape[0], table.shape[1])
        if (
            count > MOST_THREADS
            or not (_in_vectors(table) and is_dense(out, shape, table.dtype))
            or not (ids.dtype == np.int32 and ids.flags.c_contiguous)
        ):
            return False
        self._of(table).gather_rows(
            _grid(count, THREADS),
            (*addresses_of(table, ids, out), table.strides[0], count, vectors, scale),
        )
        return True

    def _of(self, array: Array) -> _Kernels:
        if array.dtype not in self._kernels:
            self.prepare(array.dtype)
        return self._kernels[array.dtype]


def variant_of(dtype: np.dtype[Any]) -> Defines:
    """The macros of `elementwise.cu` for arrays of ``dtype``.

    Raises:
        ConfigError: there is no such variant.
    """
    if str(dtype) not in NUMBERS:
        raise ConfigError(f"a GPU does not compute in {dtype}: choose {', '.join(NUMBERS)}")
    return {"NUMBER": NUMBERS[str(dtype)], "HELD": HELD}


@cache
def is_computed(dtype: np.dtype[Any]) -> bool:
    """Whether there are kernels for it. Its name takes a microsecond to ask for."""
    return str(dtype) in NUMBERS


def _norm_group(vectors: int) -> int:
    """Threads for a row to norm: a power of two, at most a warp, or a block of one of `NORM_THREADS`."""
    if vectors <= _WARP:
        return 1 << max(vectors - 1, 0).bit_length()
    return next((threads for threads in NORM_THREADS if vectors <= threads), NORM_THREADS[-1])


def _in_vectors(array: Array) -> bool:
    """Whether the elements of each row lie side by side, in whole vectors."""
    itemsize = array.dtype.itemsize
    return (
        is_computed(array.dtype)
        and array.strides[-1] == itemsize
        and not (address_of(array) | array.shape[-1] * itemsize) % VECTOR_BYTES
        and not any(stride % VECTOR_BYTES for stride in array.strides[:-1])
    )


def is_dense(array: Array, shape: tuple[int, ...], dtype: np.dtype[Any] | type = np.float32) -> bool:
    """Whether an array is what is expected, without gaps, and begins on a vector."""
    return (
        array.shape == shape
        and array.dtype == dtype
        and bool(array.flags.c_contiguous)
        and not address_of(array) % VECTOR_BYTES
    )


def _grid(threads: int, block: int) -> Grid:
    return (-(-threads // block), 1, 1)
