"""Tensor operations in plain NumPy: runs wherever Python does, and says what the others must compute."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

_GELU_SCALE = np.float32(np.sqrt(2.0 / np.pi))


class NumpyOps:
    """`TensorOps` whose tensors are float32 NumPy arrays."""

    name = "numpy"

    def tensor(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def numpy(self, tensor: NDArray[Any]) -> NDArray[Any]:
        return tensor

    def kernel_array(self, tensor: Array) -> Array:
        return np.ascontiguousarray(tensor)

    def from_kernel_array(self, array: Array) -> Array:
        return array

    def linear_weight(self, weight: Array) -> Array:
        return weight.T

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        y = x @ weight
        if bias is not None:
            y += bias
        return y

    def embedding(self, table: Array, ids: NDArray[np.int32]) -> Array:
        return table[ids]

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(eps)) * weight

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        rotated = np.empty(x.shape, dtype=x.dtype)
        np.multiply(first, cos, out=rotated[..., :half])
        np.multiply(second, cos, out=rotated[..., half:])
        rotated[..., :half] -= second * sin
        rotated[..., half:] += first * sin
        return rotated

    def silu_mul(self, gate_up: Array) -> Array:
        gate, up = np.split(gate_up, 2, axis=-1)
        with np.errstate(over="ignore"):  # exp(-gate) may be inf: then the quotient is 0, as it should
            return gate / (1 + np.exp(-gate)) * up

    def gelu_tanh_mul(self, gate_up: Array) -> Array:
        gate, up = np.split(gate_up, 2, axis=-1)
        inner = _GELU_SCALE * (gate + np.float32(0.044715) * gate**3)
        return np.float32(0.5) * gate * (1 + np.tanh(inner)) * up

    def take_rows(self, x: Array, rows: NDArray[np.int64]) -> Array:
        return x[rows]

    def scatter_add_rows(self, target: Array, rows: NDArray[np.int64], x: Array, weights: Array) -> None:
        target[rows] += weights[:, None] * x
