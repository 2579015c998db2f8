"""The kernels of attention to a window and to entries of several tokens each (DeepSeek-V4) on a GPU."""

from __future__ import annotations

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch
from headwise.kernels.compressed_base import Entries, Kept
from headwise.kernels.cuda.attention import Tuning
from headwise.kernels.cuda.choice import TokenChoice
from headwise.kernels.cuda.compressed import CompressedShape, TritonCompressed
from headwise.kernels.cuda.dsa import IndexShape, TritonIndexed
from headwise.kernels.cuda.dsa_kernels import SCORE_BYTES
from headwise.kernels.cuda.entries import CudaEntries, check_size
from headwise.kernels.cuda.indexer import CHOOSE_THREADS, CudaIndexer
from headwise.kernels.cuda.launch import Array
from headwise.kernels.cuda.mla import TUNING, TritonLatents
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.turned import CudaTurned
from headwise.kernels.dsa_base import IndexQueries


class CudaCompressedKernels:
    """`TurningCompressedKernels` on device arrays; all calls only enqueue, on the current stream, by shapes alone.

    Queries, rows and what is kept of them are of one dtype, float16, bfloat16 or float32; keys and entries may be kept
    in int8 or E4M3. Rows and queries may have gaps between tokens. Where block tables cannot hold more entries than may
    be chosen, all are attended to, and nothing is scored.
    """

    name = "cuda"

    def __init__(
        self,
        parts: GpuParts,
        threads: int = CHOOSE_THREADS,
        score_bytes: int = SCORE_BYTES,
        tuning: Tuning = TUNING,
    ) -> None:
        """threads, score_bytes: see `CudaIndexer` and `TokenChoice`"""
        self._empty = parts.empty
        self._turned = CudaTurned(parts.programs)
        self._entries = CudaEntries(parts.programs)
        self._attention = TritonCompressed(parts.launcher, parts.allocate, tuning)
        self._scores = TritonIndexed(parts.launcher, TritonLatents(parts.launcher, parts.allocate))
        self._indexer = CudaIndexer(parts.programs, threads)
        self._choice = TokenChoice(parts.empty, self._scores, self._indexer, score_bytes)

    def prepare(self, window: BlockLayout, heads: int, size: int, dtype: str) -> None:
        """Compile or load all that layers without entries need, and what those with some need of tokens.

        Raises:
            ConfigError: it is not supported.
        """
        self._attention.prepare(CompressedShape.of(window, None, heads, size, dtype, is_chosen=False))
        for kept in (dtype, window.roles[0].dtype):
            self._turned.prepare(dtype, kept)

    def prepare_entries(
        self,
        window: BlockLayout,
        made: BlockLayout,
        heads: int,
        size: int,
        dtype: str,
        index_heads: int = 0,
        index_dim: int = 0,
    ) -> None:
        """The same for entries in blocks of ``made``.

        index_heads, index_dim: of the indexer that chooses them; 0: there is none
        """
        self._attention.prepare(CompressedShape.of(window, made, heads, size, dtype, is_chosen=False))
        self._entries.prepare(dtype, made.roles[0].dtype)
        for each in (size, index_dim) if index_heads else (size,):
            check_size(each, numpy_dtype(dtype).itemsize)
        if index_heads:
            self._attention.prepare(CompressedShape.of(window, made, heads, size, dtype, is_chosen=True))
            self._scores.prepare(IndexShape.of(made.own, index_heads, dtype))
            self._indexer.prepare(made.own, numpy_dtype(dtype))

    def write_turned(
        self,
        query: Array,
        key: Array,
        cosines: Array,
        sines: Array,
        turning: int,
        arena: Array,
        kept: Kept,
        batch: AttentionBatch,
    ) -> None:
        """See `TurningCompressedKernels.write_turned`."""
        self._turned.write(query, key, cosines, sines, turning, arena, kept, batch)

    def turn(self, heads: Array, cosines: Array, sines: Array, turning: int) -> None:
        """See `TurningCompressedKernels.turn`."""
        self._turned.turn(heads, cosines, sines, turning)

    def write_pieces(self, rows: Array, arena: Array, entries: Entries, batch: AttentionBatch) -> None:
        """See `CompressedKernels.write_pieces`."""
        self._entries.write(rows, arena, entries, batch)

    def make_entries(self, arena: Array, entries: Entries, batch: AttentionBatch) -> None:
        """See `CompressedKernels.make_entries`."""
        self._entries.make(arena, entries, batch)

    def attend(
        self,
        query: Array,
        arena: Array,
        window: Kept,
        entries: Entries | None,
        index: IndexQueries | None,
        batch: AttentionBatch,
        *,
        scale: float,
        sink_logits: Array,
        out: Array,
    ) -> None:
        """See `CompressedKernels.attend`. A visible token or entry whose block is ``-1`` is treated as not visible."""
        if not query.shape[0] or batch.cu_seqlens_q.shape[0] < 2:
            return
        chosen = None
        if entries is not None and index is not None:
            chosen = self._chosen(arena, entries, index, batch)
        self._attention.attend(
            query, arena, window, entries, chosen, batch, scale=scale, sink_logits=sink_logits, out=out
        )

    def _chosen(
        self, arena: Array, entries: Entries, index: IndexQueries, batch: AttentionBatch
    ) -> tuple[Array, Array] | None:
        """Places and counts of the entries that are chosen; None: all are.

        An entry is to the indexer what a token is of ranks that keep every ``rate``-th one: it comes with the last of
        its tokens.
        """
        own, tokens = entries.made.layout.own, len(index.query)
        if batch.block_tables.shape[1] * own.block_size <= index.top:
            return None
        places, counts = self._empty((tokens, index.top), np.int32), self._empty((tokens,), np.int32)
        share = TokenShare(entries.making.rate - 1, entries.making.rate)
        where = arena, own, batch, entries.made.heads
        self._choice(index, slice(0, tokens), *where, places, counts, share=share)
        return places, counts
