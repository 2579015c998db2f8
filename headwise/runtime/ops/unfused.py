"""The operations that can be composed of others, for frameworks without fused kernels for them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.fused import Activation
from headwise.runtime.ops.base import Tensor, Weight
from headwise.runtime.ops.quantised import Matrix, as_float32


class UnfusedOps(ABC):
    """The part of `TensorOps` that is the same wherever a weight is a tensor and an activation a separate operation."""

    @abstractmethod
    def tensor(self, array: NDArray[np.float32]) -> Tensor: ...

    @abstractmethod
    def linear_weight(self, weight: Matrix) -> Weight: ...

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def clamped_mul(self, gate_up: Tensor) -> Tensor: ...

    def linear_bias(self, bias: NDArray[np.float32]) -> Tensor:
        return self.tensor(bias)

    def gated_weight(self, weight: Matrix) -> Weight:
        return self.linear_weight(weight)

    def gated_bias(self, bias: NDArray[np.float32]) -> Tensor:
        return self.tensor(bias)

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
        gate_up = self.linear(x, weight, bias)
        activations = {"silu": self.silu_mul, "gelu_tanh": self.gelu_tanh_mul, "clamped": self.clamped_mul}
        return activations[activation](gate_up)

    def embedding_table(self, table: Matrix) -> Weight:
        return self.tensor(as_float32(table))
