"""Which sequences have drafts in a step, and how many: those that bring more tokens in less time, as measured."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.base import Guesser
from headwise.runtime.engine.speculation.costs import DraftCosts, HitRates, Trust
from headwise.runtime.engine.speculation.lookup import MOST_MATCH, Echo
from headwise.runtime.engine.speculation.proposals import Proposals

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


TRIED = 32
"""Steps that nothing is proposed in, as it would not pay, before something is: else nobody would know when it does."""


PAUSED = 32
"""Steps that something is proposed in until in one nothing is: by these it is known what it costs."""

_Kind = TypeVar("_Kind", bound=Guesser)


@dataclass
class _Source(Generic[_Kind]):
    """Guesses of one sequence from somewhere, and how often they are right: of all sequences, and of this one."""

    guesser: _Kind
    rates: HitRates
    trust: Trust = field(default_factory=Trust)

    def advance(self, sequence: Sequence) -> None:
        for kind, is_right in self.guesser.advance(sequence):
            self.trust.observe(self.rates.rate(kind), is_right)
            self.rates.observe(kind, is_right)

    def chances(self, count: int) -> NDArray[np.float64]:
        """That its next guesses, ``count`` at most, are right."""
        return self.rates.chances(self.guesser.kinds(count), self.trust.factor)


@dataclass
class _Followed:
    """One sequence. proposals: by the model, if it makes any; chosen: of the drafts that were promised last"""

    echo: _Source[Echo]
    proposals: _Source[Proposals] | None
    chosen: Guesser


@dataclass(frozen=True)
class _Offer:
    """Drafts that a sequence may have. chances: that the first 1, 2, ... are all right"""

    chances: NDArray[np.float64]
    is_by_model: bool = False


NO_OFFER = _Offer(np.zeros(0))


class Speculator:
    """Of one engine.

    most: drafts of a sequence in a step
    most_of_step: drafts of all of them
    computes_again: whether drafts that are right are computed once more in the next step
    by_model: whether the model proposes some, too: see `proposals`

    drafted, accepted: drafts that steps have checked, and those that were right
    """

    def __init__(self, most: int, most_of_step: int, *, computes_again: bool = False, by_model: bool = False) -> None:
        self.most, self._most_of_step, self._computes_again = most, most_of_step, computes_again
        self.by_model = by_model
        self._rates, self._proposed, self._costs = HitRates(MOST_MATCH + 1), HitRates(most), DraftCosts()
        self._followed: WeakKeyDictionary[Sequence, _Followed] = WeakKeyDictionary()
        self._not_tried = self._proposing = 0
        self.drafted = self.accepted = 0

    def chosen(
        self, decoding: SequenceOf[Sequence], known: SequenceOf[bool] | None = None
    ) -> tuple[NDArray[np.int64], bool]:
        """How many drafts each of these sequences, which decode, is to have in the next step; and whether it is worth
        waiting for tokens that are not known yet. ``known``: whose are; None: all sequences'.

        A draft is worth its time if it brings, by its chance, more tokens in that than the step does without it, and
        does not make others wait for longer than `MOST_LONGER` allows.
        """
        known = [True] * len(decoding) if known is None else known
        looked_up = zip(decoding[:MOST_LOOKED_UP], known, strict=False) if self._may_pay(len(decoding)) else ()
        return self._shared_out([self._offer(sequence, is_known) for sequence, is_known in looked_up], len(decoding))

    def proposals(self, sampled: SequenceOf[Sequence]) -> NDArray[np.int64]:
        """How many tokens the model is to propose behind the one that the step being planned samples of each of these
        sequences: as many as would be worth it as drafts in the next step."""
        none = np.zeros(len(sampled), np.int64)
        if not self.by_model or not sampled:
            return none
        if self._may_pay(len(sampled)):
            expected = [self._expected(sequence) for sequence in sampled[:MOST_LOOKED_UP]]
            counts, is_worth_it = self._shared_out(expected, len(sampled))
            if is_worth_it or not self._costs.step_s:
                self._proposing += 1
                return none if self._proposing % PAUSED == 0 else counts
        self._not_tried += 1
        may = next((index for index, sequence in enumerate(sampled) if sequence.may_have_drafts), None)
        if may is not None and self._not_tried % TRIED == 0:
            none[may] = self.most
        return none

    def _may_pay(self, number: int) -> bool:
        """Whether drafts of so many sequences may be worth their time: else not even sure ones are."""
        return number * self._costs.ratio < 1

    def _shared_out(self, offers: SequenceOf[_Offer], number: int) -> tuple[NDArray[np.int64], bool]:
        """See `chosen`: of ``number`` sequences, of which the first have these drafts."""
        by_model = sum(offer.is_by_model for offer in offers)
        counts, tokens, time, having = [0] * number, float(number), 1.0, 0
        drafts = [(chance, index) for index, offer in enumerate(offers) for chance in offer.chances.tolist()]
        drafts.sort(key=itemgetter(0), reverse=True)
        for chance, index in drafts[: self._most_of_step]:
            cost = self._costs.ratio * (1 + chance) if self._computes_again else self._costs.ratio
            if offers[index].is_by_model:  # all that the model drafts for have a pass together
                cost += self._costs.pass_ratio / by_model
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

    def _offer(self, sequence: Sequence, is_known: bool) -> _Offer:
        """A sequence's next drafts: those looked up, or those that the model has proposed, or will have once its next
        token is known."""
        if not sequence.may_have_drafts:
            return NO_OFFER
        followed = self._follow(sequence)
        count = max(min(self.most, sequence.max_length - sequence.num_tokens - 1), 0)
        found, followed.chosen = followed.echo.chances(count), followed.echo.guesser
        source = followed.proposals
        if source is None:
            return _Offer(found)
        proposed = source.chances(count) if is_known else self._of_proposals(source, count)
        if proposed.sum() <= found.sum():
            return _Offer(found)
        followed.chosen = source.guesser
        return _Offer(proposed, is_by_model=True)

    def _expected(self, sequence: Sequence) -> _Offer:
        """What the model would propose; nothing where more is expected of what is looked up."""
        if not sequence.may_have_drafts:
            return NO_OFFER
        followed = self._follow(sequence)
        assert followed.proposals is not None, "asked where the model proposes"
        count = max(min(self.most, sequence.max_length - sequence.num_tokens - 2), 0)
        proposed = self._of_proposals(followed.proposals, count)
        is_more = proposed.sum() > followed.echo.chances(count).sum()
        return _Offer(proposed, is_by_model=True) if is_more else NO_OFFER

    def _of_proposals(self, source: _Source[Proposals], count: int) -> NDArray[np.float64]:
        """Of the first ``count`` that are still to be made."""
        return self._proposed.chances(np.arange(count), source.trust.factor)

    def _follow(self, sequence: Sequence) -> _Followed:
        """What is known of a sequence, by its tokens so far."""
        followed = self._followed.get(sequence)
        if followed is None:
            echo = _Source(Echo(sequence.max_length), self._rates)
            proposals = _Source(Proposals(), self._proposed) if self.by_model else None
            followed = self._followed[sequence] = _Followed(echo, proposals, echo.guesser)
        followed.echo.advance(sequence)
        if followed.proposals is not None:
            followed.proposals.advance(sequence)
        return followed

    def proposed(self, sequence: Sequence, tokens: NDArray[np.int32]) -> None:
        """The model has proposed these behind the sequence's known tokens."""
        source = self._follow(sequence).proposals
        if source is not None:
            source.guesser.propose(tokens, sequence.num_tokens)

    def guesses(self, sequence: Sequence, count: int) -> NDArray[np.int32]:
        """The drafts of a sequence that was given so many."""
        return self._followed[sequence].chosen.guesses(count)

    def took(self, drafts: int, compute_s: float, passes: int = 0) -> None:
        """A step that decodes, and nothing else, has taken so long with so many drafts, or tokens computed anew, and
        passes in which the model has proposed some."""
        self._costs.observe(drafts, compute_s, passes)

    def checked(self, drafts: int, accepted: int) -> None:
        """Of so many drafts, so many were right."""
        self.drafted += drafts
        self.accepted += accepted
