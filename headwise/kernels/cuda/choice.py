"""Which tokens queries attend to, by an indexer's scores, on a GPU: some queries' scores at a time, then the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.dsa import TritonIndexed
from headwise.kernels.cuda.indexer import CudaIndexer
from headwise.kernels.cuda.launch import Array
from headwise.kernels.dsa_base import Chosen, IndexQueries

MOST_PLACES = 1 << 31


@dataclass(frozen=True, eq=False)
class ChosenPlaces(Chosen):
    """places: int32 ``[queries, top]``; counts: int32 ``[queries]``; see `indexer.cu`"""

    places: Array
    counts: Array


EVERYTHING = Chosen()
"""Of all queries: tables cannot hold more tokens than may be chosen."""


@dataclass(frozen=True)
class TokenChoice:
    """Nothing is read on the host, and what is launched hangs on shapes alone.

    empty:       see `GpuParts`
    score_bytes: of scores at a time: as many queries as their contexts leave room for
    """

    empty: Callable[[tuple[int, ...], Any], Array]
    scores: TritonIndexed
    indexer: CudaIndexer
    score_bytes: int

    def __call__(
        self,
        index: IndexQueries,
        rows: slice,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        places: Array,
        counts: Array,
        best: Array | None = None,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """Of the queries ``rows`` of a step, the tokens of ``share`` that are chosen: see `CudaIndexer.choose`.

        Raises:
            ValueError: an arena has more tokens than places are counted.
        """
        if arena.nbytes // layout.block_bytes * layout.block_size > MOST_PLACES:
            raise ValueError(f"an arena of {arena.nbytes} bytes has more than 2**31 tokens: give a smaller kv_cache")
        context = batch.block_tables.shape[1] * layout.block_size
        count, where = rows.stop - rows.start, (layout, batch, heads)
        each = max(1, min(count, self.score_bytes // (4 * context)))
        scores = self.empty((each, context), np.float32)
        for begin in range(0, count, each):
            some = slice(begin, min(begin + each, count))
            found = scores[: some.stop - begin]
            self.scores.score(index, rows.start + begin, arena, *where, found, share)
            told = None if best is None else best[some]
            self.indexer.choose(
                found, rows.start + begin, index.query.dtype, *where, places[some], counts[some], told, share
            )
