"""Which sequences have drafts in a step, and how many: those that bring more tokens in less time, as measured."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.costs import DraftCosts, HitRates
from headwise.runtime.engine.speculation.lookup import Echo

MOST_LOOKED_UP = 32
"""Sequences, the oldest ones, whose tokens are looked up: each takes some microseconds, and more if it is long. With
more sequences in a step, drafts bring less."""

WORTH_WAITING = 1.15
"""How much faster drafts must make decoding for the next step to wait for the tokens of the one before."""


class Speculator:
    """Of one engine.

    most: drafts of a sequence in a step
    most_of_step: drafts of all of them

    drafted, accepted: drafts that steps have checked, and those that were right
    """

    def __init__(self, most: int, most_of_step: int) -> None:
        self._most, self._most_of_step = most, most_of_step
        self._rates, self._costs = HitRates(), DraftCosts()
        self._echoes: WeakKeyDictionary[Sequence, Echo] = WeakKeyDictionary()
        self.drafted = self.accepted = 0

    def chosen(self, decoding: SequenceOf[Sequence]) -> tuple[NDArray[np.int64], float]:
        """How many drafts each of these sequences, which decode, is to have in the next step, and how much faster all
        decode by that.

        A draft is worth its time if it brings, by its chance, more tokens in that than the step does without it.
        """
        counts, ratio = np.zeros(len(decoding), np.int64), self._costs.ratio
        tokens, time = float(len(decoding)), 1.0
        if tokens * ratio >= 1:  # not even sure ones pay
            return counts, 1.0
        chances = [self._chances(sequence) for sequence in decoding[:MOST_LOOKED_UP]]
        of = np.repeat(np.arange(len(chances)), [len(each) for each in chances])
        every = np.concatenate(chances) if chances else np.zeros(0)
        for place in np.argsort(-every, kind="stable")[: self._most_of_step].tolist():
            if every[place] * time <= tokens * ratio:
                break
            tokens, time = tokens + float(every[place]), time + ratio
            counts[of[place]] += 1
        return counts, tokens / time / max(1, len(decoding))

    def _chances(self, sequence: Sequence) -> NDArray[np.float64]:
        """Of its next drafts."""
        if not sequence.may_have_drafts:
            return np.zeros(0)
        echo = self._echoes.get(sequence)
        if echo is None:
            echo = self._echoes[sequence] = Echo(sequence.max_length)
        for length, is_right in echo.advance(sequence):
            self._rates.observe(length, is_right)
        room = sequence.max_length - sequence.num_tokens - 1
        return self._rates.chances(echo.length, min(self._most, room))

    def guesses(self, sequence: Sequence, count: int) -> NDArray[np.int32]:
        """The drafts of a sequence that was given so many."""
        return self._echoes[sequence].guesses(count)

    def took(self, drafts: int, compute_s: float) -> None:
        """A step that decodes, and nothing else, has taken so long with so many drafts."""
        self._costs.observe(drafts, compute_s)

    def checked(self, drafts: int, accepted: int) -> None:
        """Of so many drafts, so many were right."""
        self.drafted += drafts
        self.accepted += accepted
