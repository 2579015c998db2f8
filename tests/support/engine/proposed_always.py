"""Models that are always asked to draft, whatever it costs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray
from support.engine.given_guesses import GivenGuesses

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.speculator import Speculator


class ProposedAlways(Speculator):
    """So many tokens of each sequence, in each step."""

    def __init__(self, count: int, most_of_step: int) -> None:
        super().__init__(max(count, 1), most_of_step, by_model=True)
        self._count = count

    def proposals(self, sampled: SequenceOf[Sequence]) -> NDArray[np.int64]:
        """See `Speculator.proposals`."""
        return np.full(len(sampled), self._count, np.int64)


class ProposedBehindGuesses(GivenGuesses):
    """The same behind steps that have drafts, which are mostly right: those of `GivenGuesses`."""

    def __init__(self, answers: Mapping[str, SequenceOf[int]], most: int) -> None:
        super().__init__(answers, most)
        self.by_model = True

    def proposals(self, sampled: SequenceOf[Sequence]) -> NDArray[np.int64]:
        """See `Speculator.proposals`."""
        return np.full(len(sampled), self.most, np.int64)
