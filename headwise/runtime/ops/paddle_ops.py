"""Tensor operations in Paddle on a CPU.

Paddle computes the matrix products and the elementwise operations on large tensors. NumPy does small or strided work
(rotary embedding, norms of a few rows, row lookups) on views of the same memory: there a Paddle call costs more than
the arithmetic.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.bfloat16 import to_float32
from headwise.runtime.ops.base import StepUpload
from headwise.runtime.ops.numpy_ops import NumpyOps, in_place, trim_heap
from headwise.runtime.ops.paddle_import import paddle
from headwise.runtime.ops.paddle_norm import rms_norm
from headwise.runtime.ops.quantised import Matrix, as_float32
from headwise.runtime.ops.unfused import UnfusedOps

_C_ops: Any = paddle._C_ops
swiglu = paddle.nn.functional.swiglu

_numpy = NumpyOps()

FEW_ELEMENTS = 1 << 15
"""Tensors of fewer elements are normalised by NumPy: that is done before Paddle's threads have woken up."""


class _Memory:
    """Lends a tensor's memory to NumPy arrays. These keep the tensor alive, and `_lender` finds it by them.

    The memory must not become a new tensor by DLPack: a tensor made by DLPack that keeps another such tensor alive
    deadlocks when it is freed, since its deleter holds the lock that the other's deleter waits for. `from_kernel_array`
    returns the lender or copies instead.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: paddle.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": None if tensor.is_contiguous() else tuple(4 * stride for stride in tensor.strides),
            "typestr": "<f4",
            "version": 3,
        }


class PaddleOps(UnfusedOps):
    """`TensorOps` whose tensors are float32 Paddle tensors in host memory. Paddle gets ``threads`` threads."""

    name = products = "paddle"
    itemsize = 4

    def __init__(self, threads: int = 1) -> None:
        paddle.device.set_device("cpu")
        paddle.base.core.set_num_threads(threads)
        paddle.set_grad_enabled(False)
        self._borrowed: WeakValueDictionary[int, paddle.Tensor] = WeakValueDictionary()  # by address

    def tensor(self, array: NDArray[Any]) -> paddle.Tensor:
        if array.dtype == np.uint16:
            array = to_float32(array)
        if array.dtype != np.float32:
            raise TypeError(f"tensors are float32, got an array of {array.dtype}")
        array = np.ascontiguousarray(array)
        return self.from_kernel_array(array) if array.flags.writeable else self._borrow(array)

    def _borrow(self, array: NDArray[Any]) -> paddle.Tensor:
        """A tensor in the memory of a read-only array, such as a mapped file's.

        Paddle never frees the memory of two tensors that DLPack made from one address, and tied embeddings would be
        two. So an array that begins where an earlier one does becomes a view of that one's tensor, or is copied if it
        is longer.
        """
        address = array.ctypes.data
        first = self._borrowed.get(address)
        if first is None:
            first = self._borrowed[address] = paddle.from_dlpack(_writable(array))
        elif first.size < array.size:
            return paddle.from_dlpack(array.copy())
        return first if tuple(first.shape) == array.shape else first.reshape([-1])[: array.size].reshape(array.shape)

    def numpy(self, tensor: paddle.Tensor) -> NDArray[Any]:
        return np.asarray(_Memory(tensor))

    def norm_weight(self, array: NDArray[np.float32]) -> paddle.Tensor:
        return self.tensor(array)

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def step_upload(self, capacity: int = 0) -> StepUpload:
        return in_place

    def host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def empty_like(self, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        return np.empty(array.shape if shape is None else shape, array.dtype)

    def empty_bytes(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.empty(num_bytes, dtype=np.uint8)

    def give_back_memory(self) -> None:
        trim_heap()

    def kernel_array(self, tensor: paddle.Tensor) -> NDArray[Any]:
        return np.ascontiguousarray(self.numpy(tensor))

    def from_kernel_array(self, array: NDArray[Any]) -> paddle.Tensor:
        lender = _lender(array)
        if lender is None:
            return paddle.from_dlpack(array)
        same = array.shape == tuple(lender.shape) and array.ctypes.data == lender.data_ptr()
        return lender if same else paddle.from_dlpack(array.copy())

    def linear_weight(self, weight: Matrix) -> paddle.Tensor:
        return self.tensor(as_float32(weight))

    def tied_weight(self, table: paddle.Tensor, start: int, stop: int) -> paddle.Tensor:
        return self.from_kernel_array(self.numpy(table)[start:stop])

    def linear(self, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        y: paddle.Tensor = _C_ops.matmul(x, weight, False, True)
        return y if bias is None else y + bias

    def embedding(self, table: paddle.Tensor, ids: NDArray[np.int32], scale: float = 1.0) -> paddle.Tensor:
        return self.tensor(_numpy.embedding(self.numpy(table), ids, scale))

    def rms_norm(self, x: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
        if x.size < FEW_ELEMENTS:
            return self.from_kernel_array(_numpy.rms_norm(self.numpy(x), self.numpy(weight), eps))
        return rms_norm(x, weight, eps)

    def rotation(
        self, positions: NDArray[np.int32], inverse: NDArray[np.float32], scale: NDArray[np.float32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return _numpy.rotation(positions, inverse, scale)

    def rope(self, x: paddle.Tensor, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> paddle.Tensor:
        return self.from_kernel_array(_numpy.rope(self.numpy(x), cos, sin))

    def silu_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        return swiglu(gate_up)

    def gelu_tanh_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        half = gate_up.shape[-1] // 2
        return paddle.nn.functional.gelu(gate_up[:, :half], approximate=True) * gate_up[:, half:]

    def clamped_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        return self.from_kernel_array(_numpy.clamped_mul(self.numpy(gate_up)))

    def limited_silu_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        return self.from_kernel_array(_numpy.limited_silu_mul(self.numpy(gate_up)))

    def clipped_silu_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        return self.from_kernel_array(_numpy.clipped_silu_mul(self.numpy(gate_up)))

    def squared_relu(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.square(_C_ops.maximum(x, paddle.zeros([1])))  # Paddle's ReLU makes 0 of NaN

    def sigmoid_mul(self, x: paddle.Tensor, gate: paddle.Tensor) -> paddle.Tensor:
        return self.from_kernel_array(_numpy.sigmoid_mul(self.numpy(x), self.numpy(gate)))

    def take_rows(self, x: paddle.Tensor, rows: NDArray[np.int64]) -> paddle.Tensor:
        return self.tensor(self.numpy(x)[rows])

    def put_rows(self, target: paddle.Tensor, rows: NDArray[np.int32], values: NDArray[Any]) -> None:
        _numpy.put_rows(self.numpy(target), rows, values)

    def scatter_add_rows(
        self, target: paddle.Tensor, rows: NDArray[np.int64], x: paddle.Tensor, weights: NDArray[np.float32]
    ) -> None:
        _numpy.scatter_add_rows(self.numpy(target), rows, self.numpy(x), weights)

    def greedy(self, logits: paddle.Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return _numpy.greedy(self.numpy(logits))


def _lender(array: NDArray[Any]) -> paddle.Tensor | None:
    """The tensor whose memory an array is a view of; None if there is none."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.tensor if isinstance(base, _Memory) else None


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory as a writable array, since DLPack refuses read-only ones, and weights are mapped read-only.

    That is safe: no operation here writes to a weight.
    """
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
