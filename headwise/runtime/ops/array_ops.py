"""Tensor operations in the array interface that NumPy and CuPy share; on NumPy they are the reference for a GPU."""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.fused import SILU_LIMIT, SWIGLU_ALPHA, SWIGLU_LIMIT
from headwise.runtime.ops.base import StepUpload
from headwise.runtime.ops.quantised import Matrix, as_floats
from headwise.runtime.ops.unfused import UnfusedOps

Array = Any

_GELU_SCALE = np.float32(np.sqrt(2.0 / np.pi))


class ArrayOps(UnfusedOps):
    """`TensorOps` whose tensors are arrays of the module ``xp``, which is NumPy or CuPy.

    dtype: of weights and activations: float32, float16 or bfloat16. Sums and exponentials are computed in float32
    """

    name: str
    products: str

    def __init__(self, xp: Any, dtype: np.dtype[Any]) -> None:
        self.xp = xp
        self.dtype = dtype
        self.itemsize = dtype.itemsize

    # ---- to the device and back ----

    def tensor(self, array: NDArray[Any]) -> Array:
        if array.dtype == np.uint16:
            return self._of_bits(self.upload(array))
        return self.upload(array).astype(self.dtype, copy=False)

    def _of_bits(self, bits: Array) -> Array:
        """Numbers of which these are the bits in bfloat16."""
        if self.dtype.name == "bfloat16":
            return bits.view(self.dtype)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(self.dtype, copy=False)

    def norm_weight(self, array: NDArray[np.float32]) -> Array:
        return self.upload(array)

    def upload(self, array: NDArray[Any]) -> Array:
        return self.xp.asarray(array)

    @abstractmethod
    def step_upload(self, capacity: int = 0) -> StepUpload: ...

    @abstractmethod
    def numpy(self, tensor: Array) -> NDArray[Any]: ...

    def kernel_array(self, tensor: Array) -> Array:
        return self.xp.ascontiguousarray(tensor)

    def from_kernel_array(self, array: Array) -> Array:
        return array

    def empty_like(self, array: Array, shape: tuple[int, ...] | None = None) -> Array:
        return self.xp.empty(array.shape if shape is None else shape, array.dtype)

    def empty_bytes(self, num_bytes: int) -> Array:
        return self.xp.empty(num_bytes, dtype=np.uint8)

    # ---- arithmetic ----

    def linear_weight(self, weight: Matrix) -> Array:
        return self.tensor(as_floats(weight)).T

    def tied_weight(self, table: Array, start: int, stop: int) -> Array:
        return table[start:stop].T

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        y = self.matmul(x, weight)
        if bias is not None:
            y += bias
        return y

    def matmul(self, x: Array, weight: Array) -> Array:
        """``x [T, in] @ weight [in, out]``, summed in float32."""
        return self.xp.dot(x, weight)

    def embedding(self, table: Array, ids: Array, scale: float = 1.0) -> Array:
        rows = table[ids]
        return rows if scale == 1.0 else self._narrow(self._wide(rows) * np.float32(self.dtype.type(scale)))

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        wide = self._wide(x)
        # To the bit what `mean` gives, which runs much Python at each call.
        mean_square = (wide * wide).sum(axis=-1, keepdims=True) / np.float32(wide.shape[-1])
        return self._narrow(wide / self.xp.sqrt(mean_square + np.float32(eps)) * weight)

    def rotation(self, positions: Array, inverse: Array, scale: Array | None = None) -> tuple[Array, Array]:
        by_axis = inverse.reshape(-1, inverse.shape[-1])
        places = positions.astype(np.float32).reshape(len(positions), len(by_axis))
        angles = reduce(add, (places[:, axis, None, None] * each for axis, each in enumerate(by_axis)))
        cosines, sines = self.xp.cos(angles), self.xp.sin(angles)
        return (cosines, sines) if scale is None else (cosines * scale, sines * scale)

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        xp, half = self.xp, x.shape[-1] // 2
        first, second = self._wide(x[..., :half]), self._wide(x[..., half:])
        rotated = xp.empty(x.shape, dtype=np.float32)
        xp.multiply(first, cos, out=rotated[..., :half])
        xp.multiply(second, cos, out=rotated[..., half:])
        rotated[..., :half] -= second * sin
        rotated[..., half:] += first * sin
        return self._narrow(rotated)

    def silu_mul(self, gate_up: Array) -> Array:
        gate, up = self._gate_up(gate_up)
        with np.errstate(over="ignore"):  # exp(-gate) may be inf: the quotient is then 0, which is right
            return self._narrow(gate / (1 + self.xp.exp(-gate)) * up)

    def gelu_tanh_mul(self, gate_up: Array) -> Array:
        gate, up = self._gate_up(gate_up)
        inner = _GELU_SCALE * (gate + np.float32(0.044715) * gate**3)
        return self._narrow(np.float32(0.5) * gate * (1 + self.xp.tanh(inner)) * up)

    def clamped_mul(self, gate_up: Array) -> Array:
        gate, up = self._gate_up(gate_up)
        limit = np.float32(SWIGLU_LIMIT)
        gate, up = self.xp.minimum(gate, limit), self.xp.clip(up, -limit, limit)
        with np.errstate(over="ignore"):  # as in `silu_mul`
            return self._narrow(gate / (1 + self.xp.exp(np.float32(-SWIGLU_ALPHA) * gate)) * (up + 1))

    def limited_silu_mul(self, gate_up: Array) -> Array:
        gate, up = self._gate_up(gate_up)
        limit = np.float32(SILU_LIMIT)
        gate, up = self.xp.minimum(gate, limit), self.xp.clip(up, -limit, limit)
        with np.errstate(over="ignore"):  # as in `silu_mul`
            return self._narrow(gate / (1 + self.xp.exp(-gate)) * up)

    def clipped_silu_mul(self, gate_up: Array) -> Array:
        gate, up = self._gate_up(gate_up)
        limit = np.float32(SWIGLU_LIMIT)
        with np.errstate(over="ignore"):  # as in `silu_mul`
            activated = self.xp.minimum(gate / (1 + self.xp.exp(-gate)), limit)
        return self._narrow(activated * self.xp.clip(up, -limit, limit))

    def squared_relu(self, x: Array) -> Array:
        kept = self.xp.maximum(self._wide(x), np.float32(0))
        return self._narrow(kept * kept)

    def sigmoid_mul(self, x: Array, gate: Array) -> Array:
        with np.errstate(over="ignore"):  # as in `silu_mul`
            return self._narrow(self._wide(x) / (1 + self.xp.exp(-self._wide(gate))))

    def take_rows(self, x: Array, rows: NDArray[np.int64]) -> Array:
        return x[self.upload(rows)]

    def put_rows(self, target: Array, rows: NDArray[np.int32], values: NDArray[Any]) -> None:
        target[self.upload(rows)] = self.tensor(values)

    def scatter_add_rows(self, target: Array, rows: NDArray[np.int64], x: Array, weights: NDArray[np.float32]) -> None:
        places, factors = self.upload(rows), self.upload(weights)
        target[places] += self._narrow(factors[:, None] * self._wide(x))

    def greedy(self, logits: Array) -> tuple[Array, Array]:
        wide = self._wide(logits)
        tokens = wide.argmax(axis=1)
        return tokens.astype(np.int32), wide[self.xp.arange(len(tokens)), tokens]

    @abstractmethod
    def give_back_memory(self) -> None: ...

    def _gate_up(self, gate_up: Array) -> tuple[Array, Array]:
        gate, up = self.xp.split(gate_up, 2, axis=-1)
        return self._wide(gate), self._wide(up)

    def _wide(self, x: Array) -> Array:
        return x.astype(np.float32, copy=False)

    def _narrow(self, x: Array) -> Array:
        return x.astype(self.dtype, copy=False)
