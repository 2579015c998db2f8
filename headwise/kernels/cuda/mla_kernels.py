"""The kernels of latent attention (MLA) on a GPU: write, and attention in the absorbed or the expanded form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable, HostLengths
from headwise.kernels.cuda.expanded import ExpandedLatents, ExpandedShape
from headwise.kernels.cuda.latents import CudaLatentWrite
from headwise.kernels.cuda.launch import Array
from headwise.kernels.cuda.mla import LatentShape, TritonLatents
from headwise.kernels.cuda.mla_ranks import RanksLatents
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.mla import has_scales, latent_width
from headwise.kernels.mla_base import UpProjections, saves_arithmetic
from headwise.kernels.token_ranks import TokenRanks

ABSORBED_BYTES = 256 << 20
"""Of absorbed queries at a time, and as many of what comes of them, unless those of one tile's heads are more."""

HEADS_STEP = 32
"""Heads at a time are a multiple of this: tiles are filled."""

_ANY_PART = 32
"""Numbers of latents that may as well be the rotated ones, where nothing is to be rotated."""


class CudaLatentKernels:
    """`RotatingLatentKernels` and `SharedLatentKernels` on device arrays.

    All calls only enqueue, on the current stream. Queries, latents and up-projections are of one dtype, float16,
    bfloat16 or float32, and so is the cache, unless it is quantised. Queries may have gaps between tokens. Prompts are
    attended to in the expanded form where the host knows their lengths and that is less arithmetic for all of a step's
    together; all else is in the absorbed one.
    """

    name = "cuda"

    def __init__(self, parts: GpuParts) -> None:
        self._empty, self._multiply_heads = parts.empty, parts.multiply_heads
        self._latents = TritonLatents(parts.launcher, parts.allocate)
        self._expanded = ExpandedLatents(parts)
        self._of_ranks = RanksLatents(parts, self._latents, self._expanded)
        self._write = CudaLatentWrite(parts.programs)

    def prepare(self, layout: BlockLayout, heads: int, rank: int, rotated: int, dtype: str) -> None:
        """Compile or load all that calls with such arguments need.

        Raises:
            ConfigError: they are not supported.
        """
        shape = LatentShape.of(layout, heads, rank, rotated, dtype)
        self._latents.prepare([shape])
        self._write.prepare(layout, numpy_dtype(dtype))

    def prepare_expanded(
        self, layout: BlockLayout, heads: int, rank: int, rotated: int, plain: int, value_dim: int, dtype: str
    ) -> None:
        """The same for prompts of heads of such sizes."""
        shape = LatentShape.of(layout, heads, rank, rotated, dtype)
        self._expanded.prepare(ExpandedShape(shape, plain, value_dim))

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
        """The same for ranks that keep latents together, ``parts`` of them: all that writes and `attend_shared` need.

        layout: of blocks of a rank's own tokens (`BlockLayout.own`)
        heads:  of one rank
        """
        shape = LatentShape.of(layout, heads, rank, rotated, dtype)
        self._of_ranks.prepare(ExpandedShape(shape, plain, value_dim, parts))
        self._write.prepare(layout, numpy_dtype(dtype))

    def write_latent(
        self, latent: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """See `LatentKernels.write_latent`."""
        self.write_own(latent, arena, layout, batch, heads, ALL_TOKENS)

    def write_own(
        self,
        latent: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """See `SharedLatentKernels.write_own`. In fewer bits what is stored tells how many numbers are rotated."""
        width = latent.shape[1]
        rank = 2 * width - latent_width(layout) if has_scales(layout) else width - _ANY_PART
        self._write.write(None, latent[:, :rank], latent[:, rank:], None, arena, layout, batch, heads, share)

    def write_latent_rope(
        self,
        query: Array,
        compressed: Array,
        shared: Array,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """See `RotatingLatentKernels.write_latent_rope`."""
        self._write.write(query, compressed, shared, (cosines, sines), arena, layout, batch, heads, share)

    def attend_latent(
        self,
        query: Array,
        up: UpProjections,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """See `LatentKernels.attend_latent`. A visible token whose block is ``-1`` is treated as not visible."""

        known, rows, others = batch.on_host, slice(0, len(query)), batch
        expands = known is not None and is_worth_expanding(known, up)
        if known is not None and expands:
            rows, others = rows_that_decode(known), replace(batch, max_query_len=1)

        def attend(absorbed: Array, some: Array, shape: LatentShape, mixed: Array) -> None:
            self._latents.attend(absorbed, some, shape, arena, layout, others, heads, scale=scale, out=mixed)

        self.attend_absorbed(query, up, layout, out, attend, rows)
        if expands:  # behind it, which writes to the rows of prompts between those that decode
            self._expanded.attend(query, up, arena, layout, batch, heads, scale=scale, out=out)

    def attend_shared(
        self,
        query: Array,
        up: UpProjections,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """See `SharedLatentKernels.attend_shared`. A visible token whose block is ``-1`` is treated as not visible."""
        check_fit(query, up, out)
        self._of_ranks.attend(query, up, arena, layout, batch, heads, ranks, scale=scale, out=out)

    def attend_absorbed(
        self,
        query: Array,
        up: UpProjections,
        layout: BlockLayout,
        out: Array,
        attend: Callable[[Array, Array, LatentShape, Array], None],
        rows: slice | None = None,
    ) -> None:
        """``out`` by what ``attend(absorbed, query, shape, mixed)`` makes of some heads' queries at a time.

        rows: nobody is attended to outside of them; by default all are somebody's
        """
        check_fit(query, up, out)
        rows = slice(0, len(query)) if rows is None else rows
        if rows.start == rows.stop:
            return
        (tokens, heads, size), (_, plain, rank) = query.shape, up.key.shape
        of_head = max(1, tokens * rank * query.itemsize)
        each = max(HEADS_STEP, ABSORBED_BYTES // of_head // HEADS_STEP * HEADS_STEP)
        shape = LatentShape.of(layout, heads, rank, size - plain, query.dtype.name)
        for first in range(0, heads, each):
            some = slice(first, min(first + each, heads))
            absorbed, mixed = (self._empty((tokens, some.stop - first, rank), query.dtype) for _ in range(2))
            self._multiply_heads(query[rows, some, :plain], up.key[some], absorbed[rows])
            attend(absorbed, query[:, some], shape, mixed)
            self._multiply_heads(mixed[rows], up.value[some], out[rows, some])


EXPANSION_COST = 1.0
"""Of a number that is expanded, in those of a product: cuBLAS writes it and the attention reads it, once each."""


def is_worth_expanding(lengths: HostLengths, up: UpProjections) -> bool:
    """Whether a step's prompts together are less arithmetic in the expanded form."""
    queries = np.diff(lengths.cu_seqlens_q).astype(np.int64)
    prompts = queries > 1
    contexts = lengths.seq_lens[prompts].astype(np.int64)
    return bool(prompts.any()) and saves_arithmetic(up, queries[prompts], contexts, EXPANSION_COST)


def rows_that_decode(lengths: HostLengths) -> slice:
    """The rows from the first sequence with one query to the last."""
    alone = np.flatnonzero(np.diff(lengths.cu_seqlens_q) == 1)
    if not len(alone):
        return slice(0, 0)
    return slice(int(lengths.cu_seqlens_q[alone[0]]), int(lengths.cu_seqlens_q[alone[-1] + 1]))


def check_fit(query: Array, up: UpProjections, out: Array) -> None:
    """Raise ValueError where the arrays do not fit each other."""
    heads, plain, rank = up.key.shape
    fits = up.value.shape[:2] == (heads, rank) and query.shape[1] == heads and query.shape[2] >= plain
    if not fits or out.shape != (len(query), heads, up.value.shape[2]):
        raise ValueError(
            f"query {query.shape}, out {out.shape} and up-projections {up.key.shape} and {up.value.shape} do not fit "
            "each other"
        )
    if not query.dtype == up.key.dtype == up.value.dtype == out.dtype:
        raise ValueError(
            f"query {query.dtype}, out {out.dtype} and up-projections {up.key.dtype} and {up.value.dtype} are not of "
            "one dtype"
        )
