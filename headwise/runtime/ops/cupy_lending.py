"""How Paddle's tensors on a GPU and CuPy's arrays share memory: Paddle allocates, and lends.

A tensor becomes an array by its address, and an array becomes a tensor again because its lender is known: no memory of
CuPy's ever becomes a tensor. So nothing depends on how Paddle takes in DLPack capsules, whose deleters it keeps by
address and runs under one lock: of two tensors of one address the memory is never let go, and a tensor that keeps
another such alive deadlocks when it dies. Nor is anything synchronised, and bfloat16 is a dtype like any other.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.base import Tensor


class _Lent(cupy.cuda.UnownedMemory):  # type: ignore[misc]
    """A tensor's memory, for as long as an array uses it."""

    def __init__(self, tensor: Tensor, num_bytes: int, gpu: int) -> None:
        super().__init__(tensor.data_ptr(), num_bytes, tensor, gpu)
        self.tensor = tensor


class CupyLending:
    """Arrays in the memory of tensors on what is CuPy's current device when this is made.

    CuPy's current stream must be Paddle's: memory that Paddle frees is used again by what is enqueued there next.
    Copies from and to host memory go there, too; Paddle's own would go to the legacy default stream.
    """

    def __init__(self) -> None:
        self._gpu = cupy.cuda.Device().id

    def lend(self, tensor: Tensor, dtype: np.dtype[Any]) -> cupy.ndarray:
        """A contiguous tensor of ``dtype`` as an array, which keeps it alive."""
        memory = _Lent(tensor, tensor.size * dtype.itemsize, self._gpu)
        return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def lender(self, array: cupy.ndarray) -> Tensor | None:
        """The tensor that lent an array, or what it is a part of; None if it is other memory."""
        memory = array.data.mem
        return memory.tensor if isinstance(memory, _Lent) else None

    def fill(self, array: cupy.ndarray, values: NDArray[Any]) -> None:
        """Copy C-contiguous ``values`` of the array's dtype, which may change once this returns."""
        array.set(values)

    def host(self, array: cupy.ndarray) -> NDArray[Any]:
        """The array in host memory, when all that writes it is done."""
        values: NDArray[Any] = cupy.asnumpy(array)
        return values
