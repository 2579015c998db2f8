"""Latent attention with an indexer (DSA) on CPU cores.

Queries that see no more tokens than may be chosen attend to all of them, as without an indexer. For each other one its
best tokens are found, and attended to in the absorbed form where they lie in the cache: a "block" of its table is one
token. Its heads are given to the kernels as so many tokens of one head, which makes a tile of them; the table ends in
as many unmapped places, so that all of them see every chosen token. Latents with scales, which lie elsewhere in a
block, are copied first: to a block of one token each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import dsa_jit
from headwise.kernels.cpu.attention import NumbaKernels, TokenKernels
from headwise.kernels.cpu.attention_pass import STORED, token_step
from headwise.kernels.cpu.attention_products import CHUNK
from headwise.kernels.cpu.chosen import ChosenOfRanks, ChosenTokens, best_of_all, chosen, tokens_at, tokens_of
from headwise.kernels.cpu.mla_attention import THREAD_WORK, NumbaLatentKernels, compressed, places_of
from headwise.kernels.cpu.sharing import share_out
from headwise.kernels.dsa import INDEXER_SCALE, has_key_scales, index_role, key_roles, latent_roles, store_keys
from headwise.kernels.dsa_base import Chosen, IndexQueries
from headwise.kernels.mla import has_scales, latent_scale_view, latent_view
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.shared_context import SharedContext, attend_shared, seen_by_all
from headwise.kernels.token_ranks import TokenRanks, places_of_rows, rows_over_share

SCORES = 1 << 22
"""That are computed at a time, unless those of one query are more."""

ABSORBED_BYTES = 64 << 20
"""Of absorbed queries at a time, unless those of one token are more."""

COPIED_BYTES = 64 << 20
"""Of latents with scales that are copied at a time, unless those of one query are more."""

INDEX_DIM_STEP = 32
"""An indexer's heads must be a multiple of this: keys are read as whole vectors, and none beyond its end."""

_MOST_PLACES = np.iinfo(np.int32).max

_ONE_HEAD = HeadTable(*(np.zeros(1, np.int32) for _ in range(4)))
"""That sees everything, in the first slot."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class NumbaIndexedKernels(NumbaLatentKernels):
    """`IndexedKernels` for float32 arrays in host memory; what is cached is float32, bfloat16, int8, E4M3 or int4.

    A token's score depends neither on the batch nor on the number of threads, so neither does what is chosen.

    Raises:
        ConfigError: as `NumbaLatentKernels`.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._tokens = TokenKernels(threads, kv_dtype=None)

    def write_index(
        self, key: Floats, arena: NDArray[np.uint8], layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """See `IndexedKernels.write_index`."""
        at, mapped = places_of(batch, heads, layout.block_size)
        store_keys(arena, layout, at, key[: len(mapped)][mapped])

    def choose(
        self,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> ChosenTokens:
        """See `IndexedKernels.choose`. A visible token whose block is ``-1`` is treated as not visible."""
        _check_index(index, layout)
        queries = np.diff(batch.cu_seqlens_q)
        early = np.clip(index.top - batch.seq_lens + queries, 0, queries)  # that see no more than may be chosen
        count = int((queries - early).sum())
        tokens, is_broken, done = np.empty((count, index.top), np.int32), np.empty(count, np.bool_), 0
        for sequence, few in enumerate(early):
            first, last = int(batch.cu_seqlens_q[sequence] + few), int(batch.cu_seqlens_q[sequence + 1])
            context = int(batch.seq_lens[sequence])
            table = batch.block_tables[sequence * batch.groups + heads.group[0]]
            step = max(1, SCORES // max(1, context))
            for begin in range(first, last, step):
                rows = slice(begin, min(begin + step, last))
                seen, some = context - (last - rows.stop), slice(done, done + rows.stop - begin)
                scores = np.empty((rows.stop - begin, seen), np.float32)
                self.score(index, rows, arena, layout, table, heads, seen, scores)
                tokens[some] = tokens_of(chosen(scores, index.top), index.top, layout, table)
                is_broken[some], done = np.isnan(scores.max(axis=1)), some.stop
        return ChosenTokens(early, tokens, is_broken)

    def attend_chosen(
        self,
        query: Floats,
        up: UpProjections,
        chosen: Chosen,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Floats,
    ) -> None:
        """See `IndexedKernels.attend_chosen`."""
        assert isinstance(chosen, ChosenTokens)
        _check_places(arena, layout)
        cu, queries, early = batch.cu_seqlens_q, np.diff(batch.cu_seqlens_q), chosen.early
        if not len(chosen.tokens):
            self.attend_latent(query, up, arena, layout, batch, heads, scale=scale, out=out)
            return
        if early.any():
            those = _rows_of(cu[:-1], early)
            part = np.empty_like(out, shape=(len(those), *out.shape[1:]))
            ends, lens = np.cumsum([0, *early], dtype=np.int32), batch.seq_lens - queries + early
            shortened = replace(batch, cu_seqlens_q=ends, seq_lens=lens.astype(np.int32), follows=None, shared=None)
            self.attend_latent(query[those], up, arena, layout, shortened, heads, scale=scale, out=part)
            out[those] = part
        rows, top = _rows_of(cu[:-1] + early, queries - early), chosen.tokens.shape[1]
        step = max(1, ABSORBED_BYTES // (4 * query.shape[1] * layout.roles[0].shape[0]))
        if has_scales(layout):
            step = max(1, min(step, COPIED_BYTES // (top * _of_single_tokens(layout).block_bytes)))
        for first in range(0, len(rows), step):
            some = slice(first, first + step)
            self._attend_tokens(query, up, rows[some], chosen.of_queries(some), arena, layout, heads, scale, out)

    def score(
        self,
        index: IndexQueries,
        rows: slice,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        table: Ints,
        heads: HeadTable,
        seen: int,
        out: Floats,
        start: int | None = None,
    ) -> None:
        """Scores of a sequence's first ``seen`` tokens by its queries ``rows``, the first of which is the token
        ``start``; None: the last one is the last token."""
        role = index_role(layout)
        stored = arena.view(STORED[role.dtype])
        compiled, size = dsa_jit.score_chunks(stored.dtype), stored.itemsize
        scales, scale_places = _scales_of(arena, layout, int(heads.slot[0]))
        keys_at = (int(heads.slot[0]) * layout.slot_bytes + layout.role_offsets[role.name]) // size
        query, weights = index.query[rows], index.weights[rows]
        start = seen - len(query) if start is None else start

        def score(begin: int, end: int) -> None:
            compiled(
                begin, end, query, weights, stored, table, layout.block_size, layout.block_bytes // size, keys_at,
                scales, *scale_places, start, int(heads.window[0]), int(heads.sink[0]), out,
            )  # fmt: skip

        share_out(score, -(-seen // CHUNK), min(self._threads, query.size * seen // THREAD_WORK))

    def write_index_own(
        self,
        key: Floats,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """See `SharedIndexedKernels.write_index_own`."""
        rows, own = self._own_rows(batch, share)
        if len(rows):
            self.write_index(key[rows], arena, layout, own, heads)

    def choose_shared(
        self,
        query: Floats,
        up: UpProjections,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
    ) -> ChosenOfRanks:
        """See `SharedIndexedKernels.choose_shared`."""
        _check_index(index, layout)
        positions = places_of_rows(batch)[1]
        tokens, is_broken = np.full((len(positions), index.top), -1, np.int32), np.zeros(len(positions), np.bool_)
        found = ChosenOfRanks({}, positions < index.top, tokens, is_broken)

        def choose(whole: SharedContext) -> None:
            own = whole.arena, whole.layout, whole.batch, whole.heads
            found.of_whole[whole.sequence] = self.choose(index.of_rows(whole.rows), *own)

        def choose_rows(rows: NDArray[np.int64]) -> None:
            some = rows[~found.sees_all[rows]]
            if len(some):
                where = arena, layout, batch, heads, ranks
                found.tokens[some], found.is_broken[some] = self._best_of_all(index.of_rows(some), *where, some)

        row_bytes = 4 * ranks.share.parts * 2 * index.top
        attend_shared(ranks, (arena, layout, batch, heads), row_bytes, choose, choose_rows, key_roles(layout))
        return found

    def _best_of_all(
        self,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        rows: NDArray[np.int64],
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """`ChosenOfRanks.tokens` and ``is_broken`` of these rows, whose ``index`` is."""
        seeing, own = rows_over_share(batch, ranks.share, rows)
        scores = np.full((len(rows), index.top), -np.inf, np.float32)
        at = np.full(scores.shape, -1, np.int32)
        tables = own.block_tables[int(heads.group[0]) :: own.groups]
        for row, table, length in zip(seeing, tables, own.seq_lens, strict=True):
            every = np.empty((1, int(length)), np.float32)
            self.score(index.of_rows(slice(row, row + 1)), slice(0, 1), arena, layout, table, heads, int(length), every)
            best = np.flatnonzero(chosen(every, index.top)[0])
            at[row, : len(best)], scores[row, : len(best)] = best, every[0, best]
            if np.isnan(every).any():
                scores[row, 0] = np.nan
        is_chosen, is_broken = best_of_all(scores, at, ranks)
        tokens = np.full(at.shape, -1, np.int32)
        tokens[seeing] = tokens_at(np.where(is_chosen, at, -1)[seeing], layout, tables)
        return tokens, is_broken

    def attend_chosen_shared(
        self,
        query: Floats,
        up: UpProjections,
        chosen: Chosen,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: Floats,
    ) -> None:
        """See `SharedIndexedKernels.attend_chosen_shared`."""
        assert isinstance(chosen, ChosenOfRanks)
        _check_places(arena, layout)
        where = arena, layout, batch, heads

        def attend(whole: SharedContext) -> None:
            own = chosen.of_whole[whole.sequence], whole.arena, whole.layout, whole.batch, whole.heads
            self.attend_chosen(query[whole.rows], up, *own, scale=scale, out=out[whole.rows])

        def attend_rows(rows: NDArray[np.int64]) -> None:
            sees_all = chosen.sees_all[rows]
            for some in (rows[sees_all], rows[~sees_all]):
                if not len(some):
                    continue
                asking = *where, ranks, some, scale
                if chosen.sees_all[some[0]]:
                    seen = self._seen_by_all(query[some], up, *asking)
                else:
                    seen = self._chosen_by_all(query[some], up, chosen, *asking)
                part = np.empty_like(out, shape=(len(some), *out.shape[1:]))
                self._multiply(seen, up.value, part)
                out[some] = part

        row_bytes = 4 * ranks.share.parts * (query.shape[1] * layout.roles[0].shape[0] + chosen.tokens.shape[1])
        attend_shared(ranks, where, row_bytes, attend, attend_rows, latent_roles(layout))

    def _chosen_by_all(
        self,
        query: Floats,
        up: UpProjections,
        chosen: ChosenOfRanks,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        rows: NDArray[np.int64],
        scale: float,
    ) -> Floats:
        """As `_seen_by_all` of the tokens that are chosen of all; NaN where nothing can be."""
        slot, seeing = int(heads.slot[0]), rows_over_share(batch, ranks.share, rows)[0]

        def attend(absorbed: Floats, own: AttentionBatch) -> tuple[Floats, Floats]:
            lse = np.empty(absorbed.shape[:2], np.float32)
            mixed = self._attend_at(absorbed, chosen.tokens[rows[seeing]], arena, layout, slot, scale, lse)
            return compressed(mixed, query.shape[2] - up.key.shape[1], layout), lse

        absorbed = self._absorbed(query, up, layout)
        seen = seen_by_all(absorbed, up.key.shape[2], batch, rows, ranks, attend, up.sink_logits)
        seen[chosen.is_broken[rows]] = np.nan
        return seen

    def _attend_tokens(
        self,
        query: Floats,
        up: UpProjections,
        rows: NDArray[np.int64],
        chosen: ChosenTokens,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        heads_at: HeadTable,
        scale: float,
        out: Floats,
    ) -> None:
        """Attention of some queries, each to its tokens."""
        absorbed = self._absorbed(query[rows], up, layout)
        lse = None if up.sink_logits is None else np.empty(absorbed.shape[:2], np.float32)
        mixed = self._attend_at(absorbed, chosen.tokens, arena, layout, int(heads_at.slot[0]), scale, lse)
        if lse is not None and up.sink_logits is not None:
            mixed *= share_without_sinks(lse, up.sink_logits)[:, :, None]
        part = np.empty_like(out, shape=(len(rows), *out.shape[1:]))
        self._multiply(compressed(mixed, query.shape[2] - up.key.shape[1], layout), up.value, part)
        part[chosen.is_broken] = np.nan
        out[rows] = part

    def _attend_at(
        self,
        absorbed: Floats,
        tokens: Ints,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        slot: int,
        scale: float,
        lse: Floats | None = None,
    ) -> Floats:
        """Means of latents as they are stored, of each of ``absorbed [queries, heads, width]`` those of its tokens.

        lse: ``[queries, heads]``, see `NumbaKernels.attend`
        """
        count, heads, _ = absorbed.shape
        kernels: NumbaKernels = self._tokens
        if has_scales(layout):
            kernels = self._latents
            arena, layout, places = _copied(arena, layout, slot, tokens)
        else:
            places = _places(tokens, layout, slot)
        table = np.full((count, places.shape[1] + heads - 1), -1, np.int32)
        table[:, : places.shape[1]] = places
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(heads)
        lens = np.full(count, table.shape[1], np.int32)
        mixed = np.empty_like(absorbed)
        kernels.attend(
            absorbed.reshape(count * heads, 1, -1), arena, layout, AttentionBatch(ends, lens, table, 1),
            _ONE_HEAD, scale=scale, softcap=0.0, out=mixed.reshape(count * heads, 1, -1),
            lse=None if lse is None else lse.reshape(count * heads, 1),
        )  # fmt: skip
        return mixed


def share_without_sinks(lse: Floats, sink_logits: Floats) -> Floats:
    """Of softmaxes whose sums have the logarithms ``lse [.., heads]``, to base 2, what sinks leave of all."""
    over = np.minimum(sink_logits * np.float32(np.log2(np.e)) - lse, np.float32(126))
    return np.asarray(1 / (1 + np.exp2(over)), np.float32)


def _rows_of(firsts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """So many from each of the first ones on."""
    return np.concatenate([np.arange(first, first + few) for first, few in zip(firsts, counts, strict=True)])


def _places(tokens: Ints, layout: BlockLayout, slot: int) -> Ints:
    """Where latents of these tokens lie, in `token_step`; -1 for none."""
    blocks, within = np.divmod(tokens.astype(np.int64), layout.block_size)
    at = blocks * layout.block_bytes + slot * layout.slot_bytes + within * layout.roles[0].token_bytes
    return np.where(tokens < 0, -1, at // token_step(layout)).astype(np.int32)


@cache
def _of_single_tokens(layout: BlockLayout) -> BlockLayout:
    """Blocks of one token's latent with its scale; one object, by which kernels know it."""
    return replace(layout, block_size=1, slots=1, roles=layout.roles[:2], tail_bytes=0)


def _copied(
    arena: NDArray[np.uint8], layout: BlockLayout, slot: int, places: Ints
) -> tuple[NDArray[np.uint8], BlockLayout, Ints]:
    """An arena of the tokens at these places alone, each in a block of its own, and which block that is."""
    found, blocks = np.unique(places, return_inverse=True)
    lacking = int(len(found) > 0 and found[0] < 0)
    single, of_tokens = _of_single_tokens(layout), found[lacking:]
    copy = np.empty(max(1, len(of_tokens)) * single.block_bytes, np.uint8)
    at = of_tokens // layout.block_size, slot, of_tokens % layout.block_size
    for view in (latent_view, latent_scale_view):
        view(copy, single)[: len(of_tokens), 0, 0] = view(arena, layout)[at]
    return copy, single, (blocks.reshape(places.shape) - lacking).astype(np.int32)


def _scales_of(arena: NDArray[np.uint8], layout: BlockLayout, slot: int) -> tuple[Floats, tuple[int, int]]:
    """The arena as scales of keys, floats from one block to the next, and where those of a slot begin; nothing, where
    there are none."""
    if not has_key_scales(layout):
        return np.empty(0, np.float32), (0, 0)
    first = slot * layout.slot_bytes + layout.role_offsets[INDEXER_SCALE]
    return arena.view(np.float32), (layout.block_bytes // 4, first // 4)


def _check_index(index: IndexQueries, layout: BlockLayout) -> None:
    """Raise ValueError where what an indexer asks with and its keys do not fit each other."""
    (tokens, heads, dim), size = index.query.shape, index_role(layout).shape[0]
    fits = index.weights.shape == (tokens, heads) and dim == size
    if not fits or dim % INDEX_DIM_STEP or index.top < 1:
        raise ValueError(
            f"queries of the indexer {index.query.shape}, weights {index.weights.shape} and its keys of {size} do not "
            f"fit each other, or to choose {index.top} cannot be"
        )


def _check_places(arena: NDArray[np.uint8], layout: BlockLayout) -> None:
    """Raise ValueError where places are too many for the numbers of a table."""
    if arena.nbytes // token_step(layout) > _MOST_PLACES:
        raise ValueError(f"an arena of {arena.nbytes} bytes has more places than 2**31: give a smaller kv_cache")
