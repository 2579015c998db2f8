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
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.delta import delta_layout, sizes_of
from headwise.kernels.delta_base import DeltaInputs, DeltaKernels
from headwise.kernels.select import make_delta_kernels, make_kernels
from headwise.runtime.models.attention.base import CachedAttention, LayerCache, Serving
from headwise.runtime.models.attention.gqa import GroupedQueryAttention
from headwise.runtime.models.base import DeltaConfig, ModelConfig
from headwise.runtime.ops.base import Tensor, TensorOps


@dataclass(frozen=True)
class MixedKernels:
    """Kernels of both kinds of layers."""

    attention: AttentionKernels
    delta: DeltaKernels

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
        if serving.device == "cuda":
            raise ConfigError(
                f"{serving.model} keeps recurrent states (gated delta-nets), for which there are no GPU kernels yet: "
                "choose device cpu"
            )
        self._others.check(serving)

    def host_kernels(self, name: str, threads: int) -> MixedKernels:
        return MixedKernels(make_kernels(name, threads), make_delta_kernels(name, threads))

    def gpu_kernels(self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str) -> MixedKernels:
        raise NotImplementedError("`check` refuses GPUs")

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
    """`CachedAttention` of either kind of layer: a delta-net's projects its input to `DeltaInputs`."""

    def __init__(self, ops: TensorOps, kernels: DeltaKernels, others: CachedAttention) -> None:
        self._ops, self._kernels, self._others = ops, kernels, others

    def __call__(self, cache: LayerCache, *projected: Any) -> Tensor:
        """Of a delta-net, what this rank's value heads see: ``[T, value_heads, value_dim]``."""
        inputs = projected[0]
        if not isinstance(inputs, DeltaInputs):
            return self._others(cache, *projected)
        cache.wait()  # states are read first
        tokens, key_heads, share = inputs.rate.shape
        value_dim = sizes_of(cache.layout).value_dim
        out = self._ops.empty_like(inputs.mixed, (tokens, key_heads, share, value_dim))
        self._kernels.attend_delta(inputs, cache.arena, cache.layout, cache.batch, cache.heads, out=out)
        return self._ops.from_kernel_array(out.reshape(tokens, key_heads * share, value_dim))
