"""Attention to a window and entries in plain NumPy: the definition that other implementations are tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.base import AttentionBatch
from headwise.kernels.compressed import blocks_in, columns_of, make_entries, pieces_of
from headwise.kernels.compressed_base import Entries, Kept
from headwise.kernels.compressed_rows import load_rows, write_rows
from headwise.kernels.dsa import load_keys
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.dsa_reference import best
from headwise.kernels.reference import Positions, sequences_of, softmax_attention, visible_to


class ReferenceCompressedKernels:
    """Clarity over speed: one sequence at a time, in float64."""

    name = "reference"

    def write_rows(self, rows: NDArray[Any], arena: NDArray[np.uint8], kept: Kept, batch: AttentionBatch) -> None:
        """See `PlainCompressedKernels.write_rows`."""
        write_rows(rows, arena, kept, batch)

    def write_pieces(
        self, rows: NDArray[Any], arena: NDArray[np.uint8], entries: Entries, batch: AttentionBatch
    ) -> None:
        """See `CompressedKernels.write_pieces`."""
        for part, kept in pieces_of(entries):
            self.write_rows(rows[:, part], arena, kept, batch)

    def make_entries(self, arena: NDArray[np.uint8], entries: Entries, batch: AttentionBatch) -> None:
        """See `CompressedKernels.make_entries`."""
        make_entries(arena, entries, batch, np.float64)

    def attend(
        self,
        query: NDArray[Any],
        arena: NDArray[np.uint8],
        window: Kept,
        entries: Entries | None,
        index: IndexQueries | None,
        batch: AttentionBatch,
        *,
        scale: float,
        sink_logits: NDArray[np.float32],
        out: NDArray[Any],
    ) -> None:
        """See `CompressedKernels.attend`. A visible token or entry whose block is ``-1`` is treated as not visible."""
        for sequence, rows, positions in sequences_of(batch):
            keys, visible = _window_of(arena, window, batch, sequence, positions, query.shape[2])
            if entries is not None:
                of_rows = None if index is None else index.of_rows(rows)
                more, chosen = _entries_of(arena, entries, of_rows, batch, sequence, positions, query.shape[2])
                keys, visible = np.concatenate([keys, more]), np.concatenate([visible, chosen], axis=1)
            sinks = sink_logits.astype(np.float64)
            out[rows] = softmax_attention(query[rows], keys, keys, visible, scale, softcap=0.0, sink_logits=sinks)


def _window_of(
    arena: NDArray[np.uint8], window: Kept, batch: AttentionBatch, sequence: int, positions: Positions, width: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Keys of the tokens that some query sees, and which of them each does."""
    context, size = np.arange(positions[-1] + 1), window.layout.block_size
    visible = visible_to(positions, context, int(window.heads.window[0]), 0)
    seen = context[visible.any(axis=0)]
    blocks = blocks_in(batch, sequence, window, seen // size)
    seen, blocks = seen[blocks >= 0], blocks[blocks >= 0]
    at = blocks, window.heads.slot[0], seen % size
    return load_rows(arena, window.layout, at, width, dtype=np.float64), visible[:, seen]


def _entries_of(
    arena: NDArray[np.uint8],
    entries: Entries,
    index: IndexQueries | None,
    batch: AttentionBatch,
    sequence: int,
    positions: Positions,
    size: int,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The same of entries. index: of these queries"""
    kept, making = entries.made, entries.making
    every = np.arange((positions[-1] + 1) // making.rate)
    columns, places = columns_of(every, kept.layout)
    blocks = blocks_in(batch, sequence, kept, columns)
    every, at = every[blocks >= 0], (blocks[blocks >= 0], kept.heads.slot[0], places[blocks >= 0])
    own = kept.layout.own
    keys = load_rows(arena, own, at, size, making.begin, np.float64)
    visible = every < ((positions + 1) // making.rate)[:, None]
    if index is None:
        return keys, visible
    of_heads = np.maximum(np.einsum("tnd,kd->tnk", index.query.astype(np.float64), load_keys(arena, own, at)), 0)
    scores = np.einsum("tn,tnk->tk", index.weights.astype(np.float64), of_heads)
    return keys, best(scores, visible, index.top)
