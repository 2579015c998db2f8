"""Layers of towers that have biases and means, as Llama 4's and Kimi-K2.5's do, and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.towers.activations import activated, layer_norm
from headwise.runtime.models.towers.dense_attention import dense_attention
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


@dataclass(frozen=True, eq=False)
class TowerLayer:
    """Attention of every patch to every other one, and an MLP without a gate, each behind a norm.

    heads:      of attention
    activation: of the MLP
    """

    before: LayerNorm
    between: LayerNorm
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    into: Linear
    down: Linear
    heads: int
    activation: str

    def forward(self, ops: TensorOps, x: Tensor, angles: Sequence[KernelArray] = ()) -> Tensor:
        """Of ``x [T, hidden]``, which all see each other. angles: cosines and sines, ``[T, 1, D / 2]``; empty: queries
        and keys are not turned"""
        tokens, hidden = x.shape
        heads = (tokens, self.heads, hidden // self.heads)
        given = self.before.of(ops, x)
        query, key = (each.of(ops, given).reshape(heads) for each in (self.query, self.key))
        if angles:
            query, key = (ops.rope(each, *angles) for each in (query, key))
        value = self.value.of(ops, given).reshape(heads)
        seen = dense_attention(ops, query, key, value, heads[2] ** -0.5)
        x = x + self.out.of(ops, seen.reshape((tokens, hidden)))
        inner = activated(ops, self.into.of(ops, self.between.of(ops, x)), self.activation)
        return x + self.down.of(ops, inner)
