"""Ranks that keep members together, each the tokens of its `TokenShare`: what attention over all of them needs.

Queries go to where the tokens are: each rank attends with the queries of all to its own tokens, and tells every other
what its heads saw there, a mean of values and the logarithm of the softmax's sum, by which means over some tokens each
become one over all. (Attention of split keys, as in FlashDecoding; vLLM calls it decode context parallelism.)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import Array, AttentionBatch, HostLengths


class TokenRanks(Protocol):
    """All ranks that keep a layer's members together call the same, with arrays of the same shapes and dtypes, in the
    same order. On a GPU calls only enqueue.

    share: this rank's
    """

    @property
    def share(self) -> TokenShare: ...

    def all_gather(self, x: Array) -> Array:
        """What each of them has, ``[parts, *x.shape]``, by part."""

    def exchange(self, x: Array) -> Array:
        """Of ``x [parts, ...]`` each part goes to its rank; ``[parts, ...]`` of what each had for this one."""


def own_rows(batch: AttentionBatch, share: TokenShare) -> tuple[NDArray[np.int64], AttentionBatch]:
    """Which query rows of a batch in host memory are tokens of a share, and a batch of these alone, each a sequence, at
    its place among the share's tokens."""
    _, positions = places_of_rows(batch)
    rows = np.flatnonzero(share.has(positions))
    return rows, rows_ending(batch, rows, (positions[rows] // share.parts + 1).astype(np.int32))


def rows_over_share(
    batch: AttentionBatch, share: TokenShare, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], AttentionBatch]:
    """Which of these query rows see tokens of a share, and a batch of those, each a sequence of what it sees of it."""
    _, positions = places_of_rows(batch)
    lengths = share.count(positions[rows] + 1)
    seeing = np.flatnonzero(lengths > 0)
    return seeing, rows_ending(batch, rows[seeing], lengths[seeing].astype(np.int32))


def rows_ending(batch: AttentionBatch, rows: NDArray[np.int64], lengths: NDArray[np.int32]) -> AttentionBatch:
    """Each of these query rows, ascending, of a batch in host memory as a sequence of so many tokens."""
    sequences, _ = places_of_rows(batch)
    of_rows = sequences[rows]
    tables = batch.block_tables.reshape(-1, batch.groups, batch.block_tables.shape[1])[of_rows]
    follows = np.zeros(len(rows), np.int32)
    follows[1:] = (of_rows[1:] == of_rows[:-1]) & (lengths[1:] == lengths[:-1] + 1)
    return AttentionBatch(
        cu_seqlens_q=np.arange(len(rows) + 1, dtype=np.int32),
        seq_lens=np.ascontiguousarray(lengths, np.int32),
        block_tables=np.ascontiguousarray(tables.reshape(-1, tables.shape[2])),
        groups=batch.groups,
        max_query_len=1,
        follows=follows if follows.any() else None,
    )


def merged(
    means: NDArray[np.float32], sums: NDArray[np.float32], sink_logits: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """The mean over all parts, ``[rows, heads, size]``, of ``means [parts, rows, heads, size]`` over each and the
    logarithms, to base 2, of their softmaxes' ``sums [parts, rows, heads]``; 0 where no part has seen anything.

    sink_logits: ``[heads]``, of one more key whose value is 0
    """
    sinks = None if sink_logits is None else sink_logits * np.float32(1 / np.log(2))
    highest = sums.max(axis=0) if sinks is None else np.maximum(sums.max(axis=0), sinks)
    highest = np.where(np.isfinite(highest), highest, np.float32(0))
    weights = np.exp2(sums - highest)
    total = weights.sum(axis=0) + (0 if sinks is None else np.exp2(sinks - highest))
    weights /= np.where(total > 0, total, 1)
    result: NDArray[np.float32] = np.einsum("prh,prhs->rhs", weights, means)
    return result


def places_of_rows(batch: AttentionBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each query row its sequence and its position."""
    known = batch.on_host or HostLengths(batch.cu_seqlens_q, batch.seq_lens)
    counts = np.diff(known.cu_seqlens_q)
    sequences = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(sequences)) + np.repeat(known.seq_lens - known.cu_seqlens_q[1:], counts)
    return sequences, positions
