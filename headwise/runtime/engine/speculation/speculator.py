"""Which sequences have drafts in a step, and how many: those that bring more tokens in less time, as measured."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from operator import itemgetter
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.costs import DraftCosts, HitRates, Trust
from headwise.runtime.engine.speculation.lookup import Echo

MOST_LOOKED_UP = 32
"""Sequences, the oldest ones, whose tokens are looked up: each takes some microseconds, and more if it is long. With
more sequences in a step, drafts bring less."""

MOST_LONGER = 2.0
"""Steps that drafts may make one longer where all sequences have some; else as much less as fewer have: who repeats a
text does not slow down others for it."""

WORTH_WAITING = 1.05
"""How much faster drafts must make decoding for the next step to wait for the tokens of the one before, by `GAP_S`."""

GAP_S = 0.5e-3
"""What an engine takes, about, from one step's tokens to the next step where that was not planned ahead."""


class Speculator:
    """Of one engine.

    most: drafts of a sequence in a step
    most_of_step: drafts of all of them
    computes_again: whether drafts that are right are computed once more in the next step

    drafted, accepted: drafts that steps have checked, and those that were right
    """

    def __init__(self, most: int, most_of_step: int, *, computes_again: bool = False) -> None:
        self.most, self._most_of_step, self._computes_again = most, most_of_step, computes_again
        self._rates, self._costs = HitRates(), DraftCosts()
        self._followed: WeakKeyDictionary[Sequence, tuple[Echo, Trust]] = WeakKeyDictionary()
        self.drafted = self.accepted = 0

    def chosen(self, decoding: SequenceOf[Sequence]) -> tuple[NDArray[np.int64], bool]:
        """How many drafts each of these sequences, which decode, is to have in the next step; and whether it is worth
        waiting for tokens that are not known yet.

        A draft is worth its time if it brings, by its chance, more tokens in that than the step does without it, and
        does not make others wait for longer than `MOST_LONGER` allows.
        """
        ratio, number = self._costs.ratio, len(decoding)
        counts, tokens, time, having = [0] * number, float(number), 1.0, 0
        if tokens * ratio < 1:  # else not even sure ones pay
            chances = [self._chances(sequence).tolist() for sequence in decoding[:MOST_LOOKED_UP]]
            drafts = [(chance, index) for index, each in enumerate(chances) for chance in each]
            drafts.sort(key=itemgetter(0), reverse=True)
            for chance, index in drafts[: self._most_of_step]:
                cost = ratio * (1 + chance) if self._computes_again else ratio
                if chance * time <= tokens * cost:
                    break
                with_it = having + (not counts[index])
                if (time - 1 + cost) * number > MOST_LONGER * with_it:
                    continue
                counts[index] += 1
                tokens, time, having = tokens + chance, time + cost, with_it
        step_s = self._costs.step_s or GAP_S
        is_worth_waiting = tokens * step_s >= number * (time * step_s * WORTH_WAITING + GAP_S) > 0
        return np.array(counts, np.int64), is_worth_waiting

    def _chances(self, sequence: Sequence) -> NDArray[np.float64]:
        """Of its next drafts."""
        if not sequence.may_have_drafts:
            return np.zeros(0)
        if sequence not in self._followed:
            self._followed[sequence] = Echo(sequence.max_length), Trust()
        echo, trust = self._followed[sequence]
        for length, is_right in echo.advance(sequence):
            trust.observe(self._rates.rate(length), is_right)
            self._rates.observe(length, is_right)
        room = sequence.max_length - sequence.num_tokens - 1
        return self._rates.chances(echo.length, min(self.most, room), trust.factor)

    def guesses(self, sequence: Sequence, count: int) -> NDArray[np.int32]:
        """The drafts of a sequence that was given so many."""
        echo, _ = self._followed[sequence]
        return echo.guesses(count)

    def took(self, drafts: int, compute_s: float) -> None:
        """A step that decodes, and nothing else, has taken so long with so many drafts, or tokens computed anew."""
        self._costs.observe(drafts, compute_s)

    def checked(self, drafts: int, accepted: int) -> None:
        """Of so many drafts, so many were right."""
        self.drafted += drafts
        self.accepted += accepted
