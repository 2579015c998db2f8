"""Gated delta-nets in some layers, grouped-query attention in the others.

A member of a delta-net's layer is the state of one key head and the value heads that share it: tensor-parallel ranks
are dealt key heads as they are dealt KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionKernels
from headwise.kernels.cuda.delta import CudaDelta, DeltaShape
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.delta import delta_layout, sizes_of
from headwise.kernels.delta_base import DeltaKernels, DeltaProjected, DeltaWeights, ProjectedDeltaKernels
from headwise.kernels.delta_gates import gated_norm, inputs_of
from headwise.kernels.select import make_delta_kernels, make_kernels
from headwise.runtime.models.attention.base import CachedAttention, LayerCache, Serving
from headwise.runtime.models.attention.gqa import GroupedQueryAttention
from headwise.runtime.models.attention.wanted import wanted_rows
from headwise.runtime.models.base import DeltaConfig, ModelConfig, fitting_sizes
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps


@dataclass(frozen=True)
class MixedKernels:
    """Kernels of both kinds of layers."""

    attention: AttentionKernels
    delta: DeltaKernels | ProjectedDeltaKernels

    @property
    def name(self) -> str:
        return self.attention.name


@dataclass(frozen=True)
class DeltaNetAttention:
    """`AttentionVariant` of a model of this geometry."""

    config: ModelConfig
    delta: DeltaConfig
    is_replicated = False

    @cached_property
    def _others(self) -> GroupedQueryAttention:
        return GroupedQueryAttention(self.config)

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        if layer in self.delta.layers:
            return delta_layout(block_size, slots, self.delta.sizes)
        return self._others.layout(block_size, slots, kv_dtype, layer)

    def check(self, serving: Serving) -> None:
        """See `AttentionVariant.check`."""
        if serving.device == "cuda" and serving.tensor_ops == "paddle":
            raise ConfigError(
                f"{serving.model} keeps recurrent states (gated delta-nets), which tensor_ops paddle does not compute "
                "on a GPU: choose tensor_ops cupy, or device cpu"
            )
        self._others.check(serving)
        if self.delta.key_heads % serving.tp_size:
            raise ConfigError(
                f"tp_size {serving.tp_size} does not divide the {self.delta.key_heads} key heads of this model's "
                f"delta-nets, whose states ranks do not share; sizes that fit: {fitting_sizes(self.config)}"
            )

    def host_kernels(self, name: str, threads: int) -> MixedKernels:
        return MixedKernels(make_kernels(name, threads), make_delta_kernels(name, threads))

    def gpu_kernels(self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str) -> MixedKernels:
        """See `AttentionVariant.gpu_kernels`."""
        with_attention = [layout for layer, layout in enumerate(layouts) if layer not in self.delta.layers]
        states = layouts[self.delta.layers[0]]
        delta = CudaDelta(parts.launcher, parts.allocate)
        delta.prepare([DeltaShape.of(states, self.delta.key_heads // tp_size, dtype)])
        return MixedKernels(self._others.gpu_kernels(parts, with_attention, tp_size, dtype), delta)

    def over_cache(self, ops: TensorOps, kernels: Any) -> MixedOverCache:
        return MixedOverCache(ops, kernels.delta, self._others.over_cache(ops, kernels.attention))

    def weight_elements(self, layer: int = 0) -> int:
        c, sizes = self.config, self.delta.sizes
        if layer not in self.delta.layers:
            return self._others.weight_elements(layer) + c.hidden_size * c.head_dim * c.num_heads  # the gates
        values = sizes.share * sizes.value_dim
        of_key_head = sizes.channels + 2 * values + 2 * sizes.share  # inputs, gates, what comes out, rates and decays
        return c.hidden_size * self.delta.key_heads * of_key_head

    def geometry(self) -> str:
        sizes, count = self.delta.sizes, len(self.delta.layers)
        return (
            f"{count} of them delta-nets of {self.delta.key_heads} key heads of {sizes.key_dim} and "
            f"{self.delta.key_heads * sizes.share} value heads of {sizes.value_dim}, the others with "
            f"{self._others.geometry()}"
        )

    def members(self, count: int, policy: HeadPolicy) -> str:
        return f"{count} (layer, key head) pairs" if policy.is_state else self._others.members(count, policy)


class MixedOverCache:
    """`CachedAttention` of either kind of layer: a delta-net's projects its input to `DeltaProjected`."""

    def __init__(self, ops: TensorOps, kernels: DeltaKernels | ProjectedDeltaKernels, others: CachedAttention) -> None:
        self._ops, self._kernels, self._others = ops, kernels, others

    def __call__(self, cache: LayerCache, *projected: Any) -> Tensor:
        """Of a delta-net, what this rank's value heads see, normed and gated: ``[T, value_heads * value_dim]``."""
        first = projected[0]
        if not isinstance(first, DeltaProjected):
            return self._others(cache, *projected)
        cache.wait()  # states are read first
        seen = self.result_of(first) if cache.out is None else cache.out
        self._delta(cache, first.numbers, first.weights, seen)  # of all rows, of which states are made
        return self._ops.from_kernel_array(wanted_rows(seen, cache.wanted, self._ops))

    def result_of(self, *projected: Any) -> KernelArray:
        """See `CachedAttention.result_of`."""
        first = projected[0]
        if not isinstance(first, DeltaProjected):
            return self._others.result_of(*projected)
        values = first.weights.speed.size * first.weights.norm.size  # of all heads
        return self._ops.empty_like(first.numbers, (first.numbers.shape[0], values))

    def _delta(self, cache: LayerCache, numbers: KernelArray, weights: DeltaWeights, out: KernelArray) -> None:
        where = cache.arena, cache.layout, cache.batch, cache.heads
        if isinstance(self._kernels, ProjectedDeltaKernels):
            self._kernels.attend_projected(numbers, weights, *where, out=out)
            return
        sizes, tokens = sizes_of(cache.layout), numbers.shape[0]
        inputs, gates = inputs_of(numbers, weights, sizes)
        seen = self._ops.empty_like(numbers, (tokens, *weights.speed.shape, sizes.value_dim))
        self._kernels.attend_delta(inputs, *where, out=seen)
        out[...] = gated_norm(seen.reshape(gates.shape), gates, weights).reshape(tokens, -1)
