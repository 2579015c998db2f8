"""Latent attention (MLA) on a GPU over what ranks keep together, each the latents of its own tokens.

Few queries go to where latents are; of prompts, latents come to where queries are.

absorbed  Each rank gets all ranks' absorbed queries, and attends with them to its own tokens. Of its own heads it then
          gets what was seen on each, in float32 with log-sum-exps, which one kernel merges. A row of a step is a
          sequence for itself.
expanded  Each piece of a context is brought by all, a share each, before keys and values are made of it.

Which sequences take which is decided by their lengths and by shapes, which all ranks know alike: they call each other
in the same order. Decodes hang on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable, HostLengths
from headwise.kernels.cuda.expanded import ExpandedLatents, ExpandedShape
from headwise.kernels.cuda.expanded import variants_of as variants_of_expanded
from headwise.kernels.cuda.latent_ranks import FEW_QUERIES, CudaLatentRanks, lengths_of, runs_of, side_by_side
from headwise.kernels.cuda.launch import Array, Variant
from headwise.kernels.cuda.mla import LatentShape, TritonLatents, variants_of_ranks
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.workspace import BESIDE
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.token_ranks import TokenRanks

BYTE_COST = 600.0
"""Of a byte that ranks send each other, in products of a head: 400 GB/s beside 500 TFLOPS, about an H100's."""

RANKS_BYTES = 256 << 20
"""Of results at a time, of all ranks' heads, and as many of what comes back, unless those of one tile are more."""

HEADS_STEP = 32
"""Heads of all ranks at a time are a multiple of this, about: tiles are filled."""


AttendRows = Callable[[Array, LatentShape, Array], None]
"""``attend(queries, shape, seen)``: what all ranks' heads see on this one, as of `TritonLatents.attend_of_ranks`."""


def of_ranks(shape: ExpandedShape) -> LatentShape:
    """Of latents whose queries are those of all ranks."""
    return replace(shape.latents, heads=shape.parts * shape.latents.heads)


def variants_of(shape: ExpandedShape, sm: int) -> tuple[Variant, ...]:
    """All that ranks launch which keep latents together; ``shape`` has the heads of one, and blocks of its tokens."""
    return variants_of_ranks(of_ranks(shape), sm) + variants_of_expanded(shape, sm)


class RanksLatents:
    """`SharedLatentKernels.attend_shared`; all calls only enqueue, on the current stream."""

    def __init__(self, parts: GpuParts, latents: TritonLatents, expanded: ExpandedLatents) -> None:
        self._empty, self._multiply_heads = parts.empty, parts.multiply_heads
        self._latents, self._expanded, self._around = latents, expanded, CudaLatentRanks(parts.programs)

    def prepare(self, shape: ExpandedShape) -> None:
        """Compile or load all that calls with such arguments need.

        Raises:
            ConfigError: they are not supported.
        """
        self._latents.prepare_of_ranks(of_ranks(shape))
        self._expanded.prepare(shape)
        self._around.prepare(numpy_dtype(shape.latents.q_dtype))

    def attend(
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
        """See `SharedLatentKernels.attend_shared`.

        Raises:
            ValueError: the host does not know the lengths of a step whose sequences may have several queries.
        """
        if batch.max_query_len == 1:
            own = self._empty(batch.seq_lens.shape, np.int32)
            here = replace(batch, seq_lens=own, on_host=None)
            runs, lengths = [slice(0, len(query))], (batch.seq_lens, own)
            self.attend_rows(
                query, up, layout, runs, ranks, out, self._attend(arena, layout, here, heads, scale), lengths
            )
            return
        known = lengths_of(batch)
        expands = are_expanded(known, query, up, ranks.share.parts)
        runs = runs_of(known, ~expands)
        if runs:
            here = self._around.cut_all(batch, runs, ranks.share, query.dtype, self._empty)
            self.attend_rows(query, up, layout, runs, ranks, out, self._attend(arena, layout, here, heads, scale))
        prompts = np.flatnonzero(expands).tolist()
        self._expanded.attend(
            query, up, arena, layout, batch, heads, scale=scale, out=out, sequences=prompts, ranks=ranks
        )

    def _attend(
        self, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable, scale: float
    ) -> AttendRows:
        """To all that sequences have here, each of one query."""

        def attend(queries: Array, shape: LatentShape, seen: Array) -> None:
            self._latents.attend_of_ranks(queries, shape, arena, layout, batch, heads, scale=scale, out=seen)

        return attend

    def attend_rows(
        self,
        query: Array,
        up: UpProjections,
        layout: BlockLayout,
        runs: Sequence[slice],
        ranks: TokenRanks,
        out: Array,
        attend: AttendRows,
        lengths: tuple[Array, Array] | None = None,
    ) -> None:
        """``out`` of the rows of ``runs`` in the absorbed form, some heads at a time.

        lengths: see `CudaLatentRanks.pack`; None: nobody has to count a rank's tokens
        """
        (_, own_heads, size), (_, plain, rank), parts = query.shape, up.key.shape, ranks.share.parts
        width, tokens = rank + size - plain, sum(run.stop - run.start for run in runs)
        shape = LatentShape.of(layout, parts * own_heads, rank, size - plain, query.dtype.name)
        step, of_head = max(1, HEADS_STEP // parts), 4 * parts * max(1, tokens) * (rank + BESIDE)
        each = max(step, RANKS_BYTES // of_head // step * step)
        for first in range(0, own_heads if tokens else 0, each):
            some = slice(first, min(first + each, own_heads))
            count = some.stop - first
            packed = self._empty((tokens, count, width), query.dtype)
            for run, here in side_by_side(runs):
                self._multiply_heads(query[run, some, :plain], up.key[some], packed[here, :, :rank])
                self._around.pack(query[run, some], rank, packed[here], lengths, ranks.share)
            seen = self._empty((parts, tokens, count, rank + BESIDE), np.float32)
            attend(ranks.all_gather(packed), shape, seen)
            mixed = self._empty((tokens, count, rank), query.dtype)
            self._around.merge(ranks.exchange(seen), mixed)
            for run, here in side_by_side(runs):
                self._multiply_heads(mixed[here], up.value[some], out[run, some])


def are_expanded(lengths: HostLengths, query: Array, up: UpProjections, parts: int) -> NDArray[np.bool_]:
    """Which sequences take the expanded form: the more queries, the less it is in comparison.

    Counted in a rank's products: those of its heads, as `saves_arithmetic` has them, and what ranks send each other,
    which is absorbed queries and what they see, or the context's latents.
    """
    (_, heads, size), (_, plain, rank), value_dim = query.shape, up.key.shape, up.value.shape[2]
    queries, contexts = np.diff(lengths.cu_seqlens_q).astype(np.float64), lengths.seq_lens.astype(np.float64)
    projecting, latent_bytes = rank * (plain + value_dim), (rank + size - plain) * query.itemsize
    row_bytes = parts * heads * (latent_bytes + 4 * (rank + BESIDE))
    of_query = heads * (projecting + contexts * (2 * rank - plain - value_dim)) + BYTE_COST * row_bytes
    of_token = heads * projecting + BYTE_COST * latent_bytes
    return np.asarray((queries > FEW_QUERIES) & (contexts * of_token < queries * of_query))
