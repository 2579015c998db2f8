"""The contract of what guesses a sequence's next tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.costs import Indices


class Guesser(Protocol):
    """Of one sequence. Its guesses are of kinds, by which they are right more or less often: see `HitRates`."""

    def advance(self, sequence: Sequence) -> list[tuple[int, bool]]:
        """Take in the tokens that are new.

        Returns, of each token that was guessed, of which kind the guess was, and whether it was right.
        """

    def kinds(self, count: int) -> Indices:
        """Of the next guesses, of which there are ``count`` at most, and may be none."""

    def guesses(self, count: int) -> NDArray[np.int32]:
        """The next ``count`` tokens, of so many as `kinds` told at least."""
