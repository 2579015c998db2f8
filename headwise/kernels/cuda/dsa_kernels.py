"""The kernels of latent attention with an indexer (DSA) on a GPU."""

from __future__ import annotations

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.dsa import IndexShape, TritonIndexed
from headwise.kernels.cuda.indexer import CHOOSE_THREADS, CudaIndexer
from headwise.kernels.cuda.launch import Array
from headwise.kernels.cuda.mla import LatentShape
from headwise.kernels.cuda.mla_kernels import CudaLatentKernels, check_fit
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.dsa_base import IndexKeys, IndexQueries
from headwise.kernels.mla_base import UpProjections

SCORE_BYTES = 64 << 20
"""Of scores at a time: as many queries as their contexts leave room for."""

MOST_PLACES = 1 << 31


class CudaIndexedKernels(CudaLatentKernels):
    """`RotatingIndexedKernels` on device arrays; what `CudaLatentKernels` says holds.

    An indexer's queries, weights and keys are of the same dtype as those of attention, and so is the cache, unless it
    is quantised: then keys have scales, too. Scores are summed in float32. Where block tables cannot hold more tokens
    than may be chosen, all are attended to, and nothing is scored.
    """

    def __init__(self, parts: GpuParts, threads: int = CHOOSE_THREADS, score_bytes: int = SCORE_BYTES) -> None:
        super().__init__(parts)
        self._indexed = TritonIndexed(parts.launcher, self._latents)
        self._indexer = CudaIndexer(parts.programs, threads)
        self._score_bytes = score_bytes

    def prepare(self, layout: BlockLayout, heads: int, rank: int, rotated: int, dtype: str) -> None:
        """See `CudaLatentKernels.prepare`."""
        super().prepare(layout, heads, rank, rotated, dtype)
        self._indexed.prepare_latents([LatentShape.of(layout, heads, rank, rotated, dtype)])

    def prepare_index(self, layout: BlockLayout, index_heads: int, dtype: str) -> None:
        """Compile or load all that an indexer of such heads needs.

        Raises:
            ConfigError: they are not supported.
        """
        self._indexed.prepare(IndexShape.of(layout, index_heads, dtype))
        self._indexer.prepare(layout, numpy_dtype(dtype))

    def write_index(
        self, key: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """See `IndexedKernels.write_index`."""
        self._indexer.write(None, key, None, None, arena, layout, batch, heads)

    def write_index_rope(
        self,
        index: IndexQueries,
        keys: IndexKeys,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """See `RotatingIndexedKernels.write_index_rope`."""
        norm = keys.weight, keys.bias, keys.eps
        self._indexer.write(index.query, keys.rows, norm, (cosines, sines), arena, layout, batch, heads)

    def attend_chosen(
        self,
        query: Array,
        up: UpProjections,
        index: IndexQueries,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """See `IndexedKernels.attend_chosen`."""
        if batch.block_tables.shape[1] * layout.block_size <= index.top:
            self.attend_latent(query, up, arena, layout, batch, heads, scale=scale, out=out)
            return
        check_fit(query, up, out)
        if not query.shape[0]:
            return
        if arena.nbytes // layout.block_bytes * layout.block_size > MOST_PLACES:
            raise ValueError(f"an arena of {arena.nbytes} bytes has more than 2**31 tokens: give a smaller kv_cache")
        chosen = self._choose(index, arena, layout, batch, heads)

        def attend(absorbed: Array, some: Array, shape: LatentShape, mixed: Array) -> None:
            self._indexed.attend(absorbed, some, shape, chosen, arena, layout, heads, scale=scale, out=mixed)

        self.attend_absorbed(query, up, layout, out, attend)

    def _choose(
        self, index: IndexQueries, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> tuple[Array, Array]:
        """Places and counts of the tokens chosen for each query."""
        tokens, context = index.query.shape[0], batch.block_tables.shape[1] * layout.block_size
        places, counts = self._empty((tokens, index.top), np.int32), self._empty((tokens,), np.int32)
        rows = max(1, min(tokens, self._score_bytes // (4 * context)))
        scores = self._empty((rows, context), np.float32)
        where = layout, batch, heads
        for first in range(0, tokens, rows):
            some = scores[: min(rows, tokens - first)]
            self._indexed.score(index, first, arena, *where, some)
            self._indexer.choose(some, first, index.top, index.query.dtype, *where, places, counts)
        return places, counts
