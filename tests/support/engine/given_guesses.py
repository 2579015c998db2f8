"""Guesses that are mostly right, for models that repeat nothing."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.speculator import Speculator

WRONG = 5
"""Of guesses one in so many."""


class GivenGuesses(Speculator):
    """Of requests whose answers are known, by their names; how many there are changes from step to step."""

    def __init__(self, answers: Mapping[str, SequenceOf[int]], most: int) -> None:
        super().__init__(most, most_of_step=1 << 30)
        self._answers, self._draw = answers, np.random.default_rng(0)

    def chosen(
        self, decoding: SequenceOf[Sequence], known: SequenceOf[bool] | None = None
    ) -> tuple[NDArray[np.int64], bool]:
        """See `Speculator.chosen`; all are worth waiting for."""
        rooms = [sequence.max_length - sequence.num_tokens - 1 for sequence in decoding]
        counts = np.minimum(self._draw.integers(0, self.most + 1, len(decoding)), rooms)
        return np.maximum(counts, 0).astype(np.int64), True

    def guesses(self, sequence: Sequence, count: int) -> NDArray[np.int32]:
        """See `Speculator.guesses`."""
        said = len(sequence.output)
        guesses = np.array(self._answers[sequence.id][said : said + count], np.int32)
        wrong = np.arange(said, said + count) % WRONG == WRONG - 1
        guesses[wrong] += np.where(guesses[wrong] > 0, -1, 1)
        return guesses
