"""Latent attention (MLA) on CPU cores: the compiled walk over block tables, between products with up-projections.

Absorbed, latents are keys and values of one KV head that all query heads share, so the kernels of grouped-query
attention read them where they lie; what they make of the rotated part of the "values" is dropped. Expanded, keys and
values of some heads at a time are made of a sequence's latents, and are read like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu.attention import NumbaKernels
from headwise.kernels.cpu.attention_pass import HEAD_DIM_STEP
from headwise.kernels.cpu.sharing import share_out
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.latest import OfEach
from headwise.kernels.mla import Index, has_scales, load_latents, store_latents
from headwise.kernels.mla_base import UpProjections, saves_arithmetic
from headwise.kernels.mla_quantised import compressed_of, stretch_queries
from headwise.kernels.shared_context import SharedContext, attend_shared, seen_by_all
from headwise.kernels.token_ranks import TokenRanks, own_rows

EXPANDED_QUERIES = 32
"""Queries of a sequence that are worth expanding its latents for, whatever the arithmetic says."""

MOST_EXPANDED = 1 << 15
"""Tokens of a sequence whose latents are expanded: all of them are copied at once, and keys and values of one head."""

EXPANSION_COST = 2
"""Of a number that is expanded, by measurement, in those of a product: it is written to memory, and read again."""

EXPANDED_BYTES = 64 << 20
"""Of keys and values that are expanded at a time, unless those of one head are more."""

THREAD_WORK = 1 << 20
"""Multiplications that are worth waking a thread for."""

Floats = NDArray[np.float32]


class NumbaLatentKernels:
    """`LatentKernels` for float32 arrays in host memory, callable from any thread; latents are float32, bfloat16,
    int8, E4M3 or int4.

    Arrays are as `NumbaKernels` takes them, queries C-contiguous. Making the first one in a process loads or compiles
    the kernels of what is expanded; those of latents are loaded when first called.

    Raises:
        ConfigError: ``threads`` is not between 1 and the number of cores this process may use.
    """

    name = "numba"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._latents = NumbaKernels(threads, kv_dtype=None)
        self._expanded = NumbaKernels(threads)
        self._own_rows = OfEach(own_rows, most=1)  # the same for all layers of a step

    def write_latent(
        self, latent: Floats, arena: NDArray[np.uint8], layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """See `LatentKernels.write_latent`."""
        if has_scales(layout):
            tokens = int(batch.cu_seqlens_q[-1])
            at, mapped = places_of(batch, heads, layout.block_size)
            store_latents(arena, layout, at, latent[:tokens][mapped])
            return
        rows = latent[:, None]
        self._latents.write_kv(rows, rows, arena, layout, batch, heads)

    def write_own(
        self,
        latent: Floats,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """See `SharedLatentKernels.write_own`."""
        rows, own = self._own_rows(batch, share)
        if len(rows):
            self.write_latent(latent[rows], arena, layout, own, heads)

    def attend_latent(
        self,
        query: Floats,
        up: UpProjections,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Floats,
    ) -> None:
        """See `LatentKernels.attend_latent`. A visible token whose block is ``-1`` is treated as not visible.

        A sequence's results do not depend on the batch that it is part of, nor on the number of threads, but for the
        rounding of products with up-projections, which NumPy computes.
        """
        _check(query, up, out)
        spans = [_Span.of(batch, index, heads, layout.block_size) for index in range(len(batch.seq_lens))]
        expanded = [span for span in spans if span.is_worth_expanding(up)]
        for span in expanded:
            width = query.shape[2] - up.key.shape[1] + up.key.shape[2]
            latents = span.latents(arena, layout, heads, width)
            self._attend_expanded(query[span.rows], up, latents, scale, out[span.rows])
        if not expanded:
            self._attend_absorbed(query, up, arena, layout, batch, heads, scale, out)
            return
        others = [span for span in spans if span not in expanded and span.queries > 0]
        if others:
            rows = np.concatenate([np.arange(span.rows.start, span.rows.stop) for span in others])
            part = np.empty_like(out, shape=(len(rows), *out.shape[1:]))
            where = arena, layout, _batch_of(batch, others), heads
            self._attend_absorbed(query[rows], up, *where, scale, part)
            out[rows] = part

    def attend_shared(
        self,
        query: Floats,
        up: UpProjections,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: Floats,
    ) -> None:
        """See `SharedLatentKernels.attend_shared`."""
        _check(query, up, out)
        where, width = (arena, layout, batch, heads), query.shape[2] - up.key.shape[1] + up.key.shape[2]

        def attend(whole: SharedContext) -> None:
            own = whole.arena, whole.layout, whole.batch, whole.heads
            self.attend_latent(query[whole.rows], up, *own, scale=scale, out=out[whole.rows])

        def attend_rows(rows: NDArray[np.int64]) -> None:
            part = np.empty_like(out, shape=(len(rows), *out.shape[1:]))
            self._multiply(self._seen_by_all(query[rows], up, *where, ranks, rows, scale), up.value, part)
            out[rows] = part

        attend_shared(ranks, where, 4 * ranks.share.parts * query.shape[1] * width, attend, attend_rows)

    def _seen_by_all(
        self,
        query: Floats,
        up: UpProjections,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        rows: NDArray[np.int64],
        scale: float,
    ) -> Floats:
        """Means of what all ranks keep by the weights of this rank's queries of ``rows``, ``[rows, q_heads, rank]``."""
        _, plain, rank = up.key.shape

        def attend(absorbed: Floats, own: AttentionBatch) -> tuple[Floats, Floats]:
            mixed, lse = np.empty_like(absorbed), np.empty(absorbed.shape[:2], np.float32)
            where = arena, layout, own, heads
            self._latents.attend(absorbed, *where, scale=scale, softcap=0.0, out=mixed, lse=lse)
            return compressed(mixed, query.shape[2] - plain, layout), lse

        return seen_by_all(self._absorbed(query, up, layout), rank, batch, rows, ranks, attend, up.sink_logits)

    def _attend_absorbed(
        self,
        query: Floats,
        up: UpProjections,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        scale: float,
        out: Floats,
    ) -> None:
        tokens = int(batch.cu_seqlens_q[-1])
        absorbed = self._absorbed(query[:tokens], up, layout)
        mixed = np.empty_like(absorbed)
        sinks, where = up.sink_logits, (arena, layout, batch, heads)
        self._latents.attend(absorbed, *where, scale=scale, softcap=0.0, out=mixed, sink_logits=sinks)
        self._multiply(compressed(mixed, query.shape[2] - up.key.shape[1], layout), up.value, out[:tokens])

    def _absorbed(self, query: Floats, up: UpProjections, layout: BlockLayout) -> Floats:
        """What of ``query [tokens, q_heads, plain + rotated]`` is multiplied with latents as they are stored."""
        _, plain, rank = up.key.shape
        rotated = query[:, :, plain:]
        absorbed = np.empty((*query.shape[:2], rank + rotated.shape[2]), np.float32)
        absorbed[:, :, rank:] = rotated
        self._multiply(query[:, :, :plain], up.key, absorbed[:, :, :rank])
        return stretch_queries(absorbed, rotated.shape[2], layout.roles[0].dtype) if has_scales(layout) else absorbed

    def _multiply(self, x: Floats, weights: Floats, out: Floats) -> None:
        """``x [tokens, heads, inputs]`` times each head's ``weights [heads, inputs, outputs]``."""
        heads = weights.shape[0]

        def multiply(first: int, last: int) -> None:
            product = np.matmul(x[:, first:last].transpose(1, 0, 2), weights[first:last])
            out[:, first:last] = product.transpose(1, 0, 2)

        self._share_out(multiply, heads, len(x) * weights.size)

    def _attend_expanded(self, query: Floats, up: UpProjections, latents: Floats, scale: float, out: Floats) -> None:
        """Attention of a sequence's last tokens, ``query [tokens, heads, plain + rotated]``, to ``latents``."""
        heads, context, value_dim = query.shape[1], len(latents), up.value.shape[2]
        dim = -(-max(query.shape[2], value_dim) // HEAD_DIM_STEP) * HEAD_DIM_STEP
        query = np.pad(query, ((0, 0), (0, 0), (0, dim - query.shape[2])))
        batch = AttentionBatch(_int32([0, len(query)]), _int32([context]), _int32([[0]]), groups=1)
        each = max(1, min(heads, EXPANDED_BYTES // (8 * context * dim)))
        for first in range(0, heads, each):
            some = slice(first, min(first + each, heads))
            count = some.stop - first
            own = up.of_heads(some)
            arena = self._expand(own, latents, dim)
            layout, table = gqa_layout(context, count, dim), HeadTable(*(_int32([0] * count) for _ in range(4)))
            table.slot[:] = np.arange(count)
            part = np.empty((len(query), count, dim), np.float32)
            where, sinks = (arena, layout, batch, table), own.sink_logits
            self._expanded.attend(query[:, some], *where, scale=scale, softcap=0.0, out=part, sink_logits=sinks)
            out[:, some] = part[..., :value_dim]

    def _expand(self, up: UpProjections, latents: Floats, dim: int) -> NDArray[np.uint8]:
        """Keys and values of some heads, as one block of `gqa_layout` with a slot for each head."""
        heads, plain, rank = up.key.shape
        compressed, rotated = latents[:, :rank], latents[:, rank:]
        slots = np.zeros((heads, 2, len(latents), dim), np.float32)

        def expand(first: int, last: int) -> None:
            for head in range(first, last):
                key, value = slots[head]
                key[:, :plain] = compressed @ up.key[head].T
                key[:, plain : plain + rotated.shape[1]] = rotated
                value[:, : up.value.shape[2]] = compressed @ up.value[head]

        self._share_out(expand, heads, len(latents) * (up.key.size + up.value.size))
        return slots.reshape(-1).view(np.uint8)

    def _share_out(self, function: Callable[[int, int], None], count: int, work: int) -> None:
        """Call ``function(first, last)`` on all of ``count``, shared out among as many threads as the work is worth."""
        share_out(function, count, min(self._threads, work // THREAD_WORK))


@dataclass(frozen=True, eq=False)
class _Span:
    """A sequence of a batch.

    index:  in the batch
    rows:   its queries
    blocks: that hold its latents; None where some are missing, or not all are seen
    """

    index: int
    rows: slice
    context: int
    blocks: NDArray[np.int32] | None

    @staticmethod
    def of(batch: AttentionBatch, index: int, heads: HeadTable, block_size: int) -> _Span:
        rows = slice(int(batch.cu_seqlens_q[index]), int(batch.cu_seqlens_q[index + 1]))
        context, blocks = int(batch.seq_lens[index]), None
        if heads.window[0] == 0 and rows.stop - rows.start >= EXPANDED_QUERIES:
            table = batch.block_tables[index * batch.groups + heads.group[0]]
            blocks = table[: -(-context // block_size)]
        return _Span(index, rows, context, None if blocks is None or (blocks < 0).any() else blocks)

    @property
    def queries(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def is_worth_expanding(self, up: UpProjections) -> bool:
        """Whether that is less arithmetic: products with up-projections are of queries, or of the whole context."""
        if self.blocks is None or self.context > MOST_EXPANDED:
            return False
        return saves_arithmetic(up, self.queries, self.context, EXPANSION_COST)

    def latents(self, arena: NDArray[np.uint8], layout: BlockLayout, heads: HeadTable, width: int) -> Floats:
        """All of the sequence's, ``[context, width]``."""
        at = (self.blocks, heads.slot[0], slice(None))
        return load_latents(arena, layout, at, width).reshape(-1, width)[: self.context]


def compressed(mixed: Floats, rotated: int, layout: BlockLayout) -> Floats:
    """Of means of latents as they are stored the part that values are made of, ``[tokens, q_heads, rank]``."""
    if has_scales(layout):
        return compressed_of(mixed, rotated, layout.roles[0].dtype)
    return mixed[..., : mixed.shape[2] - rotated]


def places_of(batch: AttentionBatch, heads: HeadTable, block_size: int) -> tuple[Index, NDArray[np.bool_]]:
    """Where the tokens of a step go, and which of them have a place."""
    counts = np.diff(batch.cu_seqlens_q)
    sequences = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(sequences)) + np.repeat(batch.seq_lens - batch.cu_seqlens_q[1:], counts)
    blocks = batch.block_tables[sequences * batch.groups + heads.group[0], positions // block_size]
    mapped: NDArray[np.bool_] = blocks >= 0
    return (blocks[mapped], heads.slot[0], positions[mapped] % block_size), mapped


def _batch_of(batch: AttentionBatch, spans: list[_Span]) -> AttentionBatch:
    """The batch of some of its sequences."""
    tables = batch.block_tables.reshape(-1, batch.groups, batch.block_tables.shape[1])
    which = [span.index for span in spans]
    return AttentionBatch(
        cu_seqlens_q=np.cumsum([0, *(span.queries for span in spans)], dtype=np.int32),
        seq_lens=batch.seq_lens[which],
        block_tables=tables[which].reshape(-1, batch.block_tables.shape[1]),
        groups=batch.groups,
    )


def _check(query: Floats, up: UpProjections, out: Floats) -> None:
    """Raise ValueError where the arrays do not fit each other."""
    heads, plain, rank = up.key.shape
    fits = up.value.shape[:2] == (heads, rank) and query.shape[1] == heads and query.shape[2] >= plain
    fits = fits and (up.sink_logits is None or up.sink_logits.shape == (heads,))
    if not fits or out.shape != (len(query), heads, up.value.shape[2]):
        raise ValueError(
            f"query {query.shape}, out {out.shape} and up-projections {up.key.shape} and {up.value.shape} do not fit "
            "each other"
        )


def _int32(numbers: Any) -> NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)
