"""Grouped-query attention that in some layers sees no token before its own chunk of the sequence (Llama 4).

The cache keeps a window as long as a chunk, which always holds what is seen. A query sees all of its chunk up to
itself: full attention, of a sequence that begins with the chunk. So for kernels that know no chunks, a step's sequences
are cut where these begin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, AttentionKernels, ChunkingKernels, HeadTable
from headwise.kernels.latest import MOST_TABLES, OfEach
from headwise.kernels.token_ranks import TokenRanks
from headwise.runtime.models.attention.base import CachedAttention, LayerCache
from headwise.runtime.models.attention.gqa import GroupedQueryAttention, GroupedQueryOverCache
from headwise.runtime.ops.base import TensorOps


@dataclass(frozen=True)
class ChunkedAttention(GroupedQueryAttention):
    """`AttentionVariant` of a model whose layers with windows see chunks of `ModelConfig.chunk` tokens."""

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        if self.config.chunk % block_size:
            raise ConfigError(
                f"block_size {block_size} does not divide the chunks of {self.config.chunk} tokens that layers of this "
                "model see: choose one that does, as 16 or 64"
            )
        return super().layout(block_size, slots, kv_dtype, layer)

    def token_parts(self, layer: int, tp_size: int, most: int) -> int:
        """See `AttentionVariant.token_parts`: chunks are cut by the ranks that have all of them."""
        return 1

    def over_cache(self, ops: TensorOps, kernels: Any, ranks: TokenRanks | None = None) -> CachedAttention:
        return ChunkedOverCache(ops, kernels, self.config.attention_scale, self.config.chunk)

    def members(self, count: int, policy: HeadPolicy) -> str:
        return super().members(count, policy) + (f" that see chunks of {self.config.chunk}" if policy.window else "")


class ChunkedOverCache(GroupedQueryOverCache):
    """The same, with chunks for the layers that see no more: by the kernels, or by cutting sequences."""

    def __init__(self, ops: TensorOps, kernels: AttentionKernels, scale: float, chunk: int) -> None:
        super().__init__(ops, kernels, scale, softcap=0.0)
        self._chunk = chunk
        self._sees_chunks = isinstance(kernels, ChunkingKernels) and kernels.sees_chunks
        self._last: tuple[AttentionBatch, AttentionBatch] | None = None
        self._chunked, self._unbounded = OfEach(_chunked, MOST_TABLES), OfEach(_unbounded, MOST_TABLES)

    def seen(self, cache: LayerCache) -> tuple[AttentionBatch, HeadTable]:
        heads = cache.heads
        if self._sees_chunks:
            return cache.batch, self._chunked(heads)
        if not heads.window[0]:
            return cache.batch, heads
        if self._last is None or self._last[0] is not cache.batch:  # the same for all layers of a step
            self._last = cache.batch, cut_into_chunks(cache.batch, self._chunk, cache.layout.block_size)
        return self._last[1], self._unbounded(heads)


def _chunked(heads: HeadTable) -> HeadTable:
    return replace(heads, chunked=True)


def _unbounded(heads: HeadTable) -> HeadTable:
    everything = np.zeros_like(heads.window)
    return replace(heads, window=everything, sink=everything)


def cut_into_chunks(batch: AttentionBatch, chunk: int, block_size: int) -> AttentionBatch:
    """The batch with a sequence for each chunk of ``chunk`` tokens that queries are in, which begins there.

    ``block_size`` divides ``chunk``. A query's row stays where it is; its position counts from its chunk's beginning.
    """
    queries = np.diff(batch.cu_seqlens_q)
    some = np.flatnonzero(queries)
    ends = batch.seq_lens[some]
    starts = ends - queries[some]
    counts = (ends - 1) // chunk - starts // chunk + 1
    of = np.repeat(np.arange(len(some)), counts)  # of each piece, its sequence among those that have queries
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts) + (starts // chunk)[of]
    first, last = np.maximum(starts[of], number * chunk), np.minimum(ends[of], (number + 1) * chunk)
    columns = min(chunk // block_size, batch.block_tables.shape[1])
    at = number[:, None] * (chunk // block_size) + np.arange(columns)
    tables = batch.block_tables.reshape(len(queries), batch.groups, -1)
    known = at < tables.shape[2]
    cut = np.where(
        known[:, None],
        tables[some[of][:, None, None], np.arange(batch.groups)[:, None], np.where(known, at, 0)[:, None]],
        -1,
    )
    return AttentionBatch(
        cu_seqlens_q=np.cumsum([0, *(last - first)], dtype=np.int32),
        seq_lens=(last - number * chunk).astype(np.int32),
        block_tables=np.ascontiguousarray(cut.reshape(len(of) * batch.groups, columns), dtype=np.int32),
        groups=batch.groups,
        max_query_len=batch.max_query_len,
    )
