"""Guesses of what comes next by what came before: where a sequence's end stands in it already, it may go on alike.

Source: "Prompt Lookup Decoding" (Saxena, 2023): the latest place at which the last tokens stood before; what followed
there is the guess. Here it is the place with the longest match, and of several the latest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.costs import Indices

LEAST_MATCH, MOST_MATCH = 2, 16
"""Tokens that a match has at least; and how many are told apart."""


class Echo:
    """A sequence's known tokens, at most ``max_length`` ever, and what its end repeats of them: a `Guesser`.

    A guess's kind is the length of the match that it came of: few tokens that were there before say little, many of
    them that a text is being repeated.

    length: of the match, in tokens, up to `MOST_MATCH`; 0: there is none
    """

    def __init__(self, max_length: int) -> None:
        self._tokens = np.empty(max_length, np.int32)
        self._count = 0
        self._at = 0  # what is guessed to come next, once there is a match
        self.length = 0

    def advance(self, sequence: Sequence) -> list[tuple[int, bool]]:
        """See `Guesser.advance`. What the tokens that are new repeat, is looked up."""
        told: list[tuple[int, bool]] = []
        start, end = self._count, sequence.num_tokens
        if start == end:
            return told
        self._tokens[start:end] = sequence.tokens(start, end)
        self._count = end
        for token in self._tokens[start:end].tolist() if self.length else ():
            is_right = token == int(self._tokens[self._at])
            told.append((self.length, is_right))
            if not is_right:
                self.length = 0
                break
            self._at, self.length = self._at + 1, min(self.length + 1, MOST_MATCH)
        if not self.length:
            self._at, self.length = longest_match(self._tokens[:end])
        return told

    def kinds(self, count: int) -> Indices:
        """See `Guesser.kinds`."""
        return np.minimum(self.length + np.arange(count if self.length else 0), MOST_MATCH)

    def guesses(self, count: int) -> NDArray[np.int32]:
        """See `Guesser.guesses`. What is behind the sequence's end begins anew then."""
        return np.resize(self._tokens[self._at : self._count], count)


def longest_match(tokens: NDArray[np.int32]) -> tuple[int, int]:
    """Behind which earlier place in ``tokens [n]`` stands what they end with, and how much of it, up to `MOST_MATCH`:
    the longest, and of several the latest. A length of 0: nowhere.
    """
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    length, found = 1, places[-1:]
    while len(places) and length < MOST_MATCH:
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[len(tokens) - 1 - length]]
        if len(places):
            length, found = length + 1, places[-1:]
    return (int(found[0]) + 1, length) if length >= LEAST_MATCH else (0, 0)
