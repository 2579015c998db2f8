"""What is done to a batch's logits before tokens are chosen from them, as columns: for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int32]

BITS = 32
"""Tokens to a word of a mask: token ``t`` is bit ``t % 32`` of word ``t // 32``."""


@dataclass(frozen=True)
class Ragged:
    """Values of each row, one row's behind the other's: those of row ``i`` are ``[begins[i], begins[i + 1])``.

    begins: ``[n + 1]``
    tokens: ``[k]``, which a row names once at most
    values: ``[k]``
    """

    begins: Index
    tokens: Index
    values: NDArray[Any]

    @classmethod
    def of(cls, rows: Sequence[tuple[Index, NDArray[Any]]], dtype: Any) -> Ragged:
        """Out of each row's tokens and values."""
        begins = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(tokens) for tokens, _ in rows], out=begins[1:])
        tokens = np.concatenate([tokens for tokens, _ in rows]).astype(np.int32, copy=False)
        return cls(begins, tokens, np.concatenate([values for _, values in rows]).astype(dtype, copy=False))

    @property
    def rows(self) -> Index:
        """``[k]``, whose each value is."""
        return np.repeat(np.arange(len(self.begins) - 1, dtype=np.int32), np.diff(self.begins))


@dataclass(frozen=True)
class LogitEdits:
    """In this order, for ``n`` rows of logits.

    mask_of:   int32 ``[n]``, the index of a row's mask, -1: it has none
    masks:     uint32 ``[m, ceil(vocab / 32)]``; tokens whose bit is 0 get -inf
    biases:    float32, are added; -inf forbids a token
    seen:      int32, how often each token is in the row's output: 0 for one that is in its prompt only
    penalties: float32 ``[n, 3]``: for repetition (1: none), frequency and presence (0: none), of the tokens ``seen``
    """

    mask_of: Index
    masks: NDArray[np.uint32]
    biases: Ragged
    seen: Ragged
    penalties: NDArray[np.float32]

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Edit ``logits [n, vocab]`` in place."""
        for row in np.flatnonzero(self.mask_of >= 0).tolist():
            bits = np.unpackbits(self.masks[self.mask_of[row]].view(np.uint8), bitorder="little")
            allowed = bits[: logits.shape[1]].view(np.bool_)
            logits[row] = np.where(allowed, logits[row], np.float32(-np.inf))
        rows, tokens = self.biases.rows, self.biases.tokens
        logits[rows, tokens] += self.biases.values
        rows, tokens = self.seen.rows, self.seen.tokens
        repetition, frequency, presence = self.penalties[rows].T
        edited, counts = logits[rows, tokens], self.seen.values
        edited = np.where(edited > 0, edited / repetition, edited * repetition)
        logits[rows, tokens] = edited - frequency * counts.astype(np.float32) - presence * (counts > 0)
