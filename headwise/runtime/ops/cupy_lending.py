"""How Paddle's tensors on a GPU and CuPy's arrays share memory: Paddle allocates, and lends.

A tensor becomes an array by its address. An array becomes a tensor again by its lender, the tensor that it came from.
Memory that CuPy allocated never becomes a tensor.

DLPack is not used. Paddle keeps the deleters of DLPack capsules by address, and runs them under one lock: the memory of
two tensors made from one address is never freed, and a tensor that keeps another such tensor alive deadlocks when it is
freed. Besides, this way nothing is synchronised, and bfloat16 is a dtype like any other.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.base import Tensor


class _Lent(cupy.cuda.UnownedMemory):  # type: ignore[misc]
    """A tensor's memory. Keeps the tensor alive for as long as an array uses it."""

    def __init__(self, tensor: Tensor, num_bytes: int, gpu: int) -> None:
        super().__init__(tensor.data_ptr(), num_bytes, tensor, gpu)
        self.tensor = tensor


class CupyLending:
    """CuPy arrays in the memory of Paddle tensors, on the device that is CuPy's current one when this is made.

    CuPy's current stream must be Paddle's, since Paddle gives freed memory to what is enqueued there next. Copies from
    and to host memory are enqueued there, too; Paddle's own would go to the legacy default stream.
    """

    def __init__(self) -> None:
        self._gpu = cupy.cuda.Device().id

    def lend(self, tensor: Tensor, dtype: np.dtype[Any]) -> cupy.ndarray:
        """An array in the memory of a contiguous tensor of ``dtype``; it keeps the tensor alive."""
        memory = _Lent(tensor, tensor.size * dtype.itemsize, self._gpu)
        return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def lender(self, array: cupy.ndarray) -> Tensor | None:
        """The tensor that an array, or the array it is a part of, was lent by; None if it was not lent."""
        memory = array.data.mem
        return memory.tensor if isinstance(memory, _Lent) else None

    def fill(self, array: cupy.ndarray, values: NDArray[Any]) -> None:
        """Copy ``values``, C-contiguous and of the array's dtype, into it. They may change once this returns."""
        array.set(values)

    def host(self, array: cupy.ndarray) -> NDArray[Any]:
        """A copy in host memory, once all that writes to the array is done."""
        values: NDArray[Any] = cupy.asnumpy(array)
        return values
