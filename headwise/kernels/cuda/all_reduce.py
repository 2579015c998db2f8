"""The one-shot all-reduce of a node's GPUs, with the residual stream's norm: the host half of `all_reduce.cu`.

For tensors as small as those of a decode step, where what a reduction costs are its hops: one here, for NCCL's ring two
for each other rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.elementwise import (
    HELD,
    NORM_THREADS,
    NUMBERS,
    VECTOR_BYTES,
    Array,
    is_dense,
    variant_of,
)
from headwise.kernels.cuda.launch import Grid, Kernel, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs

SOURCE = "all_reduce.cu"
MOST_RANKS = 8
BLOCKS = 64
"""At most, of a launch: they wait for those of other ranks, so all must have room on a card at once."""

_STEP_BYTES = 8


def most_bytes(ranks: int) -> int:
    """Of a tensor. Each rank reads all of every other one's, NCCL's ring twice a rank's share of it: so fewer for
    more ranks."""
    return 512 << 10 if ranks <= 4 else 256 << 10


def memory_bytes(ranks: int) -> int:
    """That a rank needs, of zeros: two parts, flags, and the step's number."""
    return 2 * most_bytes(ranks) + _STEP_BYTES * (ranks * BLOCKS + 2)


def defines_of(dtype: np.dtype[Any], ranks: int, vectors: int) -> Defines:
    """The macros of `all_reduce.cu` for rows of ``vectors`` of 16 bytes.

    Raises:
        ConfigError: a GPU does not compute in ``dtype``.
    """
    held = -(-vectors // NORM_THREADS[-1])
    return {**variant_of(dtype), "HELD": held, "RANKS": ranks, "PART": most_bytes(ranks), "BLOCKS": BLOCKS}


@dataclass(frozen=True)
class RankSums:
    """What ranks sum: rows of ``width`` numbers of ``dtype``, a model's hidden size."""

    dtype: str
    ranks: int
    width: int

    def defines(self) -> Defines:
        """As `defines_of`."""
        dtype = numpy_dtype(self.dtype)
        return defines_of(dtype, self.ranks, self.width * dtype.itemsize // VECTOR_BYTES)


@dataclass(frozen=True)
class _Kernels:
    """Those of one width of rows."""

    all_reduce: Kernel
    all_reduce_norm: Kernel


class CudaAllReduce:
    """Sums over the ranks of a node, on the current stream. All ranks must call the same operations in the same order.

    Arrays are C-contiguous ``[T, N]``, of float16, bfloat16 or float32; sums are float32, in rank order, rounded once.
    Launches are decided by shapes alone, nothing is allocated, and a launch waits on the GPU for those of all others:
    for ever, if one never comes.

    addresses: of the ranks' memory, `memory_bytes` of each, as this process has it mapped. All zeros at first
    """

    def __init__(self, programs: Programs, rank: int, addresses: Sequence[int]) -> None:
        self._programs, self._ranks = programs, len(addresses)
        others = (*addresses, *(0,) * (MOST_RANKS - len(addresses)))
        self._places = (*others, addresses[rank], rank)
        self._kernels: dict[tuple[np.dtype[Any], int], _Kernels] = {}

    def takes(self, x: Array) -> bool:
        """Whether it is for tensors like ``x``: the same on all ranks, for shape and dtype alone decide."""
        width = x.shape[-1] * x.dtype.itemsize
        return (
            len(x.shape) == 2
            and str(x.dtype) in NUMBERS
            and 0 < x.shape[0] * width <= most_bytes(self._ranks)
            and width % VECTOR_BYTES == 0
            and width <= HELD * NORM_THREADS[-1] * VECTOR_BYTES
        )

    def all_reduce(self, x: Array, out: Array) -> None:
        """``out`` is the sum of all ranks' ``x``, which it may be."""
        _check(x, out)
        rows, vectors, threads, grid = _shape(x)
        kernel = self._of(x, vectors, threads).all_reduce
        kernel(grid, (*self._places, *addresses_of(x, out), rows, vectors))

    def add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float, total: Array, out: Array, bias: Array | None = None
    ) -> None:
        """``total = residual + bias +`` the sum of all ranks' ``x``, and ``out`` its norm; see
        `CudaElementwise.rms_norm`.

        ``total`` may be ``residual``; ``weight`` is float32 ``[N]``, ``bias [N]`` as ``x``, and the same on all ranks.
        """
        _check(x, residual, total, out)
        assert bias is None or is_dense(bias, x.shape[1:], x.dtype), "a bias for each column, as the rows are"
        assert is_dense(weight, x.shape[1:]), "a norm's weights are float32, one for each column"
        rows, vectors, threads, grid = _shape(x)
        kernel = self._of(x, vectors, threads).all_reduce_norm
        kernel(
            grid,
            (*self._places, *addresses_of(x, residual, bias, weight, total, out), rows, vectors, eps),
        )

    def _of(self, x: Array, vectors: int, threads: int) -> _Kernels:
        key = x.dtype, vectors
        if key not in self._kernels:
            program = self._programs(SOURCE, defines_of(x.dtype, self._ranks, vectors))
            self._kernels[key] = _Kernels(
                *(program.kernel(name, threads) for name in ("all_reduce", "all_reduce_norm"))
            )
        return self._kernels[key]


def _shape(x: Array) -> tuple[int, int, int, Grid]:
    """Rows, vectors of one, threads of a block, and the grid."""
    rows, vectors = x.shape[0], x.shape[1] * x.dtype.itemsize // VECTOR_BYTES
    threads = next((threads for threads in NORM_THREADS if vectors <= threads), NORM_THREADS[-1])
    return rows, vectors, threads, (min(rows, BLOCKS), 1, 1)


def _check(*arrays: Array) -> None:
    assert all(is_dense(array, arrays[0].shape, arrays[0].dtype) for array in arrays), "rows without gaps, of one dtype"
