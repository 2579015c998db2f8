"""What drafts cost and bring, as measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

REMEMBERED = 256
"""Guesses of a kind, of which those before count half."""

RATE = 0.2
"""By how much of what was not expected an estimate of a step's time changes."""

KEPT = 0.9
"""What earlier guesses of a sequence count, of the next one."""

MOST_SURE = 0.99
"""Of any guess: else one that was never wrong would be taken for free."""

FIRST_RATIO, FIRST_PASS_RATIO = 0.15, 0.1
"""What a draft is taken to cost of a step, and a pass in which the model proposes one, before any was measured."""


class HitRates:
    """How often a guess is right where those before it were, by its kind: a number below ``kinds``."""

    def __init__(self, kinds: int) -> None:
        self._right = np.ones(kinds)
        self._all = np.full(kinds, 2.0)

    def observe(self, kind: int, is_right: bool) -> None:
        if self._all[kind] > 2 * REMEMBERED:
            self._all[kind] /= 2
            self._right[kind] /= 2
        self._all[kind] += 1
        self._right[kind] += is_right

    def rate(self, kind: int) -> float:
        """Of guesses of this kind, the share that is right."""
        return float(self._right[kind] / self._all[kind])

    def chances(self, kinds: Indices, trust: float = 1.0) -> NDArray[np.float64]:
        """That the first 1, 2, ... of guesses of these ``kinds``, one behind the other, are all right, where ``trust``
        times as many are as elsewhere."""
        rates = np.minimum(trust * self._right[kinds] / self._all[kinds], MOST_SURE)
        chances: NDArray[np.float64] = np.cumprod(rates)
        return chances


class Trust:
    """How often guesses of one sequence are right, over what `HitRates` expects: one text repeats itself, another does
    not."""

    def __init__(self) -> None:
        self._right = self._expected = 0.0

    def observe(self, rate: float, is_right: bool) -> None:
        """rate: what was expected"""
        self._right = KEPT * self._right + is_right
        self._expected = KEPT * self._expected + rate

    @property
    def factor(self) -> float:
        """See `HitRates.chances`."""
        return (self._right + 1) / (self._expected + 1)


class DraftCosts:
    """Seconds of a step that decodes, of each draft in it, and of each pass in which the model proposes drafts of the
    next step: all follow what is measured by the normalised method of least mean squares (Widrow, Hoff, 1960), for what
    is decoded changes all the time."""

    def __init__(self) -> None:
        self._step_s = self._draft_s = self._pass_s = 0.0

    @property
    def step_s(self) -> float:
        """0: not known yet."""
        return self._step_s

    @property
    def ratio(self) -> float:
        """What a draft costs, in steps."""
        return self._draft_s / self._step_s if self._step_s else FIRST_RATIO

    @property
    def pass_ratio(self) -> float:
        """What a pass costs, likewise."""
        return self._pass_s / self._step_s if self._step_s else FIRST_PASS_RATIO

    def observe(self, drafts: int, compute_s: float, passes: int = 0) -> None:
        """A step that decodes has taken so long, with so many drafts, and the model has proposed in so many passes."""
        if not self._step_s:
            self._step_s = compute_s / (1 + FIRST_RATIO * drafts + FIRST_PASS_RATIO * passes)
            self._draft_s, self._pass_s = FIRST_RATIO * self._step_s, FIRST_PASS_RATIO * self._step_s
        unexpected = compute_s - self._step_s - drafts * self._draft_s - passes * self._pass_s
        # One step that was held up says nothing of the others.
        change = RATE * min(unexpected, self._step_s) / (1 + drafts * drafts + passes * passes)
        self._step_s = max(self._step_s + change, compute_s * 1e-3)
        self._draft_s = max(self._draft_s + drafts * change, 0.0)
        self._pass_s = max(self._pass_s + passes * change, 0.0)
