"""Attention to a window and entries on CPU cores.

All of a query's heads share what it sees, and that are rows of one width, wherever they lie: tokens of its window, and
entries. So it is given to the kernels of single tokens as a table of places in the arena: see
`headwise.kernels.cpu.dsa_attention`, which does so with what its indexer chose. Rows with scales are first made
numbers, each once, in an arena of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.compressed import blocks_in, columns_of, make_entries, pieces_of, table_of
from headwise.kernels.compressed_base import Entries, Kept
from headwise.kernels.compressed_rows import load_rows, store_rows
from headwise.kernels.cpu.attention import NumbaKernels, TokenKernels
from headwise.kernels.cpu.attention_pass import token_step
from headwise.kernels.cpu.chosen import chosen
from headwise.kernels.cpu.dsa_attention import INDEX_DIM_STEP, SCORES, NumbaIndexedKernels
from headwise.kernels.cpu.mla_attention import places_of
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.mla import LATENT, has_scales
from headwise.kernels.token_ranks import places_of_rows

PLACES = 1 << 22
"""That are in tables at a time, unless those of one query are more."""

_LOG2_E = np.float32(np.log2(np.e))
_ONE_HEAD = HeadTable(*(np.zeros(1, np.int32) for _ in range(4)))
_MOST_PLACES = np.iinfo(np.int32).max

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class NumbaCompressedKernels:
    """`PlainCompressedKernels` for float32 arrays in host memory; what is cached is float32, bfloat16, int8 or E4M3.

    A query's results depend neither on the batch nor on the number of threads.

    Raises:
        ConfigError: as `NumbaKernels`.
    """

    name = "numba"

    def __init__(self, threads: int) -> None:
        self._indexed = NumbaIndexedKernels(threads)
        self._rows: NumbaKernels = TokenKernels(threads, kv_dtype=None)

    def write_rows(self, rows: Floats, arena: NDArray[np.uint8], kept: Kept, batch: AttentionBatch) -> None:
        """See `PlainCompressedKernels.write_rows`."""
        if has_scales(kept.layout):
            at, mapped = places_of(batch, kept.heads, kept.layout.block_size)
            store_rows(arena, kept.layout, at, rows[: len(mapped)][mapped])
            return
        self._indexed.write_latent(rows, arena, kept.layout, batch, kept.heads)

    def write_pieces(self, rows: Floats, arena: NDArray[np.uint8], entries: Entries, batch: AttentionBatch) -> None:
        """See `CompressedKernels.write_pieces`."""
        for part, kept in pieces_of(entries):
            self.write_rows(rows[:, part], arena, kept, batch)

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
            of_rows = sequences[rows], positions[rows]
            seen_at = [_window_at(window, batch, *of_rows)]
            if entries is not None:
                numbers = _every_entry(entries, positions[rows])
                if index is not None:
                    numbers = self._chosen(arena, entries, index.of_rows(rows), batch, *of_rows)
                seen_at.append(_entries_at(entries, batch, sequences[rows], numbers))
            table, where, dtype = _table_of(seen_at, arena, query.shape[2])
            self._attend_at(query[rows], table, where, dtype, scale, sink_logits, out[rows])

    @staticmethod
    def _most_seen(window: Kept, entries: Entries | None, index: IndexQueries | None, longest: int) -> int:
        """Rows that a query may see."""
        if entries is None:
            return int(window.heads.window[0])
        every = longest // entries.making.rate
        return int(window.heads.window[0]) + (every if index is None else min(every, index.top))

    def _chosen(
        self,
        arena: NDArray[np.uint8],
        entries: Entries,
        index: IndexQueries,
        batch: AttentionBatch,
        sequences: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """``[rows, top]``: numbers of the entries that are chosen for rows; -1 behind them. index: of these rows"""
        kept, rate = entries.made, entries.making.rate
        every = int((positions.max() + 1) // rate)
        found = np.full((len(positions), min(index.top, every)), -1, np.int64)
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
                found[few[at], behind] = which
        return found

    def _attend_at(
        self,
        query: Floats,
        places: Ints,
        arena: NDArray[np.uint8],
        dtype: str,
        scale: float,
        sink_logits: Floats,
        out: Floats,
    ) -> None:
        """Attention of each query to the rows of ``dtype`` at its places. Its heads are so many tokens of one head to
        the kernels, which see one place more each: behind them all are as many that hold nothing."""
        count, heads, size = query.shape
        table = np.full((count, places.shape[1] + heads - 1), -1, np.int32)
        table[:, : places.shape[1]] = places
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(heads)
        lens = np.full(count, table.shape[1], np.int32)
        mixed, lse = np.empty_like(query), np.empty((count * heads, 1), np.float32)
        row = _row_layout(size, dtype)
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


@dataclass(frozen=True)
class _SeenAt:
    """Where rows that queries see lie: in slots of blocks of ``layout``, which is of rows. begin: see `store_rows`

    blocks, within: ``[queries, rows]``; blocks are -1 where there is none
    """

    layout: BlockLayout
    slot: int
    begin: int
    blocks: NDArray[np.int32]
    within: NDArray[np.int64]

    def places(self) -> Ints:
        """In an arena, in `_step` of bytes; -1 where there is none."""
        role = self.layout.roles[0]
        at = self.blocks.astype(np.int64) * self.layout.block_bytes + self.slot * self.layout.slot_bytes
        at += self.layout.role_offsets[LATENT] + self.within * role.token_bytes
        at += self.begin * (role.token_bytes // role.shape[0])
        return np.where(self.blocks < 0, -1, at // _step(self.layout)).astype(np.int32)

    def numbers(self, arena: NDArray[np.uint8], size: int) -> tuple[Ints, Floats]:
        """Which rows those are, -1 where there is none, of what there is of them, each once, ``[n, size]``."""
        each = self.layout.block_size
        named, which = np.unique(np.where(self.blocks < 0, -1, self.blocks * each + self.within), return_inverse=True)
        none = int(named.size > 0 and named[0] < 0)
        at = named[none:] // each, self.slot, named[none:] % each
        return which.reshape(self.blocks.shape).astype(np.int32) - none, load_rows(
            arena, self.layout, at, size, self.begin
        )


def _window_at(
    window: Kept, batch: AttentionBatch, sequences: NDArray[np.int64], positions: NDArray[np.int64]
) -> _SeenAt:
    """``[rows, window]``: the tokens that rows at these positions see."""
    layout, heads = window.layout, window.heads
    tokens = positions[:, None] - np.arange(int(heads.window[0]))
    blocks = blocks_in(batch, sequences[:, None], window, np.maximum(tokens, 0) // layout.block_size)
    return _SeenAt(layout, int(heads.slot[0]), 0, np.where(tokens < 0, -1, blocks), tokens % layout.block_size)


def _every_entry(entries: Entries, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[rows, entries]``: numbers of all that rows at these positions see; -1 behind them."""
    visible = (positions + 1) // entries.making.rate
    every = np.arange(int(visible.max(initial=0)))[None]
    return np.where(every < visible[:, None], every, -1)


def _entries_at(
    entries: Entries, batch: AttentionBatch, sequences: NDArray[np.int64], numbers: NDArray[np.int64]
) -> _SeenAt:
    """Entries of these numbers, ``[rows, n]``."""
    kept = entries.made
    columns, within = columns_of(np.maximum(numbers, 0), kept.layout)
    blocks = np.where(numbers < 0, -1, blocks_in(batch, sequences[:, None], kept, columns))
    return _SeenAt(kept.layout.own, int(kept.heads.slot[0]), entries.making.begin, blocks, within)


def _table_of(seen_at: Sequence[_SeenAt], arena: NDArray[np.uint8], size: int) -> tuple[Ints, NDArray[np.uint8], str]:
    """What queries see as places in an arena, that arena, and the dtype of rows there."""
    layout = seen_at[0].layout
    if not has_scales(layout):
        table = np.concatenate([each.places() for each in seen_at], axis=1)
        return table, arena, layout.roles[0].dtype
    row = _row_layout(size, "float32")
    steps, made = row.block_bytes // _step(row), [each.numbers(arena, size) for each in seen_at]
    before = np.cumsum([0, *(len(rows) for _, rows in made)])
    which = [np.where(of < 0, -1, (of + int(first)) * steps) for (of, _), first in zip(made, before, strict=False)]
    numbers = np.empty(max(1, int(before[-1])) * row.block_bytes, np.uint8)
    rows = numbers.view(np.float32).reshape(-1, row.block_bytes // 4)[: int(before[-1]), :size]
    np.concatenate([rows for _, rows in made], out=rows)
    return np.concatenate(which, axis=1).astype(np.int32), numbers, "float32"


def _step(layout: BlockLayout) -> int:
    """Bytes that places of rows count."""
    return layout.alignment


def _check(query: Floats, arena: NDArray[np.uint8], layout: BlockLayout, index: IndexQueries | None) -> None:
    """Raise ValueError where the arrays do not fit each other, or places are too many for the numbers of a table."""
    kept, size = layout.roles[0], query.shape[2]
    dtype = "float32" if has_scales(layout) else kept.dtype
    step, width = token_step(_row_layout(size, dtype)), kept.shape[0]
    fits = size <= width <= 2 * size if has_scales(layout) else size == width and not kept.token_bytes % step
    if not fits or step != _step(layout):
        raise ValueError(f"query {query.shape} and rows of {width} numbers of {kept.dtype} do not fit each other")
    if index is not None and (index.query.shape[2] % INDEX_DIM_STEP or index.top < 1):
        raise ValueError(
            f"queries of an indexer {index.query.shape} cannot be multiplied, or {index.top} not be chosen"
        )
    if arena.nbytes // step > _MOST_PLACES:
        raise ValueError(f"an arena of {arena.nbytes} bytes has more places than 2**31: give a smaller kv_cache")
