"""Tensor operations in plain NumPy: they run wherever Python does, and are the reference for the others."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.runtime.ops.array_ops import ArrayOps
from headwise.runtime.ops.base import StepUpload


class NumpyOps(ArrayOps):
    """`TensorOps` whose tensors are NumPy arrays.

    dtype: float32; float16 and bfloat16 are for comparison with a GPU
    """

    name = "numpy"
    products = f"NumPy ({np.show_config(mode='dicts')['Build Dependencies']['blas']['name']})"

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__(np, numpy_dtype(dtype))

    def step_upload(self, capacity: int = 0) -> StepUpload:
        return in_place

    def host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def numpy(self, tensor: NDArray[Any]) -> NDArray[Any]:
        return tensor

    def give_back_memory(self) -> None:
        trim_heap()

    def matmul(self, x: NDArray[Any], weight: NDArray[Any]) -> NDArray[Any]:
        # In float16 or bfloat16, NumPy's product would round every partial sum.
        product: NDArray[Any] = self._narrow(self._wide(x) @ self._wide(weight))
        return product


def in_place(*arrays: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
    """The `StepUpload` of a CPU: the arrays themselves."""
    return arrays


def trim_heap() -> None:
    """Return the heap's free pages to the operating system. glibc keeps them; other C libraries are left alone."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
