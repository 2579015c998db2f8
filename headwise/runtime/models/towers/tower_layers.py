"""Layers of towers that have biases and means, as Llama 4's and Kimi-K2.5's do, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.towers.activations import layer_norm
from headwise.runtime.models.towers.tower_weights import TowerWeights
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps, Weight


@dataclass(frozen=True, eq=False)
class LayerNorm:
    weight: KernelArray
    bias: KernelArray
    eps: float

    @classmethod
    def read(cls, source: TowerWeights, name: str, size: int, eps: float) -> LayerNorm:
        return cls(source.kernel_array(f"{name}.weight", size), source.kernel_array(f"{name}.bias", size), eps)

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        """Of ``x [T, size]``."""
        return layer_norm(ops, x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, eq=False)
class Linear:
    """A product and a bias."""

    weight: Weight
    bias: Tensor

    @classmethod
    def read(cls, source: TowerWeights, name: str, outputs: int, inputs: int) -> Linear:
        return cls(source.linear(f"{name}.weight", outputs, inputs), source.bias(f"{name}.bias", outputs))

    @classmethod
    def rotated(
        cls, source: TowerWeights, weight: NDArray[np.float32], bias: NDArray[np.float32], head_dim: int
    ) -> Linear:
        """Queries or keys, of ``weight [outputs, inputs]`` and ``bias [outputs]`` that turn neighbours together: here
        these are half a head apart, as `TensorOps.rope` takes them."""
        halves = np.concatenate((np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)))
        order = (np.arange(0, len(weight), head_dim)[:, None] + halves).reshape(-1)
        return cls(source.matrix(weight[order]), source.vector(bias[order]))

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        """Of ``x [T, inputs]``: ``[T, outputs]``."""
        return ops.linear(x, self.weight, self.bias)
