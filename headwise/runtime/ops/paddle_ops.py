"""Tensor operations in Paddle on a CPU.

Paddle computes the matrix products and the wide elementwise operations. What is small or strided (rotary embedding, row
lookups) goes through NumPy views of the same memory: there a Paddle call costs more than the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import _C_ops
from paddle.incubate.nn.functional import fused_rms_norm, swiglu

from headwise.runtime.ops.numpy_ops import NumpyOps

_numpy = NumpyOps()


class _Memory:
    """Lends a tensor's memory to NumPy arrays, which keep the tensor alive.

    Not `np.from_dlpack`: a Paddle tensor made from an array that was made from a Paddle tensor, both by DLPack,
    deadlocks in Paddle when the outer one dies (its deleter takes a lock that the inner one's wants too).
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: paddle.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": _TYPES[tensor.dtype],
            "version": 3,
        }


_TYPES = {paddle.float32: "<f4", paddle.int32: "<i4", paddle.int64: "<i8"}


class PaddleOps:
    """`TensorOps` whose tensors are float32 Paddle tensors in host memory."""

    name = "paddle"

    def __init__(self) -> None:
        paddle.set_device("cpu")
        paddle.set_grad_enabled(False)

    def tensor(self, array: NDArray[Any]) -> paddle.Tensor:
        if array.dtype != np.float32:
            raise TypeError(f"tensors are float32, got an array of {array.dtype}")
        return paddle.from_dlpack(_writable(np.ascontiguousarray(array)))

    def numpy(self, tensor: paddle.Tensor) -> NDArray[Any]:
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        return np.asarray(_Memory(tensor))

    kernel_array = numpy

    def from_kernel_array(self, array: NDArray[Any]) -> paddle.Tensor:
        return paddle.from_dlpack(array)

    def linear_weight(self, weight: NDArray[np.float32]) -> paddle.Tensor:
        return self.tensor(weight)

    def linear(self, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        y = _C_ops.matmul(x, weight, False, True)
        return y if bias is None else y + bias

    def embedding(self, table: paddle.Tensor, ids: NDArray[np.int32]) -> paddle.Tensor:
        return self.tensor(self.numpy(table)[ids])

    def rms_norm(self, x: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
        return fused_rms_norm(x, weight, None, eps, len(x.shape) - 1)[0]

    def rope(self, x: paddle.Tensor, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> paddle.Tensor:
        return self.from_kernel_array(_numpy.rope(self.numpy(x), cos, sin))

    def silu_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        return swiglu(gate_up)

    def gelu_tanh_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        half = gate_up.shape[-1] // 2
        return paddle.nn.functional.gelu(gate_up[:, :half], approximate=True) * gate_up[:, half:]

    def take_rows(self, x: paddle.Tensor, rows: NDArray[np.int64]) -> paddle.Tensor:
        return self.tensor(self.numpy(x)[rows])


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory, marked writable: DLPack refuses read-only arrays, and weights are mapped read-only.

    Nothing here writes to a tensor that it did not make.
    """
    if array.flags.writeable:
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    holder = _Borrowed(array, interface)
    return np.asarray(holder)


class _Borrowed:
    """Keeps ``array`` alive for as long as a view of its memory lives."""

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: NDArray[Any], interface: dict[str, Any]) -> None:
        self.array = array
        self.__array_interface__ = interface
