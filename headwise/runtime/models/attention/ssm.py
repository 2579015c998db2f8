"""State space models (Mamba-2) in some layers, grouped-query attention in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.ssm import CudaSsm, SsmShape
from headwise.kernels.select import make_ssm_kernels
from headwise.kernels.ssm_base import SsmKernels, SsmProjected
from headwise.runtime.models.attention.base import CachedAttention, LayerCache
from headwise.runtime.models.attention.states import StatesAttention, StatesOverCache
from headwise.runtime.models.states_config import SsmConfig
from headwise.runtime.ops.base import KernelArray, TensorOps


@dataclass(frozen=True)
class StateSpaceAttention(StatesAttention[SsmConfig]):
    """`AttentionVariant` of a model of this geometry."""

    rule: ClassVar[str] = "state space models"
    member: ClassVar[tuple[str, str]] = ("part of the heads", "parts of the heads")

    def rule_kernels(self, name: str, threads: int) -> SsmKernels:
        return make_ssm_kernels(name, threads)

    def gpu_rule_kernels(self, parts: GpuParts, layout: BlockLayout, tp_size: int, dtype: str) -> CudaSsm:
        ssm, each = CudaSsm(parts.launcher, parts.allocate), self.states.members // tp_size
        ranks = (range(rank * each, (rank + 1) * each) for rank in range(tp_size))
        groups = {len({self.states.group_of(member) for member in members}) for members in ranks}
        ssm.prepare([SsmShape.of(layout, each, count, dtype) for count in groups])
        return ssm

    def states_over_cache(self, ops: TensorOps, kernels: Any, others: CachedAttention) -> SsmOverCache:
        return SsmOverCache(ops, kernels, others)

    @property
    def numbers_of_member(self) -> int:
        sizes = self.states.sizes
        keys = -(-self.states.groups * 2 * sizes.key_dim // self.states.members)  # which a group's members share
        return keys + sizes.share * (3 * sizes.value_dim + 1)  # inputs, gates, what comes out, steps

    @property
    def heads(self) -> str:
        states, sizes = self.states, self.states.sizes
        return (
            f"{states.members * sizes.share} heads of {sizes.value_dim} in {states.groups} groups with keys of "
            f"{sizes.key_dim}"
        )


class SsmOverCache(StatesOverCache[SsmKernels]):
    """What heads see is gated, and not normed yet."""

    projected_type: ClassVar[type] = SsmProjected

    def values_of(self, projected: SsmProjected) -> int:
        return projected.values

    def take_on(self, cache: LayerCache, projected: SsmProjected, out: KernelArray) -> None:
        where = cache.arena, cache.layout, cache.batch, cache.heads
        self.kernels.attend_ssm(projected.numbers, projected.weights, *where, out=out)
