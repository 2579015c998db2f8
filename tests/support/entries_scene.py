"""Batches of attention to a window and entries of several tokens on arenas poisoned with NaN.

Tokens come in two steps, of which the second is the batch that is attended to: entries are made of rows of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from support.compressed_scene import WritingKernels, write_keys

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.compressed import entries_layout, in_pieces, keys_layout, rows_layout
from headwise.kernels.compressed_base import (
    CompressedKernels,
    Entries,
    EntryMaking,
    Kept,
    Making,
)
from headwise.kernels.dsa_base import IndexQueries

GROUPS = 5
"""Of which the first has nothing to do with the layer."""


@dataclass(frozen=True)
class EntriesCase:
    """A batch; ``query_lens <= seq_lens``. rate: 0, no entries; index_dim: 0, no indexer, and entries do not overlap;
    place: of the layer's entries among those of ``beside`` layers; kv_dtype: of keys and entries, if not that of rows;
    turning: elements of each half that are rotated; pieces: that rows are kept in"""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    window: int = 24
    rate: int = 4
    index_dim: int = 32
    top: int = 6
    index_heads: int = 3
    heads: int = 3
    size: int = 32
    block_size: int = 16
    slots: int = 2
    dtype: str = "float32"
    kv_dtype: str = ""
    turning: int = 8
    pieces: int = 1
    beside: int = 1
    place: int = 0
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size, self.index_dim) if self.index_dim else (self.size,)


class EntriesScene:
    """A case with random keys, rows and queries."""

    def __init__(self, case: EntriesCase) -> None:
        self.case, draw = case, np.random.default_rng(case.seed)
        kept = numpy_dtype(case.dtype)

        def random(*shape: int) -> np.ndarray:
            return draw.standard_normal(shape).astype(np.float32)

        self.tokens, self.scale, each = sum(case.query_lens), case.size**-0.5, 2 if case.index_dim else 1
        width = sum(2 * each * size for size in case.sizes)
        self.keys = [random(length, case.size).astype(kept) for length in case.seq_lens]
        self.rows = [random(length, width).astype(kept) for length in case.seq_lens]
        self.query = random(self.tokens, case.heads, case.size).astype(kept)
        self.sinks = random(case.heads)
        self.index = None
        if case.index_dim and case.rate:
            asked = random(self.tokens, case.index_heads, case.index_dim), random(self.tokens, case.index_heads)
            self.index = IndexQueries(*(array.astype(kept) for array in asked), case.top)
        layouts, reach = self._layouts(each), [each * case.rate] * len(case.sizes)
        members = (1, *[case.pieces] * len(reach), 1)
        self.window, *of_rows, made = (
            Kept(layout, _heads(group, draw.permutation(case.slots)[:count], window))
            for group, (layout, window, count) in enumerate(
                zip(layouts, (case.window, *reach, 0), members, strict=True), 1
            )
        )
        makings = tuple(
            Making(size, random(max(1, case.rate), each * size), random(size) + 2, 1e-6, random(size // 2) ** 2)
            for size in case.sizes
        )
        making = EntryMaking(case.rate, each == 2, makings, begin=case.place * case.size)
        self.entries = Entries(making, tuple(of_rows), made) if case.rate else None
        columns = -(-max(case.seq_lens) // case.block_size)
        needed = len(layouts) * len(case.seq_lens) * columns
        self.arena = np.full((needed + 1) * layouts[0].block_bytes, 0xFF, np.uint8)
        self.tables = np.full((len(case.seq_lens), GROUPS, columns), -1, np.int32)
        mapped = draw.permutation(needed).reshape(len(case.seq_lens), len(layouts), columns) + 1
        self.tables[:, 1 : 1 + len(layouts)] = mapped

    def _layouts(self, keys: int) -> list[BlockLayout]:
        """keys: that a token has of each thing"""
        case = self.case
        sizes, kv_dtype = (case.block_size, case.slots), case.kv_dtype or case.dtype
        found = [
            keys_layout(*sizes, case.size, kv_dtype, case.turning),
            *(rows_layout(*sizes, 2 * keys * size // case.pieces, case.dtype) for size in case.sizes),
            entries_layout(
                *sizes,
                case.size,
                max(1, case.rate),
                kv_dtype,
                case.turning,
                index_dim=case.index_dim,
                beside=case.beside,
            ),
        ]
        most = max(layout.block_bytes for layout in found)
        return [replace(layout, tail_bytes=most - layout.block_bytes) for layout in found]

    def batch(self, lengths: np.ndarray, before: np.ndarray) -> AttentionBatch:
        """Of sequences that have ``lengths``, of which ``before`` were there; blocks that none needs are not mapped."""
        tables = self.tables.copy()
        for sequence, (length, old) in enumerate(zip(lengths, before, strict=True)):
            rows = () if self.entries is None else self.entries.rows
            reach = (self.case.window, *(int(each.heads.window[0]) for each in rows))
            for group, window in enumerate(reach, 1):
                tables[sequence, group, : max(0, old + 1 - window) // self.case.block_size] = -1
            tables[sequence, :, -(-length // self.case.block_size) :] = -1
        cu = np.cumsum([0, *(lengths - before)], dtype=np.int32)
        most = int((lengths - before).max())
        return AttentionBatch(cu, lengths.astype(np.int32), tables.reshape(-1, tables.shape[2]), GROUPS, most)

    def steps(self) -> list[tuple[AttentionBatch, np.ndarray, np.ndarray]]:
        """Two: the batch, and its keys and rows."""
        lengths = np.array(self.case.seq_lens)
        old = lengths - np.array(self.case.query_lens)

        def taken(rows: list[np.ndarray], first: np.ndarray, last: np.ndarray) -> np.ndarray:
            return np.concatenate([each[i:j] for each, i, j in zip(rows, first, last, strict=True)])

        return [
            (self.batch(last, first), taken(self.keys, first, last), taken(self.rows, first, last))
            for first, last in ((np.zeros_like(old), old), (old, lengths))
        ]

    def write(self, kernels: WritingKernels, wide: bool = False) -> None:
        """Both steps. wide: kernels are given float32"""
        for batch, keys, rows in self.steps():
            keys, rows = (array.astype(np.float32) if wide else array for array in (keys, rows))
            if not len(keys):
                continue
            write_keys(kernels, keys, self.case.turning, self.arena, self.window, batch)
            if self.entries is not None:
                self.write_rows(kernels, rows, batch)
                kernels.make_entries(self.arena, self.entries, batch)

    def write_rows(self, kernels: CompressedKernels, rows: np.ndarray, batch: AttentionBatch) -> None:
        """Those that entries are made of."""
        assert self.entries is not None
        making, ordered = self.entries.making, rows.copy()
        for row, kept, one in zip(making.parts, self.entries.rows, making.makings, strict=True):
            ordered[:, row] = rows[:, row][:, in_pieces(one.size, making.keys, kept.pieces)]
        kernels.write_pieces(ordered, self.arena, self.entries, batch)

    def attend(self, kernels: CompressedKernels, wide: bool = False, last: AttentionBatch | None = None) -> np.ndarray:
        """Of the second step. wide: likewise"""
        query, index = self.query, self.index
        if wide:
            query = query.astype(np.float32)
            arrays: Any = () if index is None else (index.query.astype(np.float32), index.weights.astype(np.float32))
            index = None if index is None else IndexQueries(*arrays, index.top)
        out = np.full(query.shape, np.nan, query.dtype)
        kernels.attend(
            query, self.arena, self.window, self.entries, index, last or self.steps()[1][0], scale=self.scale,
            sink_logits=self.sinks, out=out,
        )  # fmt: skip
        return out


def _heads(group: int, slots: np.ndarray, window: int) -> HeadTable:
    each = np.stack(np.broadcast_arrays(group, slots, window, 0)).astype(np.int32)
    return HeadTable(*(np.ascontiguousarray(values) for values in each))
