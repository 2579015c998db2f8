"""Tensor operations in Paddle on a GPU, on Paddle's current stream. Kernel arrays are CuPy's, in Paddle's memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.bfloat16 import to_float32
from headwise.kernels.cuda.launch import address_of
from headwise.kernels.fused import SILU_LIMIT, SWIGLU_ALPHA, SWIGLU_LIMIT
from headwise.runtime.ops.base import KernelArray, StepUpload
from headwise.runtime.ops.cupy_lending import CupyLending
from headwise.runtime.ops.paddle_import import paddle
from headwise.runtime.ops.paddle_norm import rms_norm
from headwise.runtime.ops.quantised import Matrix, as_float32
from headwise.runtime.ops.step_upload import PinnedUpload
from headwise.runtime.ops.unfused import UnfusedOps

_functional = paddle.nn.functional
_untyped: Any = paddle
"""For what Paddle's type annotations leave out: dtypes by name, functions without annotations."""

_NAMES = {
    getattr(paddle, name): name
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


class PaddleGpuOps(UnfusedOps):
    """`TensorOps` whose tensors are Paddle's, on its current device, which must be CuPy's current one (`open_paddle`).

    Not `CapturingOps`: Paddle would allocate at other addresses than those that a graph was captured with.

    dtype: of weights and activations: float32, float16 or bfloat16. Sums and exponentials are computed in float32
    """

    name = products = "paddle"

    def __init__(self, dtype: str) -> None:
        paddle.set_grad_enabled(False)
        self._dtype, self._lending = dtype, CupyLending()
        self._rounded = numpy_dtype(dtype).type
        self.itemsize = numpy_dtype(dtype).itemsize

    # ---- to the device and back ----

    def tensor(self, array: NDArray[Any]) -> paddle.Tensor:
        return self._narrow(self._on_device(to_float32(array) if array.dtype == np.uint16 else array))

    def norm_weight(self, array: NDArray[np.float32]) -> paddle.Tensor:
        return self._on_device(array)

    def upload(self, array: NDArray[Any]) -> KernelArray:
        return self.kernel_array(self._on_device(array))

    def _on_device(self, array: NDArray[Any]) -> paddle.Tensor:
        tensor: paddle.Tensor = _untyped.empty(array.shape, array.dtype.name)
        self._lending.fill(self.kernel_array(tensor), np.ascontiguousarray(array))
        return tensor

    def step_upload(self, capacity: int = 0) -> StepUpload:
        return PinnedUpload(capacity, lambda size: self.kernel_array(paddle.empty([size], "int32")))

    def numpy(self, tensor: paddle.Tensor) -> NDArray[Any]:
        return self.host(self.kernel_array(self._wide(tensor)))

    def host(self, array: KernelArray) -> NDArray[Any]:
        return self._lending.host(array)

    def kernel_array(self, tensor: paddle.Tensor) -> KernelArray:
        return self._lending.lend(tensor.contiguous(), numpy_dtype(_NAMES[tensor.dtype]))

    def from_kernel_array(self, array: KernelArray) -> paddle.Tensor:
        """See `TensorOps.from_kernel_array`.

        Raises:
            TypeError: the array is not a contiguous part of a kernel array that these operations made.
        """
        lender: Any = self._lending.lender(array)
        if lender is None or not array.flags.c_contiguous or array.dtype.name != _NAMES[lender.dtype]:
            raise TypeError(
                f"{array.dtype} {list(array.shape)} cannot become a tensor: only kernel arrays that came of these "
                "operations can, and contiguous parts of them"
            )
        if array.shape == tuple(lender.shape):
            return cast("paddle.Tensor", lender)
        start = (address_of(array) - lender.data_ptr()) // array.dtype.itemsize
        part = lender.reshape([-1])[start : start + array.size].reshape(array.shape)
        return cast("paddle.Tensor", part)

    def empty_like(self, array: KernelArray, shape: tuple[int, ...] | None = None) -> KernelArray:
        return self.kernel_array(paddle.empty(array.shape if shape is None else shape, array.dtype.name))

    def empty_bytes(self, num_bytes: int) -> KernelArray:
        return self.kernel_array(paddle.empty([num_bytes], "uint8"))

    def give_back_memory(self) -> None:
        paddle.device.cuda.empty_cache()

    # ---- arithmetic ----

    def linear_weight(self, weight: Matrix) -> paddle.Tensor:
        return self.tensor(as_float32(weight))

    def tied_weight(self, table: paddle.Tensor, start: int, stop: int) -> paddle.Tensor:
        return table[start:stop]

    def linear(self, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        y: paddle.Tensor = _untyped.matmul(x, weight, transpose_y=True)
        return y if bias is None else y + bias

    def embedding(self, table: paddle.Tensor, ids: KernelArray, scale: float = 1.0) -> paddle.Tensor:
        rows = _functional.embedding(self.from_kernel_array(ids), table)
        return rows if scale == 1.0 else self._narrow(self._wide(rows) * float(self._rounded(scale)))

    def rms_norm(self, x: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
        # Paddle's kernel takes weights of the input's dtype only.
        return self._narrow(rms_norm(self._wide(x), weight, eps))

    def rotation(
        self, positions: KernelArray, inverse: KernelArray, scale: KernelArray | None = None
    ) -> tuple[KernelArray, KernelArray]:
        places, frequencies = self.from_kernel_array(positions), self.from_kernel_array(inverse)
        axes = frequencies.shape[0] if frequencies.ndim > 1 else 1
        by_axis = self._wide(places).reshape([-1, axes, 1, 1]) * frequencies.reshape([1, axes, 1, -1])
        angles = by_axis.sum(axis=1)
        cosines, sines = paddle.cos(angles), paddle.sin(angles)
        if scale is not None:
            factors = self.from_kernel_array(scale)
            cosines, sines = cosines * factors, sines * factors
        return self.kernel_array(cosines), self.kernel_array(sines)

    def rope(self, x: paddle.Tensor, cos: KernelArray, sin: KernelArray) -> paddle.Tensor:
        cosines, sines = self.from_kernel_array(cos), self.from_kernel_array(sin)
        first, second = paddle.chunk(self._wide(x), 2, axis=-1)
        rotated = [first * cosines - second * sines, second * cosines + first * sines]
        return self._narrow(paddle.concat(rotated, axis=-1))

    def silu_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        return _functional.swiglu(gate_up)

    def gelu_tanh_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        gate, up = paddle.chunk(self._wide(gate_up), 2, axis=-1)
        return self._narrow(_functional.gelu(gate, approximate=True) * up)

    def clamped_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        gate, up = paddle.chunk(self._wide(gate_up), 2, axis=-1)
        gate, up = paddle.clip(gate, max=SWIGLU_LIMIT), paddle.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return self._narrow(gate * _functional.sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0))

    def limited_silu_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        gate, up = paddle.chunk(self._wide(gate_up), 2, axis=-1)
        gate, up = paddle.clip(gate, max=SILU_LIMIT), paddle.clip(up, -SILU_LIMIT, SILU_LIMIT)
        return self._narrow(_functional.silu(gate) * up)

    def clipped_silu_mul(self, gate_up: paddle.Tensor) -> paddle.Tensor:
        gate, up = paddle.chunk(self._wide(gate_up), 2, axis=-1)
        activated = paddle.clip(_functional.silu(gate), max=SWIGLU_LIMIT)
        return self._narrow(activated * paddle.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT))

    def squared_relu(self, x: paddle.Tensor) -> paddle.Tensor:
        kept = _untyped.maximum(self._wide(x), paddle.zeros([1]))  # Paddle's ReLU makes 0 of NaN
        return self._narrow(paddle.square(kept))

    def sigmoid_mul(self, x: paddle.Tensor, gate: paddle.Tensor) -> paddle.Tensor:
        return self._narrow(self._wide(x) * _functional.sigmoid(self._wide(gate)))

    def take_rows(self, x: paddle.Tensor, rows: NDArray[np.int64]) -> paddle.Tensor:
        return _functional.embedding(self._on_device(rows), x)

    def put_rows(self, target: paddle.Tensor, rows: NDArray[np.int32], values: NDArray[Any]) -> None:
        paddle.scatter_(target, self._on_device(rows), self.tensor(values), overwrite=True)

    def scatter_add_rows(
        self, target: paddle.Tensor, rows: NDArray[np.int64], x: paddle.Tensor, weights: NDArray[np.float32]
    ) -> None:
        factors = self._on_device(weights).reshape([-1, 1])
        paddle.index_add_(target, self._on_device(rows), 0, self._narrow(factors * self._wide(x)))

    def greedy(self, logits: paddle.Tensor) -> tuple[KernelArray, KernelArray]:
        wide = self._wide(logits)
        is_nan = paddle.isnan(wide)
        # Paddle does not say what its argmax does with NaN, so a row's first NaN is searched for separately.
        first_nan = paddle.argmax(is_nan.astype("int32"), axis=1, keepdim=True)
        largest = paddle.argmax(wide, axis=1, keepdim=True)
        tokens = paddle.where(paddle.any(is_nan, axis=1, keepdim=True), first_nan, largest)
        best = paddle.take_along_axis(wide, tokens, axis=1, broadcast=False)
        return self.kernel_array(tokens.astype("int32").reshape([-1])), self.kernel_array(best.reshape([-1]))

    def _wide(self, x: paddle.Tensor) -> paddle.Tensor:
        return x if x.dtype == paddle.float32 else x.astype("float32")

    def _narrow(self, x: paddle.Tensor) -> paddle.Tensor:
        return x if self._dtype == "float32" else cast("paddle.Tensor", cast(Any, x).astype(self._dtype))
