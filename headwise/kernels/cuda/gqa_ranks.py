"""Grouped-query attention on a GPU over a KV head that ranks keep together, each some tokens of it.

Few queries go to where tokens are: each rank gets all ranks' queries, attends with them to its own tokens, and then
gets what its own heads saw on each, in float32 with log-sum-exps, which one kernel merges. A row of a step is a
sequence for itself. Of many queries, as of prompts, tokens go to where queries are: every rank has the sequence's
blocks whole, for as long as the kernel of prompts takes.

Which sequences take which is decided by their lengths alone, which all ranks know alike: they call each other in the
same order. Decodes hang on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable, HostLengths
from headwise.kernels.cuda import gathered, latent_ranks
from headwise.kernels.cuda.attention import AttentionShape, TritonAttention, variant_of_ranks, variants_of
from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.gathered import GatheredContexts
from headwise.kernels.cuda.latent_ranks import FEW_QUERIES, CudaLatentRanks, lengths_of, runs_of, side_by_side
from headwise.kernels.cuda.launch import Array, Variant
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.programs import Defines
from headwise.kernels.cuda.workspace import BESIDE
from headwise.kernels.token_ranks import TokenRanks

CONTEXT_BYTES = 128 << 20
"""Of sequences' blocks at a time, which all tokens have in one layer, unless those of one sequence are more."""

AttendRows = Callable[..., None]
"""``attend(queries, out=seen)``: what all ranks' heads see on this one, as of `TritonAttention.attend_of_ranks`."""


@dataclass(frozen=True)
class RanksShape:
    """Attention over a KV head that ``parts`` ranks keep together.

    own: with one rank's query heads, in blocks of its tokens
    """

    own: AttentionShape
    parts: int

    @property
    def of_ranks(self) -> AttentionShape:
        """Of the queries of all ranks, over one's tokens. Learned sinks are no rank's: they are merged."""
        return replace(self.own, share=self.parts * self.own.share, sink_logits=False)

    @property
    def whole(self) -> AttentionShape:
        """Of one's queries, over all tokens."""
        return replace(self.own, block_size=self.parts * self.own.block_size)


def check_parts(shape: RanksShape) -> None:
    """Raise ConfigError where blocks of all tokens are none that the kernels of prompts take, whatever one's are."""
    if shape.parts & (shape.parts - 1):
        raise ConfigError(
            f"context_parallel_size {shape.parts} of KV heads is not supported on a GPU: choose a power of two"
        )


def variants_of_shared(shape: RanksShape, sm: int, tma: bool = False) -> tuple[Variant, ...]:
    """All that ranks launch which keep a KV head together."""
    return (variant_of_ranks(shape.of_ranks, sm), *variants_of(shape.whole, sm, tma))


def programs_of(shape: RanksShape) -> Iterator[tuple[str, Defines]]:
    """The CUDA C++ files that they need besides those of any attention, with their macros."""
    yield latent_ranks.SOURCE, variant_of(numpy_dtype(shape.own.q_dtype))
    yield gathered.SOURCE, {}


class RanksAttention:
    """`SharedKernels.attend_shared`; all calls only enqueue, on the current stream."""

    def __init__(self, parts: GpuParts, attention: TritonAttention) -> None:
        self._empty, self._attention = parts.empty, attention
        self._around, self._gathered = CudaLatentRanks(parts.programs), GatheredContexts(parts)

    def prepare(self, shape: RanksShape) -> None:
        """Compile or load all that calls with such arguments need.

        Raises:
            ConfigError: they are not supported.
        """
        check_parts(shape)
        self._attention.prepare_of_ranks(shape.of_ranks)
        self._attention.prepare([shape.whole])
        self._around.prepare(numpy_dtype(shape.own.q_dtype))
        self._gathered.prepare()

    def attend(
        self,
        query: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        softcap: float,
        out: Array,
        sink_logits: Array | None,
    ) -> None:
        """See `SharedKernels.attend_shared`.

        Raises:
            ValueError: the host does not know the lengths of a step whose sequences may have several queries.
        """
        if not len(query):
            return

        def over(here: AttentionBatch) -> AttendRows:
            return partial(
                self._attention.attend_of_ranks, arena=arena, layout=layout, batch=here, heads=heads, scale=scale,
                softcap=softcap,
            )  # fmt: skip

        if batch.max_query_len == 1:
            own = self._empty(batch.seq_lens.shape, np.int32)
            attend_here, counted = over(replace(batch, seq_lens=own, on_host=None)), (batch.seq_lens, own)
            self._attend_rows(query, [slice(0, len(query))], attend_here, ranks, out, sink_logits, counted)
            return
        known = lengths_of(batch)
        runs = runs_of(known, np.diff(known.cu_seqlens_q) <= FEW_QUERIES)
        if runs:
            here = self._around.cut_all(batch, runs, ranks.share, query.dtype, self._empty)
            self._attend_rows(query, runs, over(here), ranks, out, sink_logits)
        for sequences in brought_together(known, sum(role.token_bytes for role in layout.roles)):
            whole = self._gathered(ranks, arena, layout, batch, heads, sequences)
            self._attention.attend(
                query[whole.rows], whole.arena, whole.layout, whole.batch, whole.heads, scale=scale, softcap=softcap,
                out=out[whole.rows], sink_logits=sink_logits,
            )  # fmt: skip

    def _attend_rows(
        self,
        query: Array,
        runs: Sequence[slice],
        attend: AttendRows,
        ranks: TokenRanks,
        out: Array,
        sink_logits: Array | None,
        lengths: tuple[Array, Array] | None = None,
    ) -> None:
        """``out`` of the rows of ``runs``.

        lengths: see `CudaLatentRanks.pack`; None: nobody has to count a rank's tokens
        """
        (_, own_heads, size), tokens = query.shape, sum(run.stop - run.start for run in runs)
        packed = self._empty((tokens, own_heads, size), query.dtype)
        for run, here in side_by_side(runs):
            self._around.pack(query[run], 0, packed[here], lengths, ranks.share)
        seen = self._empty((ranks.share.parts, tokens, own_heads, out.shape[2] + BESIDE), np.float32)
        attend(ranks.all_gather(packed), out=seen)
        told = ranks.exchange(seen)
        for run, here in side_by_side(runs):
            self._around.merge(told[:, here], out[run], sink_logits)


def brought_together(known: HostLengths, token_bytes: int) -> Sequence[range]:
    """Sequences whose tokens come to their many queries, side by side, as many at a time as `CONTEXT_BYTES` allow."""
    found: list[range] = []
    taken = 0
    for sequence in np.flatnonzero(np.diff(known.cu_seqlens_q) > FEW_QUERIES).tolist():
        size = int(known.seq_lens[sequence]) * token_bytes
        if found and found[-1].stop == sequence and taken + size <= CONTEXT_BYTES:
            found[-1], taken = range(found[-1].start, sequence + 1), taken + size
        else:
            found.append(range(sequence, sequence + 1))
            taken = size
    return found
