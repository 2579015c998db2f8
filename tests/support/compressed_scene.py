"""Batches of attention to a window and entries on arenas poisoned with NaN, and the answer token by token.

The indexer's numbers are small integers where entries are copies of their rows' means: scores may be equal, and then
the first entry is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.compressed import entries_layout, keys_layout, rows_layout
from headwise.kernels.compressed_base import (
    CompressedKernels,
    Entries,
    EntryMaking,
    Kept,
    Making,
    PlainCompressedKernels,
    TurningCompressedKernels,
)
from headwise.kernels.dsa_base import IndexQueries

WritingKernels = PlainCompressedKernels | TurningCompressedKernels


def write_keys(
    kernels: WritingKernels, keys: np.ndarray, turning: int, arena: np.ndarray, window: Kept, batch: AttentionBatch
) -> None:
    """Store ``keys [tokens, size]`` as they are: what turns elements of heads turns these by nothing."""
    if not isinstance(kernels, TurningCompressedKernels):
        kernels.write_rows(keys, arena, window, batch)
        return
    cosines = np.ones((len(keys), 1, turning), np.float32)
    query = np.zeros((len(keys), 1, keys.shape[1]), keys.dtype)
    kernels.write_turned(query, keys, cosines, 0 * cosines, turning, arena, window, batch)


@dataclass(frozen=True)
class CompressedCase:
    """query_lens, seq_lens: of the last step's sequences; what is before was computed in steps of ``chunk`` tokens

    beside: layers whose entries lie beside each other, of which this one is the last
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    rate: int = 4
    is_indexed: bool = True
    window: int = 12
    heads: int = 3
    head_dim: int = 32
    index_heads: int = 4
    index_dim: int = 32
    top: int = 5
    block_size: int = 8
    slots: int = 2
    beside: int = 1
    dtype: str = "float32"
    chunk: int = 7
    seed: int = 0


class CompressedScene:
    """A case with random rows, whose caches lie in one arena of blocks of equal bytes, and the answer."""

    def __init__(self, case: CompressedCase) -> None:
        self.case, draw = case, np.random.default_rng(case.seed)
        keys = 2 if case.is_indexed else 1
        sizes = [case.head_dim, *([case.index_dim] if case.is_indexed else [])]
        makings = tuple(
            Making(
                size,
                draw.standard_normal((case.rate, keys * size), np.float32),
                1 + draw.standard_normal(size, np.float32) / 5,
                1e-6,
                np.concatenate([0.3 ** np.arange(size // 4), np.zeros(size // 4)]).astype(np.float32),
            )
            for size in sizes
        )
        self.making = EntryMaking(case.rate, case.is_indexed, makings, (case.beside - 1) * case.head_dim)
        width = self.making.parts[-1].stop
        self.rows = [draw.standard_normal((length, width), np.float32) for length in case.seq_lens]
        self.keys = [draw.standard_normal((length, case.head_dim), np.float32) for length in case.seq_lens]
        tokens, self.scale = sum(case.query_lens), case.head_dim**-0.5
        self.query = 2 * draw.standard_normal((tokens, case.heads, case.head_dim), np.float32)
        self.sinks = draw.standard_normal(case.heads, np.float32)
        self.index = None
        if case.is_indexed:
            asked = draw.standard_normal((tokens, case.index_heads, case.index_dim), np.float32)
            self.index = IndexQueries(asked, draw.standard_normal((tokens, case.index_heads), np.float32), case.top)
        self._lay_out(draw, width)

    def _lay_out(self, draw: np.random.Generator, width: int) -> None:
        case = self.case
        layouts = [
            keys_layout(case.block_size, case.slots, case.head_dim, case.dtype, case.head_dim // 4),
            *(
                rows_layout(case.block_size, case.slots, part.stop - part.start, case.dtype)
                for part in self.making.parts
            ),
            entries_layout(
                case.block_size, case.slots, case.head_dim, case.rate, case.dtype, case.head_dim // 4,
                index_dim=case.index_dim if case.is_indexed else 0, beside=case.beside,
            ),
        ]  # fmt: skip
        block_bytes = max(layout.block_bytes for layout in layouts)
        windows, kept = (case.window, *[2 * case.rate] * len(self.making.parts), 0), []
        groups = draw.permutation(len(layouts)).tolist()
        self.groups = len(groups)
        for layout, window, group in zip(layouts, windows, groups, strict=True):
            whole = type(layout)(
                layout.block_size, layout.slots, layout.roles, tail_bytes=block_bytes - layout.block_bytes,
                rate=layout.rate,
            )  # fmt: skip
            at = (np.array([number], np.int32) for number in (group, draw.integers(case.slots), window, 0))
            kept.append(Kept(whole, HeadTable(*at)))
        self.window, *rows, made = kept
        self.entries = Entries(self.making, tuple(rows), made)
        columns = -(-max(case.seq_lens) // case.block_size)
        count = len(case.seq_lens) * self.groups * columns
        self.tables = draw.permutation(count).reshape(-1, columns).astype(np.int32)
        self.arena = np.full((self.tables.size + 1) * block_bytes, 0xFF, np.uint8)

    def batch(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionBatch:
        ends = np.cumsum([0, *query_lens], dtype=np.int32)
        return AttentionBatch(ends, np.array(seq_lens, np.int32), self.tables, self.groups)

    def write(self, kernels: WritingKernels) -> None:
        """All tokens, in steps of some each; entries as they end."""
        for first in range(0, max(self.case.seq_lens), self.case.chunk):
            counts = [max(0, min(self.case.chunk, length - first)) for length in self.case.seq_lens]
            lengths = [min(first + self.case.chunk, length) for length in self.case.seq_lens]
            batch = self.batch(counts, lengths)
            every = [
                np.concatenate([each[first : first + count] for each, count in zip(rows, counts, strict=True)])
                for rows in (self.keys, self.rows)
            ]
            write_keys(kernels, every[0], self.case.head_dim // 4, self.arena, self.window, batch)
            kernels.write_pieces(every[1], self.arena, self.entries, batch)
            kernels.make_entries(self.arena, self.entries, batch)

    def recycle(self) -> None:
        """Forget the blocks that no query of the last step sees, of windows and of rows; what was there is NaN."""
        case, columns = self.case, self.tables.shape[1]
        for kept, window in ((self.window, case.window), *((rows, 2 * case.rate) for rows in self.entries.rows)):
            for sequence, (queries, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
                gone = max(0, length - queries - window + 1) // case.block_size
                row = sequence * self.groups + int(kept.heads.group[0])
                for block in self.tables[row, : min(gone, columns)]:
                    self.arena.reshape(-1, kept.layout.block_bytes)[block] = 0xFF
                self.tables[row, :gone] = -1

    def attend(self, kernels: CompressedKernels, with_entries: bool = True) -> np.ndarray:
        out = np.full_like(self.query, np.nan)
        kernels.attend(
            self.query, self.arena, self.window, self.entries if with_entries else None,
            self.index if with_entries else None, self.batch(self.case.query_lens, self.case.seq_lens),
            scale=self.scale, sink_logits=self.sinks, out=out,
        )  # fmt: skip
        return out

    # ---- the answer ----

    def entry(self, sequence: int, number: int, index: int) -> np.ndarray:
        """What is made of an entry's tokens, one number after the other."""
        one, first, rate = self.making.makings[index], self.making.parts[index].start, self.case.rate
        width, rows = self.making.keys * one.size, self.rows[sequence].astype(np.float64)
        places = [(token, width - one.size) for token in range(number * rate, (number + 1) * rate)]
        if self.making.overlaps and number:
            places += [(token, 0) for token in range((number - 1) * rate, number * rate)]
        mixed = np.empty(one.size)
        for i in range(one.size):
            keys = np.array([rows[token, first + at + i] for token, at in places])
            gates = [
                rows[token, first + width + at + i] + float(one.bias[token % rate, at + i]) for token, at in places
            ]
            shares = np.exp(np.array(gates) - max(gates))
            mixed[i] = keys @ shares / shares.sum()
        normed = mixed / np.sqrt((mixed**2).mean() + one.eps) * one.norm
        half = one.size // 2
        turned = (normed[:half] + 1j * normed[half:]) * np.exp(1j * number * rate * one.inverse.astype(np.float64))
        return np.concatenate([turned.real, turned.imag])

    def expected(self, with_entries: bool = True) -> np.ndarray:
        case, found, row = self.case, np.empty(self.query.shape), 0
        for sequence, (queries, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
            for position in range(length - queries, length):
                seen = [self.keys[sequence][token] for token in range(max(0, position - case.window + 1), position + 1)]
                if with_entries:
                    seen += self._entries_seen(sequence, row, (position + 1) // case.rate)
                keys = np.array(seen, np.float64)
                for head in range(case.heads):
                    scores = np.append(keys @ self.query[row, head] * self.scale, self.sinks[head])
                    shares = np.exp(scores - scores.max())
                    found[row, head] = shares[:-1] @ keys / shares.sum()
                row += 1
        return found

    def _entries_seen(self, sequence: int, row: int, count: int) -> list[np.ndarray]:
        numbers = list(range(count))
        if self.index is not None:
            query, weights = self.index.query[row].astype(np.float64), self.index.weights[row]
            scores = {
                number: float(np.maximum(query @ self.entry(sequence, number, 1), 0) @ weights) for number in numbers
            }
            numbers = sorted(numbers, key=lambda number: (-scores[number], number))[: self.case.top]
        return [self.entry(sequence, number, 0) for number in numbers]
