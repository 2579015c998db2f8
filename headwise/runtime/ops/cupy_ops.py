"""Tensor operations in CuPy, on its current device and stream; no other framework is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.cublas import Cublas
from headwise.kernels.cuda.launch import TritonLauncher
from headwise.kernels.cuda.programs import Programs
from headwise.runtime.ops.base import Between, Cut, Fetch, KernelArray, StepUpload
from headwise.runtime.ops.cuda_graphs import CudaGraphs, borrowed
from headwise.runtime.ops.gpu_ops import GpuOps
from headwise.runtime.ops.pinned_fetch import PinnedFetches
from headwise.runtime.ops.step_upload import PinnedUpload

PIECE_BYTES = 64 << 20
"""Weights are uploaded in pieces of at most so many bytes, or of one row. CuPy copies an array through pinned memory of
its size, rounded up to a power of two, and keeps that. And no whole weight in float32 takes up device memory."""


class CupyOps(GpuOps):
    """`TensorOps` whose tensors are CuPy arrays. cuBLAS sums products of float16 and bfloat16 in float32.

    dtype: of weights and activations: float32, float16 or bfloat16
    programs, launcher: compile the kernels, and run them
    weights_dtype, own_products: see `GpuOps`

    Raises:
        ConfigError: there are no kernels for ``dtype``.
    """

    name, products = "cupy", "cuBLAS"

    def __init__(
        self,
        dtype: str,
        programs: Programs,
        launcher: TritonLauncher,
        weights_dtype: str = "auto",
        own_products: bool = False,
    ) -> None:
        super().__init__(cupy, numpy_dtype(dtype), programs, launcher, weights_dtype, own_products=own_products)
        self._graphs = CudaGraphs()
        self._fetches = PinnedFetches()
        self._cublas = Cublas(partial(cupy.empty, dtype="uint8"))  # no cycle: memory goes with the last reference

    def tensor(self, array: NDArray[Any]) -> Any:
        if array.dtype == np.uint16:
            return self._of_bits(self.send(array))
        return self._in_pieces(array, self.dtype)

    def send(self, array: NDArray[Any]) -> Any:
        return self._in_pieces(array, array.dtype)

    def _in_pieces(self, array: NDArray[Any], dtype: Any) -> Any:
        out = cupy.empty(array.shape, dtype)
        rows = max(1, PIECE_BYTES // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            out[start : start + rows] = self.upload(array[start : start + rows])
        return out

    def matmul(self, x: Any, weight: Any) -> Any:
        out = cupy.empty((x.shape[0], weight.shape[1]), self.dtype)
        return out if self._cublas.product(x, weight, out) else super().matmul(x, weight)

    def multiply_wide(self, x: Any, weight: Any, out: Any) -> None:
        if not self._cublas.product(x, weight, out):
            raise ValueError(f"{x.dtype} {x.shape} and {weight.dtype} {weight.shape} cannot be multiplied by cuBLAS")

    def multiply_heads(self, x: Any, weights: Any, out: Any) -> None:
        self._cublas.products_of_heads(x, weights, out)

    def step_upload(self, capacity: int = 0) -> StepUpload:
        return PinnedUpload(capacity)

    def capture(self, work: Callable[[], Sequence[KernelArray]]) -> Callable[[], Sequence[KernelArray]]:
        return partial(self._graphs.record(lambda cut: work()), _never)

    def capture_pieces(
        self, work: Callable[[Cut], Sequence[KernelArray]]
    ) -> Callable[[Between], Sequence[KernelArray]]:
        return self._graphs.record(work)

    def borrowed(self, array: Any) -> Any:
        return borrowed(array)

    def host(self, array: Any) -> NDArray[Any]:
        values: NDArray[Any] = cupy.asnumpy(array)
        return values

    def fetch(self, array: Any) -> Fetch:
        return self._fetches(array)

    def give_back_memory(self) -> None:
        self._graphs.give_back()
        cupy.get_default_memory_pool().free_all_blocks()

    def numpy(self, tensor: Any) -> NDArray[Any]:
        return self.host(self._wide(tensor))


def _never(number: int) -> bool:
    """What is between the pieces of work that is not cut."""
    return True
