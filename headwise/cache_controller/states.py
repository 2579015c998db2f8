"""Where the states of running sequences lie: the live one, and the checkpoints that are left behind.

In a block table of a group of states, a column holds the state behind the last token of its token block, or behind the
sequence's last one. A step takes a sequence from ``start`` to ``end`` tokens. It reads what column
``(start - 1) // block_size`` holds, and writes every column behind ``start`` that has a block, of which
``(end - 1) // block_size`` is one: that is the live state. Where the column to read has no block, the state is in the
live one already:

    | checkpoint |   -1   |  ...  | live |        the live block moves along with the sequence; a column that a step
                  ^ moved from here    ^ to here  ends with, or passes, is left a block of its own for a checkpoint

So a checkpoint costs no copy: the step that goes on from it writes elsewhere. As long as nobody else holds it, a
checkpoint may be given up for the live state, so that a sequence can always go on with one block of each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.radix_tree import NOWHERE

Rows = NDArray[np.int32]


@dataclass(frozen=True)
class StateStep:
    """How the states of a row go on to the column ``to``.

    source:      the column of the live state so far; `NOWHERE`: there is none yet
    must_stay:   others hold what the source has: the live state needs other blocks
    may_stay:    the source is worth a checkpoint
    checkpoints: columns between, at whose ends a checkpoint is worth blocks
    """

    row: int
    source: int
    to: int
    must_stay: bool
    may_stay: bool
    checkpoints: tuple[int, ...]

    @property
    def needs_blocks(self) -> bool:
        """Whether the live state must have new blocks."""
        return self.must_stay or self.source == NOWHERE


class CheckpointPlaces:
    """Depths at which a request is likely to resume, so that a checkpoint is worth its blocks.

    These are where a row's prompt parts from what was cached, or from that of one that waits for it, the ends of its
    prompt and of what of it is to be kept, and every so many tokens of it; a prompt that comes a second time resumes
    before its last token.

    interval: tokens between checkpoints of a long prompt; 0: there are none
    """

    def __init__(self, max_rows: int, block_size: int, interval: int) -> None:
        self._block_size = block_size
        self._interval = -(-interval // block_size)
        self._ends: NDArray[np.int64] = np.zeros((max_rows, 5), dtype=np.int64)  # depths, in blocks

    def open(self, row: int, reached: int, prompt_tokens: int, kept_blocks: int = 0) -> None:
        """A row starts with ``reached`` blocks that the full groups had, and a prompt of so many tokens, of whose
        blocks the first ``kept_blocks`` are to be kept."""
        size = self._block_size
        self._ends[row] = prompt_tokens // size, (prompt_tokens - 1) // size, reached, 0, kept_blocks

    def will_part(self, row: int, depth: int, planned: int) -> int:
        """Another prompt parts from a row's behind ``depth`` blocks; behind how many of them a checkpoint will be.

        planned: columns of the row whose checkpoints are decided
        """
        parts = self._ends[row]
        if depth > planned >= parts[3]:  # none is still to come for an earlier one
            parts[3] = depth
        of_interval = depth // self._interval * self._interval if self._interval else 0
        return max(int(parts[parts <= depth].max(initial=0)), of_interval)

    def are_wanted(self, rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.bool_]:
        """``[n]``: whether a checkpoint at the end of those columns of those rows is worth blocks."""
        ends, depths = self._ends[rows], columns + 1
        wanted = (ends == depths[:, None]).any(axis=1)
        if self._interval:
            wanted |= (depths % self._interval == 0) & (depths <= ends[:, 0])
        return np.asarray(wanted)


class StateColumns:
    """Plans how the states of rows go on.

    groups: those of states
    """

    def __init__(
        self, is_state: NDArray[np.bool_], places: CheckpointPlaces, *, max_rows: int, block_size: int, keeps: bool
    ) -> None:
        """keeps: whether checkpoints are of any use"""
        self.groups = np.flatnonzero(is_state)
        self._places, self._block_size, self._keeps = places, block_size, keeps
        self._ends: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # tokens that steps so far lead to

    @property
    def count(self) -> int:
        return len(self.groups)

    def open(self, row: int, tokens: int) -> None:
        """A row starts behind so many tokens."""
        self._ends[row] = tokens

    def extended(self, rows: Rows, tokens: NDArray[np.int64]) -> None:
        """Rows have room for so many tokens."""
        self._ends[rows] = tokens

    def steps(
        self, rows: Rows, columns: NDArray[np.int64], last: NDArray[np.int64], are_shared: Sequence[bool]
    ) -> list[StateStep]:
        """How rows that have ``columns`` go on to have ``last``; and whether others hold what they have last."""
        return [
            self._step(*of_row)
            for of_row in zip(rows.tolist(), columns.tolist(), last.tolist(), are_shared, strict=True)
        ]

    def _step(self, row: int, columns: int, last: int, is_shared: bool) -> StateStep:
        source, to = columns - 1, last - 1
        is_at_end = columns > 0 and self._ends[row] == columns * self._block_size
        if not self._keeps:
            return StateStep(row, source, to, is_shared, may_stay=False, checkpoints=())
        between = np.arange(columns - 1 if columns and not is_at_end else columns, to)
        wanted = between[self._places.are_wanted(np.full(len(between), row), between)].tolist()
        may_stay = bool(is_at_end or source in wanted)
        inside = tuple(column for column in wanted if column != source)
        return StateStep(row, source, to, is_shared, may_stay, inside)
