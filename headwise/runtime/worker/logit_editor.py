"""Knows which rows of a worker have their logits edited, and by what: nothing is done for the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.protocol.batch import KnownTokens, NewSequence
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker.guides import Guide, Guides
from headwise.runtime.worker.logit_edits import BITS, LogitEdits, Ragged
from headwise.runtime.worker.token_counts import TokenCounts

Columns = tuple[NDArray[np.int32], NDArray[np.float32]]
Penalties = tuple[float, float, float]

NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
NO_BIASES: Columns = NO_TOKENS, np.empty(0, np.float32)
NO_PENALTIES: Penalties = 1.0, 0.0, 0.0


class LogitEditor:
    """The rank's that samples. Tokens count as soon as they are sampled: the engine need not know them yet.

    vocab:  tokens of the model's vocabulary
    guides: of sequences whose output must have some form
    """

    def __init__(self, vocab: int, guides: Guides) -> None:
        self._words = -(-vocab // BITS)
        self._guides = guides
        self._rows: dict[int, _EditedRow] = {}

    def open(self, sequences: Iterable[NewSequence]) -> None:
        """These sequences have got their rows."""
        for new in sequences:
            self._rows.pop(new.row, None)
            if new.known is not None:
                self._rows[new.row] = _EditedRow(new.sampling, new.known, self._guides)

    def edits_any(self, rows: NDArray[np.int32]) -> bool:
        """Whether one of these rows has its logits edited."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows.tolist())

    def edits(self, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> LogitEdits | None:
        """What to do to the logits of these rows, whose next tokens are at ``positions``; None: nothing."""
        if not self.edits_any(rows):
            return None
        edited = [self._rows.get(row) for row in rows.tolist()]
        at = list(zip(edited, positions.tolist(), strict=True))
        masks = [None if row is None else row.mask(position, self._words) for row, position in at]
        is_masked = np.array([mask is not None for mask in masks])
        return LogitEdits(
            np.where(is_masked, np.cumsum(is_masked) - 1, -1).astype(np.int32),
            np.array([mask for mask in masks if mask is not None], np.uint32).reshape(-1, self._words),
            Ragged.of([NO_BIASES if row is None else row.biases(position) for row, position in at], np.float32),
            Ragged.of([(NO_TOKENS, NO_TOKENS) if row is None else row.seen for row in edited], np.int32),
            np.array([NO_PENALTIES if row is None else row.penalties for row in edited], np.float32),
        )

    def sampled(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """These rows have got their next tokens; a negative one is none."""
        guided: list[tuple[Guide, list[int]]] = []
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            edited = self._rows.get(row)
            if edited is None or token < 0:
                continue
            if edited.counts is not None:
                edited.counts.add(token)
            if edited.guide is not None:
                guided.append((edited.guide, [token]))
        if guided:
            self._guides.sampled(guided)

    def failure(self, row: int) -> str | None:
        """Why a row's next token cannot be chosen, if it is not for its logits."""
        edited = self._rows.get(row)
        return None if edited is None or edited.guide is None else edited.guide.failure


@dataclass(frozen=True)
class _Biases:
    """Of one sequence, before and after its end tokens are allowed."""

    early: Columns
    late: Columns


class _EditedRow:
    """One sequence's."""

    def __init__(self, params: SamplingParams, known: KnownTokens, guides: Guides) -> None:
        self.guide = None if params.guided is None else guides.open(params.guided, known.output.tolist())
        self._ends, self._ends_from = known.ends, known.ends_from
        self._biases = _biases(params, known.ends.tolist() if self.guide is None else ())
        self.counts = TokenCounts(known.prompt, known.output) if params.has_penalties else None
        self.penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty

    def biases(self, position: int) -> Columns:
        return self._biases.early if position < self._ends_from else self._biases.late

    def mask(self, position: int, words: int) -> NDArray[np.uint32] | None:
        """Of the next token; waits for it. Where its form allows nothing but the end, the output ends early."""
        if self.guide is None:
            return None
        mask = self.guide.mask()
        if mask is None:
            return np.zeros(words, np.uint32)
        if position < self._ends_from and len(self._ends):
            without = mask.copy()
            np.bitwise_and.at(without, self._ends // BITS, ~(np.uint32(1) << (self._ends % BITS).astype(np.uint32)))
            return without if without.any() else mask
        return mask

    @property
    def seen(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return (NO_TOKENS, NO_TOKENS) if self.counts is None else self.counts.columns


def _biases(params: SamplingParams, ends: Iterable[int]) -> _Biases:
    return _Biases(_columns(params.logit_bias | dict.fromkeys(ends, -np.inf)), _columns(params.logit_bias))


def _columns(biases: dict[int, float]) -> Columns:
    return np.array(list(biases), np.int32), np.array(list(biases.values()), np.float32)
