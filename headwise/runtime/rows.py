"""The sequences that run, as columns: what every step reads and writes of all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.sequence import Sequence

Index = NDArray[np.int32]
"""Rows, in the order that matters to whoever asks."""


class Rows:
    """Counters of each running sequence, at its row. Of a free row they mean nothing.

        | prompt | output, known | sampled in flight |
                                  <---- pending ---->|
        | scheduled into steps ..........| next step |
                                         ^ scheduled ^ length

    length:     tokens known or being sampled
    pending:    tokens that steps in flight will sample
    scheduled:  tokens whose KV is computed by steps done or in flight
    in_flight:  steps that hold the sequence and have not come back
    last_token: the last known token
    wanted:     whether its results are: the request has not ended
    """

    def __init__(self, max_rows: int) -> None:
        self._sequences: dict[int, Sequence] = {}
        self.length = np.zeros(max_rows, dtype=np.int64)
        self.pending = np.zeros(max_rows, dtype=np.int64)
        self.scheduled = np.zeros(max_rows, dtype=np.int64)
        self.in_flight = np.zeros(max_rows, dtype=np.int64)
        self.num_prompt = np.zeros(max_rows, dtype=np.int64)
        self.max_length = np.zeros(max_rows, dtype=np.int64)
        self.last_token = np.zeros(max_rows, dtype=np.int32)
        self.wanted = np.zeros(max_rows, dtype=np.bool_)
        self._free = list(range(max_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def of(self, rows: Index) -> list[Sequence]:
        """The sequences of open rows."""
        sequences = self._sequences
        return [sequences[row] for row in rows.tolist()]

    def open(self, sequence: Sequence, computed: int) -> int:
        """Give the sequence a row; its first ``computed`` tokens are in the cache."""
        row = sequence.row = self._free.pop()
        self._sequences[row] = sequence
        self.length[row] = sequence.num_tokens
        self.pending[row] = self.in_flight[row] = 0
        self.scheduled[row] = computed
        self.num_prompt[row] = sequence.num_prompt
        self.max_length[row] = sequence.max_length
        self.last_token[row] = sequence.tokens(sequence.num_tokens - 1, sequence.num_tokens)[0]
        self.wanted[row] = True
        return row

    def close(self, sequence: Sequence) -> None:
        del self._sequences[sequence.row]
        self._free.append(sequence.row)
        sequence.row = -1

    def to_schedule(self, rows: Index) -> NDArray[np.int64]:
        """Tokens of each row that no step has taken yet; none once steps in flight sample its last one."""
        length = self.length[rows]
        return np.where(length < self.max_length[rows], length - self.scheduled[rows], 0)

    def is_decoding(self, rows: Index) -> NDArray[np.bool_]:
        """Whether all that a row has left to schedule is the token sampled last."""
        length = self.length[rows]
        return (length - self.scheduled[rows] == 1) & (length > self.num_prompt[rows])
