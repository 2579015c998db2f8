"""The sequences that run, and those that leave the batch."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Phase, Sequence
from headwise.runtime.engine.sequence_table import Index, SequenceTable


class Running:
    """By `Sequence.order`, with their columns in ``table``.

    sequences: those that run, by their order
    leaving:   those that left the batch while steps in flight may touch their blocks, in the order in which they did:
               whose blocks come back first
    """

    def __init__(self, table: SequenceTable) -> None:
        self.table = table
        self.sequences: list[Sequence] = []
        self.leaving: dict[Sequence, None] = {}
        self._rows: Index | None = None  # of `sequences`, until these change

    @property
    def rows(self) -> Index:
        """Of those that run, by their order."""
        if self._rows is None:
            self._rows = np.array([sequence.row for sequence in self.sequences], dtype=np.int32)
        return self._rows

    @property
    def latest(self) -> Sequence:
        """The one of the lowest priority that came last."""
        return max(self.sequences, key=lambda sequence: sequence.arrival)

    @property
    def some_come_back(self) -> bool:
        """Whether some that leave go on later, for want of blocks: these are theirs before they are anybody else's."""
        return any(not sequence.finished for sequence in self.leaving)

    def add(self, sequence: Sequence) -> None:
        """It runs from now on; it has a row."""
        sequence.phase = Phase.RUNNING
        bisect.insort(self.sequences, sequence, key=lambda other: other.order)
        self._rows = None

    def bring_forward(self, leader: Sequence, follower: Sequence) -> None:
        """Have one that runs come no later than one that waits for it."""
        if leader.arrival[0] == follower.arrival[0] and leader.turn > follower.turn:
            self.sequences.remove(leader)
            leader.turn = follower.turn
            self.add(leader)

    def leave(self, sequence: Sequence) -> None:
        """One that runs is out of the batch."""
        self.sequences.remove(sequence)
        self._rows = None
        sequence.phase = Phase.DRAINING
        self.leaving[sequence] = None

    def wanted(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Of each, the tokens that a step could compute at most, and whether it decodes."""
        left, decoding = self.table.to_schedule(self.rows)
        return np.minimum(left, self.table.chunk[self.rows]), decoding

    def prompts(self) -> tuple[list[Sequence], list[int]]:
        """Those that do not decode yet, and how many of their tokens no step has taken."""
        left, decoding = self.table.to_schedule(self.rows)
        return self.table.of(self.rows[~decoding]), left[~decoding].tolist()
