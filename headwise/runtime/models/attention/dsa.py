"""Latent attention with an indexer (DSA): beside a token's latent, its layer keeps the key that it is chosen by.

Tensor parallel: what is cached is on every rank, as with latents alone, and so is the indexer: all of its heads
together choose tokens. To deal them out would have ranks send each other scores of the whole context in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.cuda.dsa_kernels import CudaIndexedKernels
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.dsa import indexed_layout
from headwise.kernels.dsa_base import (
    IndexedKernels,
    IndexKeys,
    IndexQueries,
    RotatingIndexedKernels,
    SharedIndexedKernels,
)
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.select import make_indexed_kernels
from headwise.kernels.token_ranks import TokenRanks
from headwise.runtime.models.attention.base import LayerCache, Serving, check_power_of_two
from headwise.runtime.models.attention.mla import (
    LatentAttention,
    LatentOverCache,
    SharedLatentOverCache,
)
from headwise.runtime.models.attention.wanted import wanted_rows
from headwise.runtime.models.base import Rotation
from headwise.runtime.models.mla_config import IndexerConfig, MlaConfig
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

CPU_INDEX_DIM_MULTIPLE = 32
"""Of an indexer's heads, for the CPU's kernels to read its keys: two vectors' lanes."""


@dataclass(frozen=True)
class IndexedLatentAttention(LatentAttention):
    """`AttentionVariant` of a model of this geometry."""

    indexer: IndexerConfig

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        width, rotated = self.mla.width, self.mla.rotated
        return indexed_layout(block_size, slots, width, self.indexer.head_dim, kv_dtype, rotated)

    def check(self, serving: Serving) -> None:
        """See `AttentionVariant.check`."""
        super().check(serving)
        check_power_of_two(serving)
        dim = self.indexer.head_dim
        if serving.device != "cuda" and serving.kernels != "reference" and dim % CPU_INDEX_DIM_MULTIPLE:
            raise ConfigError(
                f"the kernels of a CPU take indexers with heads of a multiple of {CPU_INDEX_DIM_MULTIPLE}, that of "
                f"{serving.model} has heads of {dim}: choose kernels reference"
            )

    def host_kernels(self, name: str, threads: int) -> IndexedKernels:
        return make_indexed_kernels(name, threads)

    def gpu_kernels(
        self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str
    ) -> CudaIndexedKernels:
        kernels, layout = CudaIndexedKernels(parts), layouts[0]
        self.prepare(kernels, layout, tp_size, dtype)
        kernels.prepare_index(layout.own, self.indexer.heads, dtype, layout.parts)
        return kernels

    def over_cache(self, ops: TensorOps, kernels: Any, ranks: TokenRanks | None = None) -> IndexedLatentOverCache:
        scale = self.config.attention_scale
        if ranks is None:
            return IndexedLatentOverCache(ops, kernels, self.mla, scale)
        return SharedIndexedLatentOverCache(ops, kernels, self.mla, scale, ranks)

    def weight_elements(self, layer: int = 0) -> int:
        indexer, hidden = self.indexer, self.config.hidden_size
        if layer in indexer.shared:
            return super().weight_elements(layer)
        queries = (self.mla.q_rank or hidden) * indexer.heads * indexer.head_dim
        return super().weight_elements(layer) + queries + hidden * (indexer.head_dim + indexer.heads)

    def geometry(self) -> str:
        indexer = self.indexer
        return (
            f"{super().geometry()}; of the tokens an indexer of {indexer.heads} heads of {indexer.head_dim} chooses "
            f"{indexer.top}"
        )

    def members(self, count: int, policy: HeadPolicy) -> str:
        return f"{super().members(count, policy)} and keys of indexers"


class IndexedLatentOverCache:
    """`CachedAttention` of what `LatentOverCache` takes, with what the indexer asks with, and its keys."""

    def __init__(self, ops: TensorOps, kernels: IndexedKernels, mla: MlaConfig, scale: float) -> None:
        self._ops, self._kernels, self._mla, self._scale = ops, kernels, mla, scale
        self._latents = self._of_latents()
        self._rotating = kernels if isinstance(kernels, RotatingIndexedKernels) else None

    def __call__(
        self,
        cache: LayerCache,
        query: Tensor,
        compressed: Tensor,
        shared: Tensor,
        up: UpProjections,
        rotation: Rotation,
        index: IndexQueries,
        keys: IndexKeys,
    ) -> Tensor:
        """Of this rank's heads, ``[T, q_heads, value_dim]``, or of the wanted rows.

        The first ``rotated`` numbers of keys, and of each head of ``index.query``, are rotated here, these in place.
        """
        mla = self._mla
        queries = self._latents.written(cache, query, compressed, shared, rotation)
        if self._rotating is None:
            rows = _layer_norm(keys)
            for turned in (index.query, rows[:, None]):
                _rotate(turned[:, :, : mla.rotated], rotation)
            self.write_index(cache, rows)
        else:
            cosines, sines = rotation
            where = cache.arena, cache.layout.own, cache.batch, cache.heads
            self._rotating.write_index_rope(index, keys, cosines, sines, *where, share=self._latents.share)
        cache.wait()
        seen = self._latents.result_for(queries) if cache.out is None else cache.out
        self.attend(cache, queries, up, index, seen)
        return self._ops.from_kernel_array(wanted_rows(seen, cache.wanted, self._ops))

    def _of_latents(self) -> LatentOverCache:
        return LatentOverCache(self._ops, self._kernels, self._mla, self._scale)

    def write_index(self, cache: LayerCache, keys: KernelArray) -> None:
        """Store what this rank keeps of the step's keys of the indexer."""
        self._kernels.write_index(keys, cache.arena, cache.layout, cache.batch, cache.heads)

    def attend(
        self, cache: LayerCache, queries: KernelArray, up: UpProjections, index: IndexQueries, seen: KernelArray
    ) -> None:
        """What ``queries`` see of the tokens that are chosen, into ``seen``."""
        where = cache.arena, cache.layout, cache.batch, cache.heads
        self._kernels.attend_chosen(queries, up, index, *where, scale=self._scale, out=seen)

    def result_of(self, *projected: Any) -> KernelArray:
        """See `CachedAttention.result_of`."""
        return self._latents.result_of(*projected)


class SharedIndexedLatentOverCache(IndexedLatentOverCache):
    """The same over what ``ranks`` keep together."""

    def __init__(
        self, ops: TensorOps, kernels: SharedIndexedKernels, mla: MlaConfig, scale: float, ranks: TokenRanks
    ) -> None:
        self._sharing, self._ranks = kernels, ranks
        super().__init__(ops, kernels, mla, scale)

    def _of_latents(self) -> LatentOverCache:
        return SharedLatentOverCache(self._ops, self._sharing, self._mla, self._scale, self._ranks)

    def write_index(self, cache: LayerCache, keys: KernelArray) -> None:
        where = cache.arena, cache.layout.own, cache.batch, cache.heads
        self._sharing.write_index_own(keys, *where, self._ranks.share)

    def attend(
        self, cache: LayerCache, queries: KernelArray, up: UpProjections, index: IndexQueries, seen: KernelArray
    ) -> None:
        where = cache.arena, cache.layout.own, cache.batch, cache.heads
        self._sharing.attend_chosen_shared(queries, up, index, *where, self._ranks, scale=self._scale, out=seen)


def _layer_norm(keys: IndexKeys) -> KernelArray:
    centred = keys.rows - keys.rows.mean(axis=1, keepdims=True)
    variance = np.square(centred).mean(axis=1, keepdims=True)
    return centred / np.sqrt(variance + np.float32(keys.eps)) * keys.weight + keys.bias


def _rotate(heads: KernelArray, rotation: Rotation) -> None:
    """As `TensorOps.rope`, ``heads [T, H, D]`` in place."""
    cosines, sines = rotation
    half = heads.shape[2] // 2
    low, high = heads[:, :, :half].copy(), heads[:, :, half:].copy()
    heads[:, :, :half] = low * cosines - high * sines
    heads[:, :, half:] = high * cosines + low * sines
