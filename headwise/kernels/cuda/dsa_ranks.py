"""Latent attention with an indexer (DSA) on a GPU over what ranks keep together, each the tokens of its share.

rows      Few queries go to where tokens are. Each rank scores its own keys, for queries that all of them have, and
          finds the best; all tell each other these, scores and positions. Each then attends to those of its own that
          are among the best of all, with all ranks' absorbed queries, as `mla_ranks` does to all tokens.
expanded  A prompt whose context is no longer than what may be chosen sees all of it: see `mla_ranks`.
gathered  Of other prompts, the context comes to where their queries are (`GatheredContexts`), and all is as over a
          cache that is a rank's own.

Which sequences take which is decided by their lengths and by shapes, as there. Decodes are rows, and hang on shapes
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable, HostLengths
from headwise.kernels.cuda import dsa
from headwise.kernels.cuda.choice import TokenChoice
from headwise.kernels.cuda.dsa import IndexShape
from headwise.kernels.cuda.expanded import ExpandedLatents, ExpandedShape
from headwise.kernels.cuda.gathered import GatheredContexts
from headwise.kernels.cuda.latent_ranks import FEW_QUERIES, lengths_of, runs_of, side_by_side
from headwise.kernels.cuda.launch import Array, Variant
from headwise.kernels.cuda.mla import LatentShape
from headwise.kernels.cuda.mla_ranks import BYTE_COST, RANKS_BYTES, RanksLatents, are_expanded, of_ranks
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.workspace import BESIDE
from headwise.kernels.dsa import key_roles, latent_roles
from headwise.kernels.dsa_base import Chosen, IndexQueries
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.token_ranks import TokenRanks

BEST_BYTES = 8
"""That ranks tell each other of a token that is among one's best: its score and its position."""

GATHERED_BYTES = 64 << 20
"""Of a context that is gathered, at most: it is in memory twice then. Queries of a longer one are rows."""


Shape = TypeVar("Shape", LatentShape, IndexShape)


def whole(shape: Shape, parts: int) -> Shape:
    """Of what is gathered, where ``shape`` has blocks of a rank's own tokens."""
    return replace(shape, block_size=parts * shape.block_size)


def variants_of(shape: ExpandedShape, index: IndexShape, sm: int) -> tuple[Variant, ...]:
    """All that ranks launch besides what `mla_ranks` has; both shapes have blocks of a rank's own tokens."""
    own = dsa.variants_of_ranks(of_ranks(shape), index, sm)
    return own + dsa.variants_of(whole(shape.latents, shape.parts), whole(index, shape.parts), sm)


@dataclass(frozen=True, eq=False)
class ChosenOfRanks(Chosen):
    """
    rows:     runs of query rows, and of each row places and counts of what this rank keeps of the tokens chosen for it
    prompts:  sequences that see all, and are expanded
    gathered: sequences whose contexts are gathered, and what is chosen in these
    """

    rows: Sequence[tuple[Sequence[slice], tuple[Array, Array]]]
    prompts: Sequence[int]
    gathered: Sequence[tuple[int, Chosen]]


class RanksIndexed:
    """`choose_shared` and `attend_chosen_shared` of `SharedIndexedKernels`, where not everything is chosen; all calls
    only enqueue, on the current stream."""

    def __init__(
        self,
        parts: GpuParts,
        choice: TokenChoice,
        latents: RanksLatents,
        expanded: ExpandedLatents,
    ) -> None:
        self._empty, self._choice, self._latents, self._expanded = parts.empty, choice, latents, expanded
        self._indexed, self._gathered = choice.scores, GatheredContexts(parts)

    def prepare(self, shape: ExpandedShape) -> None:
        """Compile or load all that calls with such arguments need besides what `RanksLatents` does, and scores.

        Raises:
            ConfigError: they are not supported.
        """
        self._indexed.prepare_of_ranks(of_ranks(shape))
        self._indexed.prepare_latents([whole(shape.latents, shape.parts)])
        self._gathered.prepare()

    def choose(
        self,
        query: Array,
        up: UpProjections,
        index: IndexQueries,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        choose_whole: Callable[..., Chosen],
    ) -> ChosenOfRanks:
        """See `SharedIndexedKernels.choose_shared`.

        choose_whole: `IndexedKernels.choose`, over a cache that is a rank's own

        Raises:
            ValueError: the host does not know the lengths of a step whose sequences may have several queries.
        """
        where, runs, prompts = (arena, layout, batch, heads), [slice(0, len(index.query))], list[int]()
        gathered = list[tuple[int, Chosen]]()
        if batch.max_query_len != 1:
            known = lengths_of(batch)
            sees_all = known.seq_lens <= index.top
            expands = sees_all & are_expanded(known, query, up, ranks.share.parts)
            gathers = ~sees_all & are_gathered(known, query, up, index, layout, ranks.share.parts)
            runs, prompts = runs_of(known, ~(expands | gathers)), np.flatnonzero(expands).tolist()
            for sequence in np.flatnonzero(gathers).tolist():
                context = self._gathered(ranks, *where, range(sequence, sequence + 1), key_roles(layout))
                there = context.arena, context.layout, context.batch, context.heads
                gathered.append((sequence, choose_whole(index.of_rows(context.rows), *there)))
        at_a_time = max(1, RANKS_BYTES // (BEST_BYTES * ranks.share.parts * index.top))
        rows = [(some, self._choose(index, *where, ranks, some)) for some in portions(runs, at_a_time)]
        return ChosenOfRanks(rows, prompts, gathered)

    def attend(
        self,
        query: Array,
        up: UpProjections,
        chosen: ChosenOfRanks,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: Array,
        attend_whole: Callable[..., None],
    ) -> None:
        """See `SharedIndexedKernels.attend_chosen_shared`.

        attend_whole: `IndexedKernels.attend_chosen`, over a cache that is a rank's own
        """
        where = arena, layout, batch, heads
        for some, places in chosen.rows:

            def attend(queries: Array, shape: LatentShape, seen: Array, places: tuple[Array, Array] = places) -> None:
                self._indexed.attend_of_ranks(queries, shape, places, arena, layout, heads, scale=scale, out=seen)

            self._latents.attend_rows(query, up, layout, some, ranks, out, attend)
        if chosen.prompts:
            self._expanded.attend(query, up, *where, scale=scale, out=out, sequences=chosen.prompts, ranks=ranks)
        for sequence, of_sequence in chosen.gathered:
            context = self._gathered(ranks, *where, range(sequence, sequence + 1), latent_roles(layout))
            rows, there = context.rows, (context.arena, context.layout, context.batch, context.heads)
            attend_whole(query[rows], up, of_sequence, *there, scale=scale, out=out[rows])

    def _choose(
        self,
        index: IndexQueries,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        runs: Sequence[slice],
    ) -> tuple[Array, Array]:
        """Places and counts of this rank's tokens among those chosen of all, for each query row of ``runs``."""
        count, top, share = sum(run.stop - run.start for run in runs), index.top, ranks.share
        found, places, best, counts = (
            self._empty(shape, np.int32) for shape in ((count, top), (count, top), (count, 2, top), (count,))
        )
        for run, here in side_by_side(runs):
            self._choice(index, run, arena, layout, batch, heads, found[here], counts[here], best[here], share)
        every = ranks.all_gather(best)
        self._choice.indexer.choose_of_all(every, found, index.query.dtype, layout, share, places, counts)
        return places, counts


def are_gathered(
    lengths: HostLengths, query: Array, up: UpProjections, index: IndexQueries, layout: BlockLayout, parts: int
) -> NDArray[np.bool_]:
    """Which sequences have their contexts gathered: the more queries, the less it is in comparison to send these.

    Counted in products, as by `mla_ranks.are_expanded`, for the layer that chooses. Of rows, ranks send each other
    queries, what these see, and the best tokens, but each scores a part of the context alone, where of a gathered one
    each scores it all. layout: of keys, beside which latents may lie
    """
    (_, heads, size), (_, plain, rank) = query.shape, up.key.shape
    queries, contexts = np.diff(lengths.cu_seqlens_q).astype(np.float64), lengths.seq_lens.astype(np.float64)
    of_head = (rank + size - plain) * query.itemsize + 4 * (rank + BESIDE)
    row_bytes = parts * (heads * of_head + BEST_BYTES * index.top)
    scoring = index.query.shape[1] * index.query.shape[2] * (1 - 1 / parts)
    latents = sum(role.token_bytes for role in latent_roles(layout)) or (rank + size - plain) * query.itemsize
    context_bytes = contexts * (latents + sum(role.token_bytes for role in key_roles(layout)))
    saved = queries * (BYTE_COST * row_bytes - contexts * scoring)
    return np.asarray((queries > FEW_QUERIES) & (context_bytes <= GATHERED_BYTES) & (BYTE_COST * context_bytes < saved))


def portions(runs: Sequence[slice], most: int) -> Iterator[list[slice]]:
    """The rows of ``runs``, at most so many at a time."""
    everywhere = list(side_by_side(runs))
    for first in range(0, everywhere[-1][1].stop if everywhere else 0, most):
        yield [
            slice(run.start + max(0, first - here.start), run.start + min(here.stop, first + most) - here.start)
            for run, here in everywhere
            if here.start < first + most and here.stop > first
        ]
