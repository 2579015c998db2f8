"""Where a step samples, and what becomes of guesses: drafts are checked by sampling behind each of them at once.

A sequence with drafts has, in a step, its last known token and ``d`` guesses of what follows; where states are kept,
before these also what was guessed right in the step before, of which none was left. Behind each of the ``1 + d``
tokens one is sampled, as it would be without guesses: by its seed and position. As long as a draft is what
was sampled in front of it, what is sampled behind it is what would have come next, whatever drew it. The first one that
is not ends this; what stands behind it was computed in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.base import FOLLOWS, GUESSED
from headwise.runtime.protocol.batch import NO_DRAFTS, BatchRequest
from headwise.runtime.worker.last_sampled import NO_TOKEN


@dataclass(frozen=True)
class SampledRows:
    """The tokens of a step behind which one is sampled, ascending.

    sequences: int64 ``[m]``, by index into the batch
    behind:    int64 ``[m]``, drafts of the sequence that come behind the token in the step
    """

    sequences: NDArray[np.int64]
    behind: NDArray[np.int64]

    @classmethod
    def of(cls, batch: BatchRequest) -> SampledRows:
        if not len(batch.drafts):
            sequences = np.flatnonzero(batch.sample)
            return cls(sequences, np.zeros_like(sequences))
        counts = np.where(batch.sample, 1 + batch.drafts.astype(np.int64), 0)
        sequences = np.repeat(np.arange(len(counts)), counts)
        return cls(sequences, np.cumsum(counts)[sequences] - 1 - np.arange(len(sequences)))

    def places(self, batch: BatchRequest) -> NDArray[np.int64]:
        """Of the tokens among the step's, ``[m]``."""
        places: NDArray[np.int64] = np.cumsum(batch.query_lens, dtype=np.int64)[self.sequences] - 1 - self.behind
        return places

    def positions(self, batch: BatchRequest) -> NDArray[np.int64]:
        """Of the sampled tokens in their sequences, ``[m]``."""
        positions: NDArray[np.int64] = (batch.starts + batch.query_lens)[self.sequences] - self.behind
        return positions


@dataclass(frozen=True)
class Spread:
    """A step's sequences as they are computed: of one with drafts each token is a sequence of its own, which ends with
    it. So they are decodes like others, to the same bits; all write what they add to the cache before any attends.

    starts, query_lens, rows: as of `BatchRequest`
    follows, shared: see `AttentionBatch`
    places:  as of `BatchRequest`; None: tokens are where they are in their sequences
    """

    starts: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    rows: NDArray[np.int32]
    follows: NDArray[np.int32] | None = None
    places: NDArray[np.int32] | None = None
    shared: NDArray[np.int32] | None = None

    def turned(self, positions: NDArray[np.int32], axes: int) -> NDArray[np.int32]:
        """The step's tokens' positions in their sequences, as those that turn elements: ``[T]``, or ``[T, axes]``."""
        return turned(positions, axes) if self.places is None else self.places

    def positions(self, tokens: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of the step's ``tokens``, ``[T]``; and which of them each sequence begins with, ``[n + 1]``."""
        if len(self.rows) == tokens:
            return self.starts, np.arange(tokens + 1, dtype=np.int32)
        cu_seqlens = np.zeros(len(self.rows) + 1, dtype=np.int32)
        np.cumsum(self.query_lens, out=cu_seqlens[1:])
        offsets = np.repeat(self.starts - cu_seqlens[:-1], self.query_lens)
        return np.arange(len(offsets), dtype=np.int32) + offsets, cu_seqlens


def spread(batch: BatchRequest) -> Spread:
    """The sequences of a step."""
    places = batch.places if len(batch.places) else None
    shared = batch.shared if len(batch.shared) else None
    if not len(batch.drafts):
        return Spread(batch.starts, batch.query_lens, batch.rows, None, places, shared)
    counts = np.where(batch.drafts > 0, batch.query_lens, 1)
    index = np.repeat(np.arange(len(counts)), counts)
    is_one = batch.drafts[index] > 0
    within = np.arange(len(index), dtype=np.int32) - (np.cumsum(counts) - counts)[index].astype(np.int32)
    starts = batch.starts[index] + np.where(is_one, within, np.int32(0))
    query_lens = np.where(is_one, np.int32(1), batch.query_lens[index])
    is_guess = within >= (batch.query_lens - batch.drafts)[index]
    follows = np.where(within > 0, np.where(is_guess, GUESSED, FOLLOWS), 0).astype(np.int32)
    if shared is not None:  # drafts share what others of their sequence's group do
        begins = np.flatnonzero(shared == 0)
        of_group = np.repeat(np.maximum.reduceat(shared, begins), np.diff(begins, append=len(shared)))
        shared = np.where(within > 0, of_group[index], shared[index])
    return Spread(starts, query_lens, batch.rows[index], follows, places, shared)


def turned(positions: NDArray[np.int32], axes: int) -> NDArray[np.int32]:
    """Positions ``[T]`` as those that turn elements: of a model that gives a token one, they are; ``[T, axes]`` where
    it has several, which are alike in text."""
    return positions if axes == 1 else np.repeat(positions[:, None], axes, axis=1)


def of_sequences(
    batch: BatchRequest, wanted: NDArray[np.int64], sampled: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What ``sampled [m]`` says of the ``wanted`` sequences: see ``token_ids`` and ``accepted`` of a `StepResult`."""
    accepted = NO_DRAFTS
    if len(batch.drafts) and len(sampled):
        sampled, right = check_drafts(batch, SampledRows.of(batch), sampled)
        wanted, accepted = np.flatnonzero(batch.sample), np.zeros(len(batch.rows), np.int32)
        accepted[wanted] = right
    if len(sampled) == len(batch.rows):
        return sampled, accepted
    tokens = np.full(len(batch.rows), NO_TOKEN, np.int32)
    tokens[wanted] = sampled
    return tokens, accepted


def check_drafts(
    batch: BatchRequest, rows: SampledRows, sampled: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Which drafts are what was sampled, ``sampled [m]`` of ``rows``.

    Returns, of each sequence that samples, in order: the token that comes behind those drafts, and how many they are.
    """
    following = batch.token_ids[np.minimum(rows.places(batch) + 1, len(batch.token_ids) - 1)]
    is_last = (rows.behind == 0) | (following != sampled)  # of those that count
    first = np.flatnonzero(np.diff(rows.sequences, prepend=-1))
    last = np.minimum.reduceat(np.where(is_last, np.arange(len(sampled)), len(sampled)), first)
    has_more = last > first
    last[has_more & (sampled[last] == NO_TOKEN)] -= 1  # what was sampled is told; the next step finds the same
    return sampled[last], (last - first).astype(np.int32)
