"""Kimi Delta Attention in some layers, latent attention, or grouped queries, in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.cuda.kda import CudaKda, KdaShape
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.kda_base import KdaKernels, KdaProjected
from headwise.kernels.select import make_kda_kernels
from headwise.runtime.models.attention.base import CachedAttention, LayerCache
from headwise.runtime.models.attention.states import StatesAttention, StatesOverCache
from headwise.runtime.models.states_config import KdaConfig
from headwise.runtime.ops.base import KernelArray, TensorOps


@dataclass(frozen=True)
class KimiDeltaAttention(StatesAttention[KdaConfig]):
    """`AttentionVariant` of a model of this geometry."""

    rule: ClassVar[str] = "Kimi Delta Attention"
    member: ClassVar[tuple[str, str]] = ("head", "heads")

    def rule_kernels(self, name: str, threads: int) -> KdaKernels:
        return make_kda_kernels(name, threads)

    def gpu_rule_kernels(self, parts: GpuParts, layout: BlockLayout, tp_size: int, dtype: str) -> CudaKda:
        kda = CudaKda(parts.launcher, parts.allocate)
        kda.prepare([KdaShape.of(layout, self.states.members // tp_size, dtype, 2 * self.states.rank)])
        return kda

    def states_over_cache(self, ops: TensorOps, kernels: Any, others: CachedAttention) -> KdaOverCache:
        return KdaOverCache(ops, kernels, others)

    def weight_elements(self, layer: int = 0) -> int:
        states = self.states
        if layer not in states.layers:
            return super().weight_elements(layer)
        sizes = states.sizes
        second = states.rank * states.members * (sizes.key_dim + sizes.value_dim)
        return super().weight_elements(layer) + 2 * self.config.hidden_size * states.rank + second

    @property
    def numbers_of_member(self) -> int:
        sizes = self.states.sizes
        return sizes.channels + 1 + sizes.value_dim  # inputs, a rate, what comes out

    @property
    def heads(self) -> str:
        return f"{self.states.members} heads of {self.states.sizes.key_dim}"


class KdaOverCache(StatesOverCache[KdaKernels]):
    """What heads see is normed and gated."""

    projected_type: ClassVar[type] = KdaProjected

    def values_of(self, projected: KdaProjected) -> int:
        values: int = projected.gates.shape[1]
        return values

    def take_on(self, cache: LayerCache, projected: KdaProjected, out: KernelArray) -> None:
        self.kernels.attend_kda(projected, cache.arena, cache.layout, cache.batch, cache.heads, out=out)
