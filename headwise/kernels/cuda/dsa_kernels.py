"""The kernels of latent attention with an indexer (DSA) on a GPU."""

from __future__ import annotations

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.choice import EVERYTHING, ChosenPlaces, TokenChoice
from headwise.kernels.cuda.dsa import IndexShape, TritonIndexed
from headwise.kernels.cuda.dsa_ranks import ChosenOfRanks, RanksIndexed, whole
from headwise.kernels.cuda.expanded import ExpandedShape
from headwise.kernels.cuda.indexer import CHOOSE_THREADS, CudaIndexer
from headwise.kernels.cuda.launch import Array
from headwise.kernels.cuda.mla import LatentShape
from headwise.kernels.cuda.mla_kernels import CudaLatentKernels, check_fit
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.dsa_base import Chosen, IndexKeys, IndexQueries
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.token_ranks import TokenRanks

SCORE_BYTES = 64 << 20
"""Of scores at a time: as many queries as their contexts leave room for."""


class CudaIndexedKernels(CudaLatentKernels):
    """`RotatingIndexedKernels` and `SharedIndexedKernels` on device arrays; what `CudaLatentKernels` says holds.

    An indexer's queries, weights and keys are of the same dtype as those of attention, and so is the cache, unless it
    is quantised: then keys have scales, too. Scores are summed in float32. Where block tables cannot hold more tokens
    than may be chosen, all are attended to, and nothing is scored.
    """

    def __init__(self, parts: GpuParts, threads: int = CHOOSE_THREADS, score_bytes: int = SCORE_BYTES) -> None:
        super().__init__(parts)
        self._indexed = TritonIndexed(parts.launcher, self._latents)
        self._indexer = CudaIndexer(parts.programs, threads)
        self._choice = TokenChoice(parts.empty, self._indexed, self._indexer, score_bytes)
        self._indexed_of_ranks = RanksIndexed(parts, self._choice, self._of_ranks, self._expanded)

    def prepare(self, layout: BlockLayout, heads: int, rank: int, rotated: int, dtype: str) -> None:
        """See `CudaLatentKernels.prepare`."""
        super().prepare(layout, heads, rank, rotated, dtype)
        self._indexed.prepare_latents([LatentShape.of(layout, heads, rank, rotated, dtype)])

    def prepare_shared(
        self,
        layout: BlockLayout,
        heads: int,
        parts: int,
        rank: int,
        rotated: int,
        plain: int,
        value_dim: int,
        dtype: str,
    ) -> None:
        """See `CudaLatentKernels.prepare_shared`: all that writes and `attend_chosen_shared` need, but for scores."""
        super().prepare_shared(layout, heads, parts, rank, rotated, plain, value_dim, dtype)
        shape = LatentShape.of(layout, heads, rank, rotated, dtype)
        self._latents.reserve(whole(shape, parts))
        self._indexed_of_ranks.prepare(ExpandedShape(shape, plain, value_dim, parts))

    def prepare_index(self, layout: BlockLayout, index_heads: int, dtype: str, parts: int = 1) -> None:
        """Compile or load all that an indexer of such heads needs.

        parts: of ranks that keep tokens together; then ``layout`` is of blocks of a rank's own

        Raises:
            ConfigError: they are not supported.
        """
        shape = IndexShape.of(layout, index_heads, dtype)
        for each in {shape, whole(shape, parts)}:
            self._indexed.prepare(each)
        self._indexer.prepare(layout, numpy_dtype(dtype))

    def write_index(
        self, key: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """See `IndexedKernels.write_index`."""
        self.write_index_own(key, arena, layout, batch, heads, ALL_TOKENS)

    def write_index_own(
        self, key: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable, share: TokenShare
    ) -> None:
        """See `SharedIndexedKernels.write_index_own`."""
        self._indexer.write(None, key, None, None, arena, layout, batch, heads, share)

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
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """See `RotatingIndexedKernels.write_index_rope`."""
        norm = keys.weight, keys.bias, keys.eps
        self._indexer.write(index.query, keys.rows, norm, (cosines, sines), arena, layout, batch, heads, share)

    def choose(
        self, index: IndexQueries, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> Chosen:
        """See `IndexedKernels.choose`."""
        tokens = len(index.query)
        if not tokens or batch.block_tables.shape[1] * layout.block_size <= index.top:
            return EVERYTHING
        places, counts = self._empty((tokens, index.top), np.int32), self._empty((tokens,), np.int32)
        self._choice(index, slice(0, tokens), arena, layout, batch, heads, places, counts)
        return ChosenPlaces(places, counts)

    def attend_chosen(
        self,
        query: Array,
        up: UpProjections,
        chosen: Chosen,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """See `IndexedKernels.attend_chosen`."""
        if chosen is EVERYTHING:
            self.attend_latent(query, up, arena, layout, batch, heads, scale=scale, out=out)
            return
        assert isinstance(chosen, ChosenPlaces)
        check_fit(query, up, out)
        places = chosen.places, chosen.counts

        def attend(absorbed: Array, some: Array, shape: LatentShape, mixed: Array) -> None:
            self._indexed.attend(absorbed, some, shape, places, arena, layout, heads, scale=scale, out=mixed)

        self.attend_absorbed(query, up, layout, out, attend)

    def choose_shared(
        self,
        query: Array,
        up: UpProjections,
        index: IndexQueries,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
    ) -> Chosen:
        """See `SharedIndexedKernels.choose_shared`."""
        if batch.block_tables.shape[1] * ranks.share.parts * layout.block_size <= index.top:
            return EVERYTHING
        return self._indexed_of_ranks.choose(query, up, index, arena, layout, batch, heads, ranks, self.choose)

    def attend_chosen_shared(
        self,
        query: Array,
        up: UpProjections,
        chosen: Chosen,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """See `SharedIndexedKernels.attend_chosen_shared`."""
        where = arena, layout, batch, heads
        if chosen is EVERYTHING:
            self.attend_shared(query, up, *where, ranks, scale=scale, out=out)
            return
        assert isinstance(chosen, ChosenOfRanks)
        check_fit(query, up, out)
        self._indexed_of_ranks.attend(
            query, up, chosen, *where, ranks, scale=scale, out=out, attend_whole=self.attend_chosen
        )
