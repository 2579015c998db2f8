"""Layers of towers: attention and an MLP, each behind a norm; and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.towers.activations import activated, layer_norm
from headwise.runtime.models.towers.dense_attention import Windows, dense_attention
from headwise.runtime.models.towers.tower_weights import TowerWeights
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps, Weight


class Norm(Protocol):
    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        """Of ``x [T, size]``."""


@dataclass(frozen=True, eq=False)
class LayerNorm:
    weight: KernelArray
    bias: KernelArray
    eps: float

    @classmethod
    def read(cls, source: TowerWeights, name: str, size: int, eps: float) -> LayerNorm:
        return cls(source.kernel_array(f"{name}.weight", size), source.kernel_array(f"{name}.bias", size), eps)

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        return layer_norm(ops, x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, eq=False)
class RmsNorm:
    weight: Tensor
    eps: float

    @classmethod
    def read(cls, source: TowerWeights, name: str, size: int, eps: float) -> RmsNorm:
        return cls(source.norm(f"{name}.weight", size), eps)

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, eq=False)
class Linear:
    """A product and a bias. bias: None: there is none"""

    weight: Weight
    bias: Tensor | None

    @classmethod
    def read(cls, source: TowerWeights, name: str, outputs: int, inputs: int, *, has_bias: bool = True) -> Linear:
        weight = source.linear(f"{name}.weight", outputs, inputs)
        return cls(weight, source.bias(f"{name}.bias", outputs) if has_bias else None)

    @classmethod
    def of_frames(
        cls, source: TowerWeights, name: str, outputs: int, frames: int, pixels: int, *, has_bias: bool = True
    ) -> Linear:
        """Of patches of so many equal frames, ``[outputs, 3, frames, pixels]``: weights for all of them, added up."""
        weight = source.array(f"{name}.weight", outputs, 3, frames, pixels).sum(axis=2)
        bias = source.bias(f"{name}.bias", outputs) if has_bias else None
        return cls(source.matrix(weight.reshape(outputs, 3 * pixels)), bias)

    @classmethod
    def of_each_frame(
        cls, source: TowerWeights, name: str, outputs: int, frames: int, pixels: int, *, has_bias: bool = True
    ) -> tuple[Linear, ...]:
        """The same of frames that differ: what they make is to be added up. The first one has the bias."""
        weight = source.array(f"{name}.weight", outputs, 3, frames, pixels)
        bias = source.bias(f"{name}.bias", outputs) if has_bias else None
        return tuple(
            cls(source.matrix(weight[:, :, frame].reshape(outputs, 3 * pixels)), bias if frame == 0 else None)
            for frame in range(frames)
        )

    @classmethod
    def joined(
        cls, source: TowerWeights, name: str, hidden: int, *, has_bias: bool = True
    ) -> tuple[Linear, Linear, Linear]:
        """Queries, keys and values, of which one tensor has the weights, ``[3 * hidden, hidden]``."""
        weights = np.split(source.array(f"{name}.weight", 3 * hidden, hidden), 3)
        biases = np.split(source.array(f"{name}.bias", 3 * hidden), 3) if has_bias else (None,) * 3
        query, key, value = (
            cls(source.matrix(weight), None if bias is None else source.vector(bias))
            for weight, bias in zip(weights, biases, strict=True)
        )
        return query, key, value

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
class Mlp:
    """gate: what goes into the activation, and is multiplied with ``up``; None: ``up`` goes into it"""

    gate: Linear | None
    up: Linear
    down: Linear
    activation: str

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        up = self.up.of(ops, x)
        if self.gate is None:
            return self.down.of(ops, activated(ops, up, self.activation))
        return self.down.of(ops, activated(ops, self.gate.of(ops, x), self.activation) * up)


@dataclass(frozen=True, eq=False)
class TowerLayer:
    """Attention of every patch to every other one, or to those of its window, and an MLP, each behind a norm.

    heads: of attention
    """

    before: Norm
    between: Norm
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    mlp: Mlp
    heads: int

    def forward(self, ops: TensorOps, x: Tensor, angles: Sequence[KernelArray] = (), windows: Windows = ()) -> Tensor:
        """Of ``x [T, hidden]``. angles: cosines and sines, ``[T, 1, D / 2]``; empty: queries and keys are not turned;
        windows: as of `dense_attention`"""
        tokens, hidden = x.shape
        heads = (tokens, self.heads, hidden // self.heads)
        given = self.before.of(ops, x)
        query, key = (each.of(ops, given).reshape(heads) for each in (self.query, self.key))
        if angles:
            query, key = (ops.rope(each, *angles) for each in (query, key))
        value = self.value.of(ops, given).reshape(heads)
        seen = dense_attention(ops, query, key, value, heads[2] ** -0.5, windows)
        x = x + self.out.of(ops, seen.reshape((tokens, hidden)))
        return x + self.mlp.of(ops, self.between.of(ops, x))
