"""Gated delta-nets in some layers, grouped-query attention with gated heads in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.cuda.delta import CudaDelta, DeltaShape
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.delta_base import DeltaKernels, DeltaProjected, ProjectedDeltaKernels
from headwise.kernels.delta_gates import gated_norm, inputs_of
from headwise.kernels.select import make_delta_kernels
from headwise.kernels.state_layout import sizes_of
from headwise.runtime.models.attention.base import CachedAttention, LayerCache
from headwise.runtime.models.attention.states import StatesAttention, StatesOverCache
from headwise.runtime.models.states_config import DeltaConfig
from headwise.runtime.ops.base import KernelArray, TensorOps


@dataclass(frozen=True)
class DeltaNetAttention(StatesAttention[DeltaConfig]):
    """`AttentionVariant` of a model of this geometry."""

    rule: ClassVar[str] = "gated delta-nets"
    member: ClassVar[tuple[str, str]] = ("key head", "key heads")

    def rule_kernels(self, name: str, threads: int) -> DeltaKernels | ProjectedDeltaKernels:
        return make_delta_kernels(name, threads)

    def gpu_rule_kernels(self, parts: GpuParts, layout: BlockLayout, tp_size: int, dtype: str) -> CudaDelta:
        delta = CudaDelta(parts.launcher, parts.allocate)
        delta.prepare([DeltaShape.of(layout, self.states.members // tp_size, dtype)])
        return delta

    def states_over_cache(self, ops: TensorOps, kernels: Any, others: CachedAttention) -> DeltaOverCache:
        return DeltaOverCache(ops, kernels, others)

    @property
    def numbers_of_member(self) -> int:
        sizes = self.states.sizes
        values = sizes.share * sizes.value_dim
        return sizes.channels + 2 * values + 2 * sizes.share  # inputs, gates, what comes out, rates and decays

    @property
    def more_of_attention(self) -> int:
        config = self.config
        return config.hidden_size * config.head_dim * config.num_heads  # the gates

    @property
    def heads(self) -> str:
        sizes, count = self.states.sizes, self.states.members
        return f"{count} key heads of {sizes.key_dim} and {count * sizes.share} value heads of {sizes.value_dim}"


class DeltaOverCache(StatesOverCache[DeltaKernels | ProjectedDeltaKernels]):
    """What value heads see is normed and gated."""

    projected_type: ClassVar[type] = DeltaProjected

    def values_of(self, projected: DeltaProjected) -> int:
        values: int = projected.weights.speed.size * projected.weights.norm.size  # of all heads
        return values

    def take_on(self, cache: LayerCache, projected: DeltaProjected, out: KernelArray) -> None:
        where = cache.arena, cache.layout, cache.batch, cache.heads
        numbers, weights = projected.numbers, projected.weights
        if isinstance(self.kernels, ProjectedDeltaKernels):
            self.kernels.attend_projected(numbers, weights, *where, out=out)
            return
        sizes, tokens = sizes_of(cache.layout), numbers.shape[0]
        inputs, gates = inputs_of(numbers, weights, sizes)
        seen = self.ops.empty_like(numbers, (tokens, *weights.speed.shape, sizes.value_dim))
        self.kernels.attend_delta(inputs, *where, out=seen)
        out[...] = gated_norm(seen.reshape(gates.shape), gates, weights).reshape(tokens, -1)
