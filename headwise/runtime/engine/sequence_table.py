"""The sequences that run, as columns: what every step reads and writes of all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.grids import Grids
from headwise.runtime.engine.sequence import Sequence

Index = NDArray[np.int32]
"""Rows, in the order that matters to whoever asks."""

NO_GRID = 1 << 62
"""A place that no token has."""


class SequenceTable:
    """Counters of each running sequence, at its row. Of a free row they mean nothing.

        | prompt | output, known | sampled in flight |
                                  <---- pending ---->|
        | scheduled into steps ..........| next step |
                                         ^ scheduled ^ length

    length:     tokens known or being sampled
    pending:    tokens that steps in flight will sample
    scheduled:  tokens whose KV is computed by steps done or in flight, drafts included
    offered:    drafts that the row may have in the step being planned
    drafted:    and those that it has in a step in flight: what comes next is not known until that is back
    last_step:  the latest step that holds the sequence
    last_token: the last known token
    chunk:      most tokens of it in a step, and no fewer than of an item that a step computes whole
    wanted:     whether its results are: the request has not ended
    embeds_end: behind the last token whose embedding came with the request; 0: none did
    grids_begin, grids_end: the first token of an item on a grid, and behind the last one; `NO_GRID`, 0: there is none
    grids_saved: positions that a token behind all of these has less than tokens are before it
    items_end:  behind the last item that steps compute whole; 0: there is none

    lag: tokens, at most, that were guessed right and are computed once more
    takes_known: see `PipelineShares`
    whole_items: whether steps compute items whole: see `whole_items`
    """

    def __init__(self, max_rows: int, lag: int = 0, takes_known: bool = False, whole_items: bool = False) -> None:
        self.lag, self._takes_known, self._whole_items = lag, takes_known, whole_items
        self._sequences: dict[int, Sequence] = {}
        self._grids: dict[int, Grids] = {}  # of rows that have some
        self.length = np.zeros(max_rows, dtype=np.int64)
        self.pending = np.zeros(max_rows, dtype=np.int64)
        self.scheduled = np.zeros(max_rows, dtype=np.int64)
        self.offered = np.zeros(max_rows, dtype=np.int64)
        self.drafted = np.zeros(max_rows, dtype=np.int64)
        self.last_step = np.zeros(max_rows, dtype=np.int64)
        self.num_prompt = np.zeros(max_rows, dtype=np.int64)
        self.max_length = np.zeros(max_rows, dtype=np.int64)
        self.chunk = np.zeros(max_rows, dtype=np.int64)
        self.embeds_end = np.zeros(max_rows, dtype=np.int64)
        self.grids_begin = np.full(max_rows, NO_GRID, dtype=np.int64)
        self.grids_end = np.zeros(max_rows, dtype=np.int64)
        self.grids_saved = np.zeros(max_rows, dtype=np.int64)
        self.items_end = np.zeros(max_rows, dtype=np.int64)
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

    def grids_of(self, rows: Index) -> list[Grids]:
        """Of open rows, each of which has items on a grid."""
        return [self._grids[row] for row in rows.tolist()]

    def open(self, sequence: Sequence, computed: int, chunk: int) -> int:
        """Give the sequence a row; its first ``computed`` tokens are in the cache."""
        row = sequence.row = self._free.pop()
        self._sequences[row] = sequence
        self.length[row] = sequence.num_tokens
        self.pending[row] = self.last_step[row] = self.offered[row] = self.drafted[row] = 0
        self.scheduled[row] = computed
        self.num_prompt[row] = sequence.num_prompt
        self.max_length[row] = sequence.max_length
        whole = sequence.request.extra_keys if self._whole_items else ()
        self.chunk[row] = max([chunk, *(each.end - each.start for each in whole)])
        self.items_end[row] = max((each.end for each in whole), default=0)
        self.embeds_end[row] = max((each.end for each in sequence.request.embeds), default=0)
        grids = Grids(sequence.request.extra_keys)
        if grids.end:
            self._grids[row] = grids
        self.grids_begin[row] = grids.begin if grids.end else NO_GRID
        self.grids_end[row], self.grids_saved[row] = grids.end, grids.saved
        self.last_token[row] = sequence.tokens(sequence.num_tokens - 1, sequence.num_tokens)[0]
        self.wanted[row] = True
        return row

    def close(self, sequence: Sequence) -> None:
        del self._sequences[sequence.row]
        self._grids.pop(sequence.row, None)
        self._free.append(sequence.row)
        sequence.row = -1

    def is_one(self, rows: Index, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of so many next tokens of each row, whether these are one behind all of its prompt, and drafts."""
        starts, prompt = self.scheduled[rows], self.num_prompt[rows] - 1
        return (counts <= 1 + self.offered[rows]) & (starts >= prompt) & (starts + 1 >= self.length[rows])

    def to_schedule(self, rows: Index) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens of each row that no step has taken yet, with the drafts offered; and whether it decodes: but for those
        there is one, sampled last, and before it ``lag`` at most.

        There are none once steps in flight sample a sequence's last token, or check drafts of it.
        """
        length = self.length[rows]
        left = length - self.scheduled[rows]
        if self._takes_known:
            left -= self.pending[rows]
        decoding = (left > 0) & (left <= 1 + self.lag) & (length > self.num_prompt[rows])
        left += self.offered[rows]
        left[(length >= self.max_length[rows]) | (self.drafted[rows] > 0)] = 0
        return left, decoding
