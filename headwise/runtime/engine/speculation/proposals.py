"""Guesses of what comes next by the model itself, by the layer that it has for that: the workers make them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.costs import Indices

NONE: NDArray[np.int32] = np.empty(0, np.int32)


class Proposals:
    """What the model has proposed for one sequence: a `Guesser`. A guess's kind is how many were proposed before it."""

    def __init__(self) -> None:
        self._tokens = NONE
        self._at = 0  # the sequence's length that the first one comes behind
        self._seen = 0  # of the sequence

    def propose(self, tokens: NDArray[np.int32], length: int) -> None:
        """``tokens`` may come next, behind so many of the sequence, all of which `advance` has seen."""
        self._tokens, self._at = tokens, length

    def advance(self, sequence: Sequence) -> list[tuple[int, bool]]:
        """See `Guesser.advance`."""
        start = max(self._seen, self._at)
        end = self._seen = sequence.num_tokens
        told: list[tuple[int, bool]] = []
        guessed = self._tokens[start - self._at :][: max(end - start, 0)]
        if not len(guessed):
            return told
        found = sequence.tokens(start, start + len(guessed))
        for kind, is_right in enumerate((guessed == found).tolist(), start - self._at):
            told.append((kind, is_right))
            if not is_right:
                self._tokens = NONE
                break
        return told

    def kinds(self, count: int) -> Indices:
        """See `Guesser.kinds`."""
        return np.arange(len(self._tokens))[self._seen - self._at :][:count]

    def guesses(self, count: int) -> NDArray[np.int32]:
        """See `Guesser.guesses`."""
        return self._tokens[self._seen - self._at :][:count]
