"""Which decodes read their first blocks together: an order in which those that share some are neighbours, and groups.

Requests that go on from one prefix have its blocks in their tables, the same ones. Kernels that know of it read these
once for all of a group, as far as all of its members share them:

        order      a  b  c  d  e  f
        shared     0  9  9  0  3  0        blocks of each that are those of the one before it
                   [-----]  [--]  [-]

Where prefixes branch, what a smaller group shares is more: the groups are those that spare the most blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.cache_manager import CacheManager

LEAST_TOKENS = 256
"""To read less once costs more than it spares."""

Index = NDArray[np.int32]
_CELL_BYTES = 4


class JointReads:
    """Of one engine's rows. What it found out of them holds until they change hands.

    least_tokens: that a group shares
    read_tokens:  that decodes had before them, in all steps so far; ``spared_tokens``: those of them that another one
                  of their group had, too
    """

    def __init__(self, cache: CacheManager, least_tokens: int = LEAST_TOKENS) -> None:
        self._cache = cache
        self._groups = np.flatnonzero(cache.windows.is_full)
        self._least = -(-least_tokens // cache.block_size)
        self.read_tokens = self.spared_tokens = 0
        self._prefixes: dict[int, bytes] = {}  # of rows, what lies in their first columns
        self._latest: tuple[bytes, NDArray[np.intp], Index] | None = None

    def forget(self, row: int) -> None:
        """A row changes hands."""
        self._prefixes.pop(row, None)
        self._latest = None

    def arranged(self, rows: Index, tokens: NDArray[np.int64]) -> tuple[NDArray[np.intp], Index]:
        """``(order [n], shared [n])``: places in ``rows [n]``, and, in that order, how many first tokens each shares
        with the one before it, see `AttentionBatch.shared`.

        tokens: per row, those whose blocks it will keep for as long as it has them: of its prompt
        """
        size = self._cache.block_size
        able = np.flatnonzero(tokens >= self._least * size)
        if len(able) > 1 and len(self._groups):
            first = self._cache.tables[rows[able], self._groups[0], self._least - 1]
            _, which, counts = np.unique(first, return_inverse=True, return_counts=True)
            able = able[counts[which] > 1]
        if len(able) < 2 or not len(self._groups):
            return np.arange(len(rows)), np.zeros(len(rows), np.int32)
        asked = rows[able].tobytes()
        if self._latest is None or self._latest[0] != asked:
            prefixes = [self._prefix(row, int(tokens[at]) // size) for at, row in zip(able, rows[able], strict=True)]
            order, blocks = _grouped(prefixes, _CELL_BYTES * len(self._groups), self._least)
            self._latest = asked, order, (blocks * size).astype(np.int32)
        _, order, shared = self._latest
        others = np.setdiff1d(np.arange(len(rows)), able, assume_unique=True)
        return np.concatenate([able[order], others]), np.append(shared, np.zeros(len(others), np.int32))

    def count(self, contexts: NDArray[np.int64], shared: Index) -> None:
        """A step has decodes with so many tokens before them, of which they share so many."""
        self.read_tokens += int(contexts.sum())
        self.spared_tokens += int(shared.sum())

    def _prefix(self, row: int, columns: int) -> bytes:
        known = self._prefixes.get(row)
        if known is None:
            cells: NDArray[Any] = self._cache.tables[row, self._groups, :columns]
            known = self._prefixes[row] = np.ascontiguousarray(cells.T).tobytes()
        return known


def _grouped(prefixes: list[bytes], column_bytes: int, least: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Their order, and in it how many columns each shares with the one before it in its group, at ``least``; else 0."""
    order = np.array(sorted(range(len(prefixes)), key=prefixes.__getitem__), np.intp)
    common = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        common[place] = _common_bytes(prefixes[order[place - 1]], prefixes[order[place]]) // column_bytes
    common[common < least] = 0
    shared = np.zeros_like(common)
    for begin, end in groups_of(common):
        shared[begin + 1 : end] = common[begin + 1 : end].min(initial=np.iinfo(np.int64).max)
    return order, shared


def _common_bytes(first: bytes, second: bytes) -> int:
    """How many bytes both begin with."""
    length = min(len(first), len(second))
    differ = np.frombuffer(first, np.uint8, length) != np.frombuffer(second, np.uint8, length)
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length


def groups_of(common: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where groups of neighbours begin and end, such that most is spared: a group of ``k`` spares ``k - 1`` times what
    all of it has in common. ``common [n]`` is what each has in common with the one before it.

    By dynamic programming: of the first ``end``, the best is some group at the end behind the best of what is before.
    """
    count = len(common)
    spared, begins = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    lows = np.full(count, np.iinfo(np.int32).max, np.int64)  # what all from each place on have in common
    for end in range(1, count + 1):
        np.minimum(lows[: end - 1], common[end - 1], out=lows[: end - 1])
        found = spared[:end] + np.arange(end - 1, -1, -1) * lows[:end]
        begins[end] = found.argmax()
        spared[end] = found[begins[end]]
    groups, end = list[tuple[int, int]](), count
    while end:
        groups.append((int(begins[end]), end))
        end = int(begins[end])
    return groups[::-1]
