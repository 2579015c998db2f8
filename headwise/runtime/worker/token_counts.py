"""How often tokens are in a sequence's output, kept as they are sampled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int32]


class TokenCounts:
    """The distinct tokens of a prompt and an output, with their counts in the output alone.

    prompt: ``[p]``, distinct
    output: ``[m]``
    """

    def __init__(self, prompt: Index, output: Index) -> None:
        distinct, counts = np.unique(np.concatenate([prompt, output]), return_counts=True)
        counts = counts - np.isin(distinct, prompt)
        self._size = len(distinct)
        self._tokens = np.zeros(self._size + 64, np.int32)
        self._counts = np.zeros(self._size + 64, np.int32)
        self._tokens[: self._size], self._counts[: self._size] = distinct, counts
        self._places = dict(zip(distinct.tolist(), range(self._size), strict=True))

    def add(self, token: int) -> None:
        """A token was sampled."""
        place = self._places.setdefault(token, self._size)
        if place == self._size:
            self._grow()
            self._tokens[place] = token
            self._size += 1
        self._counts[place] += 1

    def _grow(self) -> None:
        if self._size == len(self._tokens):
            more = np.zeros(self._size, np.int32)
            self._tokens, self._counts = np.concatenate([self._tokens, more]), np.concatenate([self._counts, more])

    @property
    def columns(self) -> tuple[Index, Index]:
        """``[k]`` tokens and ``[k]`` counts, valid until the next `add`."""
        return self._tokens[: self._size], self._counts[: self._size]
