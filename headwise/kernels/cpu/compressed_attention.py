"""Attention to a window and entries on CPU cores.

All of a query's heads share what it sees, and that are rows of one width, wherever they lie: tokens of its window, and
entries. So it is given to the kernels of single tokens as a table of places in the arena: see
`headwise.kernels.cpu.dsa_attention`, which does so with what its indexer chose.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.compressed import blocks_in, columns_of, make_entries, table_of
from headwise.kernels.compressed_base import Entries, Kept
from headwise.kernels.cpu.attention import NumbaKernels, TokenKernels
from headwise.kernels.cpu.attention_pass import token_step
from headwise.kernels.cpu.chosen import chosen
from headwise.kernels.cpu.dsa_attention import INDEX_DIM_STEP, SCORES, NumbaIndexedKernels
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.mla import LATENT
from headwise.kernels.token_ranks import places_of_rows

PLACES = 1 << 22
"""That are in tables at a time, unless those of one query are more."""

_LOG2_E = np.float32(np.log2(np.e))
_ONE_HEAD = HeadTable(*(np.zeros(1, np.int32) for _ in range(4)))
_MOST_PLACES = np.iinfo(np.int32).max

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class NumbaCompressedKernels:
    """`CompressedKernels` for float32 arrays in host memory; what is cached is float32 or bfloat16.

    A query's results depend neither on the batch nor on the number of threads.

    Raises:
        ConfigError: as `NumbaKernels`.
    """

    name = "numba"

    def __init__(self, threads: int) -> None:
        self._indexed = NumbaIndexedKernels(threads)
        self._rows: NumbaKernels = TokenKernels(threads, kv_dtype=None)

    def write_rows(self, rows: Floats, arena: NDArray[np.uint8], kept: Kept, batch: AttentionBatch) -> None:
        """See `CompressedKernels.write_rows`."""
        self._indexed.write_latent(rows, arena, kept.layout, batch, kept.heads)

    def make_entries(self, arena: NDArray[np.uint8], entries: Entries, batch: AttentionBatch) -> None:
        """See `CompressedKernels.make_entries`."""
        make_entries(arena, entries, batch)

    def attend(
        self,
        query: Floats,
        arena: NDArray[np.uint8],
        window: Kept,
        entries: Entries | None,
        index: IndexQueries | None,
        batch: AttentionBatch,
        *,
        scale: float,
        sink_logits: Floats,
        out: Floats,
    ) -> None:
        """See `CompressedKernels.attend`. A visible token or entry whose block is ``-1`` is treated as not visible."""
        _check(query, arena, window.layout, index)
        sequences, positions = places_of_rows(batch)
        seen = self._most_seen(window, entries, index, int(batch.seq_lens.max(initial=0)))
        step = max(1, PLACES // (seen + query.shape[1]))
        for first in range(0, len(positions), step):
            rows = slice(first, min(first + step, len(positions)))
            tables = [_window_places(window, batch, sequences[rows], positions[rows])]
            if entries is not None and index is None:
                tables.append(_entry_places(entries, batch, sequences[rows], positions[rows]))
            elif entries is not None and index is not None:
                of_rows = index.of_rows(rows)
                tables.append(self._chosen_places(arena, entries, of_rows, batch, sequences[rows], positions[rows]))
            self._attend_at(
                query[rows], np.concatenate(tables, axis=1), arena, window.layout, scale, sink_logits, out[rows]
            )

    @staticmethod
    def _most_seen(window: Kept, entries: Entries | None, index: IndexQueries | None, longest: int) -> int:
        """Rows that a query may see."""
        if entries is None:
            return int(window.heads.window[0])
        every = longest // entries.making.rate
        return int(window.heads.window[0]) + (every if index is None else min(every, index.top))

    def _chosen_places(
        self,
        arena: NDArray[np.uint8],
        entries: Entries,
        index: IndexQueries,
        batch: AttentionBatch,
        sequences: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> Ints:
        """``[rows, top]``: places of the entries that are chosen for rows; -1 behind them. index: of these rows"""
        kept, rate = entries.made, entries.making.rate
        every = int((positions.max() + 1) // rate)
        found = np.full((len(positions), min(index.top, every)), -1, np.int32)
        for sequence in np.unique(sequences):
            rows = np.flatnonzero(sequences == sequence)
            table = table_of(batch.block_tables[sequence * batch.groups + int(kept.heads.group[0])], kept.layout)
            for few in np.array_split(rows, -(-len(rows) * max(1, every) // SCORES)):
                visible = (positions[few] + 1) // rate
                count = int(visible.max())
                if not count:
                    continue
                scores = np.empty((len(few), count), np.float32)
                some = slice(int(few[0]), int(few[-1]) + 1)
                self._indexed.score(index, some, arena, kept.layout.own, table, kept.heads, count, scores, start=count)
                scores[np.arange(count) >= visible[:, None]] = -np.inf
                at, which = np.nonzero(chosen(scores, index.top))
                counts = np.bincount(at, minlength=len(few))
                behind = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
                found[few[at], behind] = _places(entries, batch, np.full(len(which), sequence), which)
        return found

    def _attend_at(
        self,
        query: Floats,
        places: Ints,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        scale: float,
        sink_logits: Floats,
        out: Floats,
    ) -> None:
        """Attention of each query to the rows at its places. Its heads are so many tokens of one head to the kernels,
        which see one place more each: behind them all are as many that hold nothing."""
        count, heads, size = query.shape
        table = np.full((count, places.shape[1] + heads - 1), -1, np.int32)
        table[:, : places.shape[1]] = places
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(heads)
        lens = np.full(count, table.shape[1], np.int32)
        mixed, lse = np.empty_like(query), np.empty((count * heads, 1), np.float32)
        row = _row_layout(size, layout.roles[0].dtype)
        self._rows.attend(
            query.reshape(count * heads, 1, size), arena, row, AttentionBatch(ends, lens, table, 1), _ONE_HEAD,
            scale=scale, softcap=0.0, out=mixed.reshape(count * heads, 1, size), lse=lse,
        )  # fmt: skip
        of_sinks = np.exp2(sink_logits * _LOG2_E - lse.reshape(count, heads))
        np.divide(mixed, (1 + of_sinks)[:, :, None], out=out)


@cache
def _row_layout(size: int, dtype: str) -> BlockLayout:
    """By which kernels know rows of this size: those of any block begin at a multiple of `token_step` of it; one
    object."""
    layout = BlockLayout(block_size=1, slots=1, roles=(Role(LATENT, (size,), dtype),))
    return BlockLayout(1, 1, layout.roles, tail_bytes=layout.alignment)


def _window_places(
    window: Kept, batch: AttentionBatch, sequences: NDArray[np.int64], positions: NDArray[np.int64]
) -> Ints:
    """``[rows, window]``: places of the tokens that rows at these positions see; -1 where there is none."""
    layout, heads = window.layout, window.heads
    tokens = positions[:, None] - np.arange(int(heads.window[0]))
    blocks = blocks_in(batch, sequences[:, None], window, np.maximum(tokens, 0) // layout.block_size)
    at = _byte_places(layout, int(heads.slot[0]), blocks, tokens % layout.block_size)
    return np.where((blocks < 0) | (tokens < 0), -1, at // _step(layout)).astype(np.int32)


def _entry_places(
    entries: Entries, batch: AttentionBatch, sequences: NDArray[np.int64], positions: NDArray[np.int64]
) -> Ints:
    """``[rows, entries]``: the same of all entries."""
    visible = (positions + 1) // entries.making.rate
    every = np.arange(int(visible.max(initial=0)))[None]
    return np.where(every < visible[:, None], _places(entries, batch, sequences[:, None], every), -1).astype(np.int32)


def _places(entries: Entries, batch: AttentionBatch, sequences: Any, numbers: Any) -> Ints:
    """Places of these entries; -1 where there is none."""
    layout, heads = entries.made.layout, entries.made.heads
    columns, within = columns_of(numbers, layout)
    blocks = blocks_in(batch, sequences, entries.made, columns)
    at = _byte_places(layout, int(heads.slot[0]), blocks, within)
    role = layout.roles[0]
    at += entries.making.begin * (role.token_bytes // role.shape[0])
    return np.where(blocks < 0, -1, at // _step(layout)).astype(np.int32)


def _byte_places(layout: BlockLayout, slot: int, blocks: Any, within: Any) -> NDArray[np.int64]:
    within_block = slot * layout.slot_bytes + within * layout.roles[0].token_bytes
    at: NDArray[np.int64] = blocks.astype(np.int64) * layout.block_bytes + within_block
    return at


def _step(layout: BlockLayout) -> int:
    """Bytes that places of rows count."""
    return layout.alignment


def _check(query: Floats, arena: NDArray[np.uint8], layout: BlockLayout, index: IndexQueries | None) -> None:
    """Raise ValueError where the arrays do not fit each other, or places are too many for the numbers of a table."""
    size = layout.roles[0].shape[0]
    step = token_step(_row_layout(size, layout.roles[0].dtype))
    if query.shape[2] != size or layout.roles[0].token_bytes % step or step != _step(layout):
        raise ValueError(
            f"query {query.shape} and rows of {size} numbers of {layout.roles[0].dtype} do not fit each other"
        )
    if index is not None and (index.query.shape[2] % INDEX_DIM_STEP or index.top < 1):
        raise ValueError(
            f"queries of an indexer {index.query.shape} cannot be multiplied, or {index.top} not be chosen"
        )
    if arena.nbytes // step > _MOST_PLACES:
        raise ValueError(f"an arena of {arena.nbytes} bytes has more places than 2**31: give a smaller kv_cache")
