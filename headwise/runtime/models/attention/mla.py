"""Multi-head latent attention (MLA): a layer's one member is a latent per token, which all query heads share.

Tensor parallel: query heads are dealt out, and the latent is on every rank, or, where ranks keep tokens together
(context parallelism), on one of them. Then they send each other, in each layer, queries and what these see, or, of
prompts, the latents of the context: see `headwise.kernels.token_ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy
from headwise.cache_controller.token_share import ALL_TOKENS
from headwise.errors import ConfigError
from headwise.kernels.cuda.latents import check_groups
from headwise.kernels.cuda.mla_kernels import CudaLatentKernels
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.mla import latent_layout, latent_width
from headwise.kernels.mla_base import LatentKernels, RotatingLatentKernels, SharedLatentKernels, UpProjections
from headwise.kernels.nibbles import INT4
from headwise.kernels.select import make_latent_kernels
from headwise.kernels.token_ranks import TokenRanks
from headwise.runtime.models.attention.base import CachedAttention, LayerCache, Serving
from headwise.runtime.models.attention.wanted import of_wanted
from headwise.runtime.models.base import Rotation
from headwise.runtime.models.mla_config import MlaConfig
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

CPU_WIDTH_MULTIPLE = 16
"""Of a latent's numbers, for the CPU's kernels to read them: the lanes of a vector."""


@dataclass(frozen=True)
class LatentAttention:
    """`AttentionVariant` of a model of this geometry."""

    config: ModelConfig
    mla: MlaConfig
    is_replicated = True

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        return latent_layout(block_size, slots, self.mla.width, kv_dtype, self.mla.rotated)

    def check(self, serving: Serving) -> None:
        """See `AttentionVariant.check`."""
        heads, width = self.config.num_heads, latent_width(self.layout(1, 1, serving.kv_dtype))
        if serving.device == "cuda" and serving.tensor_ops == "paddle":
            raise ConfigError(
                f"{serving.model} has latent attention (MLA), which tensor_ops paddle does not compute on a GPU: "
                "choose tensor_ops cupy, or device cpu"
            )
        if serving.device == "cuda" and self.config.sink_logits:
            raise ConfigError(
                f"{serving.model} has sinks in its latent attention, for which there are no kernels of a GPU yet: "
                "choose device cpu"
            )
        if serving.device == "cuda" and serving.kv_dtype == INT4:
            check_groups(self.mla.rank, self.mla.rotated)
        if serving.tp_size > heads:
            raise ConfigError(
                f"tp_size {serving.tp_size} is more than the {heads} query heads of {serving.model}: choose up to that"
            )
        serving.check_context(self, self.config.num_layers)
        if serving.device != "cuda" and serving.kernels != "reference" and width % CPU_WIDTH_MULTIPLE:
            raise ConfigError(
                f"the kernels of a CPU take latents of a multiple of {CPU_WIDTH_MULTIPLE} numbers, those of "
                f"{serving.model} have {width}: choose kernels reference"
            )

    def token_parts(self, layer: int, tp_size: int, most: int) -> int:
        return 1 if self.config.num_heads % tp_size else most

    def host_kernels(self, name: str, threads: int) -> LatentKernels:
        return make_latent_kernels(name, threads)

    def gpu_kernels(
        self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str
    ) -> CudaLatentKernels:
        kernels = CudaLatentKernels(parts)
        self.prepare(kernels, layouts[0], tp_size, dtype)
        return kernels

    def prepare(self, kernels: CudaLatentKernels, layout: BlockLayout, tp_size: int, dtype: str) -> None:
        """Make ready what latents need of the kernels of a GPU."""
        mla, keeping = self.mla, layout.parts
        if keeping > 1:
            of_mla = mla.rank, mla.rotated, mla.plain, mla.value_dim
            kernels.prepare_shared(layout.own, self.config.num_heads // tp_size, keeping, *of_mla, dtype)
            return
        for heads in heads_of_ranks(self.config, tp_size):
            sizes = layout, heads, mla.rank, mla.rotated
            kernels.prepare(*sizes, dtype)
            kernels.prepare_expanded(*sizes, mla.plain, mla.value_dim, dtype)

    def over_cache(self, ops: TensorOps, kernels: Any, ranks: TokenRanks | None = None) -> CachedAttention:
        if ranks is None:
            return LatentOverCache(ops, kernels, self.mla, self.config.attention_scale)
        return SharedLatentOverCache(ops, kernels, self.mla, self.config.attention_scale, ranks)

    def weight_elements(self, layer: int = 0) -> int:
        m, hidden, heads = self.mla, self.config.hidden_size, self.config.num_heads
        queries = heads * (m.plain + m.rotated)
        into_queries = hidden * queries if m.q_rank is None else m.q_rank * (hidden + queries)
        return into_queries + hidden * m.width + m.rank * heads * (m.plain + m.value_dim) + heads * m.value_dim * hidden

    def geometry(self) -> str:
        m = self.mla
        return (
            f"{self.config.num_heads} query heads of {m.plain} + {m.rotated} over latents of {m.rank} + {m.rotated}, "
            f"values of {m.value_dim}"
        )

    def members(self, count: int, policy: HeadPolicy) -> str:
        return f"{count} layers' latents"


def heads_of_ranks(config: ModelConfig, tp_size: int) -> list[int]:
    """Query heads that a rank may have, ascending: they differ by one where ``tp_size`` does not divide them."""
    return sorted({config.num_heads // tp_size, -(-config.num_heads // tp_size)})


class LatentOverCache:
    """`CachedAttention` of queries and latents that are not rotated yet, with a layer's up-projections.

    share: tokens whose latents this rank keeps
    """

    share = ALL_TOKENS

    def __init__(self, ops: TensorOps, kernels: LatentKernels, mla: MlaConfig, scale: float) -> None:
        self._ops, self._kernels, self._mla, self._scale = ops, kernels, mla, scale
        self._rotating = kernels if isinstance(kernels, RotatingLatentKernels) else None

    def __call__(
        self,
        cache: LayerCache,
        query: Tensor,
        compressed: Tensor,
        shared: Tensor,
        up: UpProjections,
        rotation: Rotation,
    ) -> Tensor:
        """Of this rank's heads, ``[T, q_heads, value_dim]``, or of the wanted rows.

        query:      ``[T, q_heads, plain + rotated]``
        compressed: ``[T, rank]``, the part of latents that is not rotated
        shared:     ``[T, rotated]``, the part of keys that is, and that heads share
        """
        queries = self.written(cache, query, compressed, shared, rotation)
        cache.wait()
        cache, queries = of_wanted(cache, queries, self._ops)
        seen = self.result_for(queries) if cache.out is None else cache.out
        if queries.shape[0]:
            self.attend(cache, queries, up, seen)
        return self._ops.from_kernel_array(seen)

    def attend(self, cache: LayerCache, queries: KernelArray, up: UpProjections, seen: KernelArray) -> None:
        """What ``queries`` see of the cache, into ``seen``."""
        where = cache.arena, cache.layout, cache.batch, cache.heads
        self._kernels.attend_latent(queries, up, *where, scale=self._scale, out=seen)

    def result_of(self, *projected: Any) -> KernelArray:
        """See `CachedAttention.result_of`."""
        return self.result_for(self._ops.kernel_array(projected[0]))

    def result_for(self, queries: KernelArray) -> KernelArray:
        """Where what ``queries [T, q_heads, any]`` see goes."""
        return self._ops.empty_like(queries, (*queries.shape[:2], self._mla.value_dim))

    def written(
        self, cache: LayerCache, query: Tensor, compressed: Tensor, shared: Tensor, rotation: Rotation
    ) -> KernelArray:
        """Rotated queries; the step's latents are in the cache, or those that this rank keeps of them."""
        if self._rotating is None:
            queries, latents = self._rotated(query, compressed, shared, rotation)
            self.write(cache, latents)
            return queries
        queries, plain, carrying = map(self._ops.kernel_array, (query, compressed, shared))
        cosines, sines = rotation
        where = cache.arena, cache.layout.own, cache.batch, cache.heads
        self._rotating.write_latent_rope(queries, plain, carrying, cosines, sines, *where, share=self.share)
        return queries

    def write(self, cache: LayerCache, latents: KernelArray) -> None:
        """Store what this rank keeps of the step's ``latents [T, width]``."""
        self._kernels.write_latent(latents, cache.arena, cache.layout, cache.batch, cache.heads)

    def _rotated(
        self, query: Tensor, compressed: Tensor, shared: Tensor, rotation: Rotation
    ) -> tuple[KernelArray, KernelArray]:
        """Queries and latents ``[T, width]``, whose parts that carry positions are rotated."""
        ops, mla, tokens = self._ops, self._mla, query.shape[0]
        queries = ops.kernel_array(query)
        queries[:, :, mla.plain :] = ops.kernel_array(ops.rope(query[:, :, mla.plain :], *rotation))
        latents = ops.empty_like(queries, (tokens, mla.width))
        latents[:, : mla.rank] = ops.kernel_array(compressed)
        turned = ops.rope(shared.reshape([tokens, 1, mla.rotated]), *rotation)
        latents[:, mla.rank :] = ops.kernel_array(turned)[:, 0]
        return queries, latents


class SharedLatentOverCache(LatentOverCache):
    """The same over latents that ``ranks`` keep together."""

    def __init__(
        self, ops: TensorOps, kernels: SharedLatentKernels, mla: MlaConfig, scale: float, ranks: TokenRanks
    ) -> None:
        super().__init__(ops, kernels, mla, scale)
        self._sharing, self._ranks = kernels, ranks
        self.share = ranks.share

    def attend(self, cache: LayerCache, queries: KernelArray, up: UpProjections, seen: KernelArray) -> None:
        where = cache.arena, cache.layout.own, cache.batch, cache.heads
        self._sharing.attend_shared(queries, up, *where, self._ranks, scale=self._scale, out=seen)

    def write(self, cache: LayerCache, latents: KernelArray) -> None:
        where = cache.arena, cache.layout.own, cache.batch, cache.heads
        self._sharing.write_own(latents, *where, self.share)
