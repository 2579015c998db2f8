"""Latent attention with an indexer (DSA) on CPU cores.

Queries that see no more tokens than may be chosen attend to all of them, as without an indexer. For each other one its
best tokens are found, and attended to in the absorbed form where they lie in the cache: a "block" of its table is one
token. Its heads are given to the kernels as so many tokens of one head, which makes a tile of them; the table ends in
as many unmapped places, so that all of them see every chosen token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.bfloat16 import to_bits
from headwise.kernels.cpu import dsa_jit
from headwise.kernels.cpu.attention import TokenKernels
from headwise.kernels.cpu.attention_pass import STORED, token_step
from headwise.kernels.cpu.attention_products import CHUNK
from headwise.kernels.cpu.mla_attention import THREAD_WORK, NumbaLatentKernels
from headwise.kernels.cpu.sharing import share_out
from headwise.kernels.dsa import index_role, index_view
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.mla_base import UpProjections

SCORES = 1 << 22
"""That are computed at a time, unless those of one query are more."""

ABSORBED_BYTES = 64 << 20
"""Of absorbed queries at a time, unless those of one token are more."""

INDEX_DIM_STEP = 32
"""An indexer's heads must be a multiple of this: keys are read as whole vectors, and none beyond its end."""

_MOST_PLACES = np.iinfo(np.int32).max

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class NumbaIndexedKernels(NumbaLatentKernels):
    """`IndexedKernels` for float32 arrays in host memory; what is cached is float32 or bfloat16.

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
        cu, lens = batch.cu_seqlens_q, batch.seq_lens
        sequences = np.repeat(np.arange(len(lens)), np.diff(cu))
        positions = lens[sequences] - cu[sequences + 1] + np.arange(len(sequences))
        rows = sequences * batch.groups + heads.group[0]
        blocks = batch.block_tables[rows, positions // layout.block_size]
        mapped, view = blocks >= 0, index_view(arena, layout)
        written = key[: len(sequences)][mapped]
        at = blocks[mapped], heads.slot[0], positions[mapped] % layout.block_size
        view[at] = to_bits(written) if view.dtype == np.uint16 else written

    def attend_chosen(
        self,
        query: Floats,
        up: UpProjections,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Floats,
    ) -> None:
        """See `IndexedKernels.attend_chosen`. A visible token whose block is ``-1`` is treated as not visible."""
        _check(query, index, arena, layout)
        cu, queries = batch.cu_seqlens_q, np.diff(batch.cu_seqlens_q)
        starts = batch.seq_lens - queries
        early = np.clip(index.top - starts, 0, queries)  # queries that see no more than may be chosen
        if (early == queries).all():
            self.attend_latent(query, up, arena, layout, batch, heads, scale=scale, out=out)
            return
        if early.any():
            those = np.concatenate([np.arange(first, first + few) for first, few in zip(cu[:-1], early, strict=True)])
            part = np.empty_like(out, shape=(len(those), *out.shape[1:]))
            ends = np.cumsum([0, *early], dtype=np.int32)
            shortened = replace(batch, cu_seqlens_q=ends, seq_lens=(starts + early).astype(np.int32))
            self.attend_latent(query[those], up, arena, layout, shortened, heads, scale=scale, out=part)
            out[those] = part
        step = max(1, ABSORBED_BYTES // (4 * query.shape[1] * layout.roles[0].shape[0]))
        waiting: list[_Choice] = []
        for choice in self._choices(index, arena, layout, batch, heads, early, step):
            if waiting and sum(len(one.places) for one in waiting) + len(choice.places) > step:
                self._attend_places(query, up, waiting, arena, layout, scale, out)
                waiting = []
            waiting.append(choice)
        self._attend_places(query, up, waiting, arena, layout, scale, out)

    def _choices(
        self,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        early: Any,
        most_rows: int,
    ) -> Iterator[_Choice]:
        """What is chosen for the queries behind the ``early`` ones of each sequence, for some at a time."""
        for sequence, few in enumerate(early):
            first, last = int(batch.cu_seqlens_q[sequence] + few), int(batch.cu_seqlens_q[sequence + 1])
            context = int(batch.seq_lens[sequence])
            step = max(1, min(most_rows, SCORES // max(1, context)))
            table = batch.block_tables[sequence * batch.groups + heads.group[0]]
            for begin in range(first, last, step):
                rows = slice(begin, min(begin + step, last))
                seen = context - (last - rows.stop)
                scores = np.empty((rows.stop - begin, seen), np.float32)
                self._score(index, rows, arena, layout, table, heads, seen, scores)
                places = _places(chosen(scores, index.top), index.top, layout, table, int(heads.slot[0]))
                yield _Choice(rows, places, np.isnan(scores.max(axis=1)))

    def _score(
        self,
        index: IndexQueries,
        rows: slice,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        table: Ints,
        heads: HeadTable,
        seen: int,
        out: Floats,
    ) -> None:
        """Scores of a sequence's first ``seen`` tokens by its queries ``rows``, the last of which is the last token."""
        role = index_role(layout)
        stored = arena.view(STORED[role.dtype])
        compiled, size = dsa_jit.score_chunks(stored.dtype), stored.itemsize
        keys_at = (int(heads.slot[0]) * layout.slot_bytes + layout.role_offsets[role.name]) // size
        query, weights = index.query[rows], index.weights[rows]
        start = seen - len(query)

        def score(begin: int, end: int) -> None:
            compiled(
                begin, end, query, weights, stored, table, layout.block_size, layout.block_bytes // size, keys_at,
                start, int(heads.window[0]), int(heads.sink[0]), out,
            )  # fmt: skip

        share_out(score, -(-seen // CHUNK), min(self._threads, query.size * seen // THREAD_WORK))

    def _attend_places(
        self,
        query: Floats,
        up: UpProjections,
        choices: list[_Choice],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        scale: float,
        out: Floats,
    ) -> None:
        """Attention of some queries, each to the tokens at its places."""
        rows = np.concatenate([np.arange(choice.rows.start, choice.rows.stop) for choice in choices])
        places = np.concatenate([choice.places for choice in choices])
        count, (heads, plain, rank) = len(rows), up.key.shape
        absorbed = np.empty((count, heads, layout.roles[0].shape[0]), np.float32)
        absorbed[:, :, rank:] = query[rows, :, plain:]
        self._multiply(query[rows, :, :plain], up.key, absorbed[:, :, :rank])
        table = np.full((count, places.shape[1] + heads - 1), -1, np.int32)
        table[:, : places.shape[1]] = places
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(heads)
        lens = np.full(count, table.shape[1], np.int32)
        mixed = np.empty_like(absorbed)
        self._tokens.attend(
            absorbed.reshape(count * heads, 1, -1), arena, layout, AttentionBatch(ends, lens, table, 1),
            HeadTable(*(np.zeros(1, np.int32) for _ in range(4))), scale=scale, softcap=0.0,
            out=mixed.reshape(count * heads, 1, -1),
        )  # fmt: skip
        part = np.empty_like(out, shape=(count, *out.shape[1:]))
        self._multiply(mixed[:, :, :rank], up.value, part)
        part[np.concatenate([choice.is_broken for choice in choices])] = np.nan
        out[rows] = part


@dataclass(frozen=True, eq=False)
class _Choice:
    """Of some queries of a sequence.

    places:    ``int32 [queries, top]``, where the tokens chosen for each lie, in `token_step`; -1 behind them
    is_broken: ``bool [queries]``, whether a score is NaN: nothing can be chosen by it
    """

    rows: slice
    places: Ints
    is_broken: NDArray[np.bool_]


def chosen(scores: Floats, top: int) -> NDArray[np.bool_]:
    """``bool [queries, keys]``: the ``top`` highest scores above minus infinity, of equal ones the first."""
    keys = scores.shape[1]
    if keys <= top:
        return scores > -np.inf
    least = np.partition(scores, keys - top, axis=1)[:, keys - top, None]
    above = scores > least
    equal = (scores == least) & (scores > -np.inf)
    room = top - above.sum(axis=1, keepdims=True)
    found: NDArray[np.bool_] = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return found


def _places(is_chosen: NDArray[np.bool_], top: int, layout: BlockLayout, table: Ints, slot: int) -> Ints:
    """`_Choice.places` of tokens by their positions, ``bool [queries, keys]``."""
    step = token_step(layout)
    rows, positions = np.nonzero(is_chosen)
    counts = is_chosen.sum(axis=1)
    at = table[positions // layout.block_size].astype(np.int64) * layout.block_bytes + slot * layout.slot_bytes
    at = (at + positions % layout.block_size * layout.roles[0].token_bytes) // step
    places = np.full((len(counts), top), -1, np.int32)
    places[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = at
    return places


def _check(query: Floats, index: IndexQueries, arena: NDArray[np.uint8], layout: BlockLayout) -> None:
    """Raise ValueError where the arrays do not fit each other, or places are too many for the numbers of a table."""
    tokens, heads, dim = index.query.shape
    fits = tokens == len(query) and index.weights.shape == (tokens, heads) and dim == index_role(layout).shape[0]
    if not fits or dim % INDEX_DIM_STEP or index.top < 1:
        raise ValueError(
            f"query {query.shape}, those of the indexer {index.query.shape}, weights {index.weights.shape} and its "
            f"keys of {index_role(layout).shape[0]} do not fit each other, or to choose {index.top} cannot be"
        )
    if arena.nbytes // token_step(layout) > _MOST_PLACES:
        raise ValueError(f"an arena of {arena.nbytes} bytes has more places than 2**31: give a smaller kv_cache")
