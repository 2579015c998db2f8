"""Tensor operations in CuPy, on its current device and stream: a whole model without any other framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import cupy
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.programs import Programs
from headwise.runtime.ops.base import StepUpload, T
from headwise.runtime.ops.gpu_ops import GpuOps
from headwise.runtime.ops.step_upload import PinnedUpload


class CupyOps(GpuOps):
    """`TensorOps` whose tensors are CuPy arrays. cuBLAS sums products of float16 and bfloat16 in float32."""

    name = "cupy"

    def __init__(self, dtype: str, programs: Programs) -> None:
        super().__init__(cupy, numpy_dtype(dtype), programs)
        # What graphs compute with lies apart: a graph finds it where it was when it was captured. They share it, since
        # they run one after the other, and what one leaves is read before the next begins.
        self._graph_memory = cupy.cuda.MemoryPool()

    def step_upload(self) -> StepUpload:
        return PinnedUpload()

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        stream = cupy.cuda.get_current_stream()
        with cupy.cuda.using_allocator(self._graph_memory.malloc):
            stream.begin_capture()
            try:
                result = work()
            except BaseException:
                with contextlib.suppress(Exception):  # the capture is void already
                    stream.end_capture()
                raise
            graph = stream.end_capture()

        def replay() -> T:
            graph.launch()
            return result

        return replay

    def host(self, array: Any) -> NDArray[Any]:
        return cupy.asnumpy(array)

    def give_back_memory(self) -> None:
        self._graph_memory.free_all_blocks()
        cupy.get_default_memory_pool().free_all_blocks()

    def numpy(self, tensor: Any) -> NDArray[Any]:
        return cupy.asnumpy(self._wide(tensor))
