"""The tensor operations a model is written in.

A model file names no framework. Tensors are opaque but for what NumPy, CuPy and Paddle share: ``+``, ``*``,
``.shape``, ``.reshape(shape)`` and basic slicing. Shapes: ``T`` tokens, ``H`` heads, ``D`` head size, ``N`` features.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tensor = Any
Weight = Any
"""A linear layer's weight in whatever form `TensorOps.linear_weight` made of it."""


class TensorOps(Protocol):
    name: str

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """The array as a tensor on the device; shares memory where the device is the CPU."""

    def numpy(self, tensor: Tensor) -> NDArray[Any]:
        """The tensor as a NumPy array; shares memory where the device is the CPU."""

    def kernel_array(self, tensor: Tensor) -> Any:
        """The tensor, C-contiguous, as the array type that attention kernels on this device take."""

    def from_kernel_array(self, array: Any) -> Tensor:
        """The reverse of `kernel_array`; never copies."""

    def linear_weight(self, weight: NDArray[np.float32]) -> Weight:
        """Prepare a weight stored as ``[out, in]``."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """``x [T, in] @ weight.T + bias -> [T, out]``."""

    def embedding(self, table: Tensor, ids: NDArray[np.int32]) -> Tensor:
        """Rows ``ids [T]`` of ``table [V, N]``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x**2, -1) + eps) * weight`` over the last axis; ``x`` may be ``[T, N]`` or ``[T, H, D]``."""

    def rope(self, x: Tensor, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> Tensor:
        """Rotate ``x [T, H, D]`` by halves (the Hugging Face convention): ``cos``, ``sin`` are ``[T, 1, D / 2]``."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``gate_up [T, 2 * N] = gate | up``."""

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """``gelu(gate) * up`` with the tanh approximation, of ``gate_up [T, 2 * N] = gate | up``."""

    def take_rows(self, x: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Rows ``rows`` of ``x [T, N]``."""

    def scatter_add_rows(
        self, target: Tensor, rows: NDArray[np.int64], x: Tensor, weights: NDArray[np.float32]
    ) -> None:
        """Add ``weights[i] * x[i]`` of ``x [R, N]`` to row ``rows[i]`` of ``target [T, N]``, in place.

        ``rows`` names no row twice, and ``target`` is the result of an operation, never a weight.
        """
