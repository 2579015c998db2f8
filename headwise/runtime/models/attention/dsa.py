"""Latent attention with an indexer (DSA): beside a token's latent, its layer keeps the key that it is chosen by.

Layers may share an indexer: then the one that has it keeps keys in a cache of their own (`ModelConfig.sides_of`), and
chooses once in a step for all of them.

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
from headwise.kernels.base import HeadTable
from headwise.kernels.cuda.dsa_kernels import CudaIndexedKernels
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.dsa import index_layout, indexed_layout
from headwise.kernels.dsa_base import (
    Chosen,
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
        if layer >= self.config.num_layers:
            return index_layout(block_size, slots, self.indexer.head_dim, kv_dtype)
        if self.indexer.shared:
            return super().layout(block_size, slots, kv_dtype, layer)
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
        kernels, of_keys = CudaIndexedKernels(parts), layouts[-1]  # beside latents, or behind all layers
        self.prepare(kernels, layouts[0], tp_size, dtype)
        kernels.prepare_index(of_keys.own, self.indexer.heads, dtype, of_keys.parts)
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
        keys = len(self.indexer.layers(self.config.num_layers)) if self.indexer.shared else 0
        text = f"{super().members(count - keys, policy)} and keys of "
        return f"{text}{keys} layers' indexers" if keys else f"{text}indexers"


@dataclass(frozen=True)
class Choosing:
    """How a layer's tokens are chosen.

    asked:   what its indexer asks with, and tokens' keys, neither of them rotated; None: it sees what the layer before
             it does
    is_kept: whether the next layer does
    """

    asked: tuple[IndexQueries, IndexKeys] | None
    is_kept: bool


class IndexedLatentOverCache:
    """`CachedAttention` of what `LatentOverCache` takes, and `Choosing`.

    What is chosen in a step is held from the layer that chose to the last one that sees it, whatever runs between them,
    and in graphs: a recorded step has it at addresses of its own.
    """

    def __init__(self, ops: TensorOps, kernels: IndexedKernels, mla: MlaConfig, scale: float) -> None:
        self._ops, self._kernels, self._mla, self._scale = ops, kernels, mla, scale
        self._latents = self._of_latents()
        self._rotating = kernels if isinstance(kernels, RotatingIndexedKernels) else None
        self._chosen: Chosen | None = None

    def __call__(
        self,
        cache: LayerCache,
        query: Tensor,
        compressed: Tensor,
        shared: Tensor,
        up: UpProjections,
        rotation: Rotation,
        choosing: Choosing,
    ) -> Tensor:
        """Of this rank's heads, ``[T, q_heads, value_dim]``, or of the wanted rows.

        The first ``rotated`` numbers of an indexer's keys, and of each head of its queries, are rotated here, these in
        place.
        """
        queries = self._latents.written(cache, query, compressed, shared, rotation)
        if choosing.asked is not None:
            self._write_keys(cache, *choosing.asked, rotation)
        cache.wait()
        if choosing.asked is not None:
            self._chosen = None  # whose memory may be had again
            self._chosen = self.choose(cache, queries, up, choosing.asked[0])
        assert self._chosen is not None, "a step's first layer has an indexer"
        seen = self._latents.result_for(queries) if cache.out is None else cache.out
        self.attend(cache, queries, up, self._chosen, seen)
        if not choosing.is_kept:
            self._chosen = None
        return self._ops.from_kernel_array(wanted_rows(seen, cache.wanted, self._ops))

    def _write_keys(self, cache: LayerCache, index: IndexQueries, keys: IndexKeys, rotation: Rotation) -> None:
        """Store the step's keys of the indexer, normed and rotated; rotate ``index.query``."""
        if self._rotating is None:
            rows = _layer_norm(keys)
            for turned in (index.query, rows[:, None]):
                _rotate(turned[:, :, : self._mla.rotated], rotation)
            self.write_index(cache, rows)
            return
        (layout, heads), (cosines, sines) = _keys_of(cache), rotation
        where = cache.arena, layout.own, cache.batch, heads
        self._rotating.write_index_rope(index, keys, cosines, sines, *where, share=self._latents.share)

    def _of_latents(self) -> LatentOverCache:
        return LatentOverCache(self._ops, self._kernels, self._mla, self._scale)

    def write_index(self, cache: LayerCache, keys: KernelArray) -> None:
        """Store what this rank keeps of the step's keys of the indexer."""
        layout, heads = _keys_of(cache)
        self._kernels.write_index(keys, cache.arena, layout, cache.batch, heads)

    def choose(self, cache: LayerCache, queries: KernelArray, up: UpProjections, index: IndexQueries) -> Chosen:
        """The tokens that ``queries`` see, by this layer's indexer."""
        layout, heads = _keys_of(cache)
        return self._kernels.choose(index, cache.arena, layout, cache.batch, heads)

    def attend(
        self, cache: LayerCache, queries: KernelArray, up: UpProjections, chosen: Chosen, seen: KernelArray
    ) -> None:
        """What ``queries`` see of the tokens that are chosen, into ``seen``."""
        where = cache.arena, cache.layout, cache.batch, cache.heads
        self._kernels.attend_chosen(queries, up, chosen, *where, scale=self._scale, out=seen)

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
        layout, heads = _keys_of(cache)
        self._sharing.write_index_own(keys, cache.arena, layout.own, cache.batch, heads, self._ranks.share)

    def choose(self, cache: LayerCache, queries: KernelArray, up: UpProjections, index: IndexQueries) -> Chosen:
        layout, heads = _keys_of(cache)
        where = cache.arena, layout.own, cache.batch, heads
        return self._sharing.choose_shared(queries, up, index, *where, self._ranks)

    def attend(
        self, cache: LayerCache, queries: KernelArray, up: UpProjections, chosen: Chosen, seen: KernelArray
    ) -> None:
        where = cache.arena, cache.layout.own, cache.batch, cache.heads
        self._sharing.attend_chosen_shared(queries, up, chosen, *where, self._ranks, scale=self._scale, out=seen)


def _keys_of(cache: LayerCache) -> tuple[BlockLayout, HeadTable]:
    """Where a layer keeps keys of its indexer: beside its latents, or apart from them."""
    return cache.sides[0] if cache.sides else (cache.layout, cache.heads)


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
