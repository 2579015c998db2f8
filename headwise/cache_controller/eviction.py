"""The order in which cached blocks are evicted."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_NONE = -1

_MIN_LOOKED_AT = 256
"""Entries of a chunk that are looked at together: what few blocks cost must not grow with their chunk."""


class EvictionOrder:
    """Cached blocks in two queues: those that go first, and the others by recency.

    Blocks come in by chunks, the blocks of one release. A block that is taken out again leaves a stale entry behind in
    its chunk, which is skipped when its turn comes: ``_chunk_of[block]`` names the entry that counts. So every
    operation is a few array operations however many blocks it moves, and O(1) a block, as stale entries are swept
    out once they outnumber the blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._chunk_of: NDArray[np.int64] = np.full(num_blocks, _NONE, dtype=np.int64)
        self._first: deque[tuple[int, NDArray[np.int32]]] = deque()
        self._others: deque[tuple[int, NDArray[np.int32]]] = deque()
        self._next_chunk = 0
        self._count = 0
        self._entries = 0

    def __len__(self) -> int:
        return self._count

    def blocks(self) -> NDArray[np.int32]:
        """All of them, the next to be evicted first."""
        live = [self._live(*chunk) for queue in (self._first, self._others) for chunk in queue]
        return np.concatenate(live) if live else np.empty(0, dtype=np.int32)

    def peek(self, count: int) -> NDArray[np.int32]:
        """Up to ``count`` blocks that are evicted next once those that go first are gone."""
        found, seen = [np.empty(0, dtype=np.int32)], []
        while count > 0 and self._others:
            chunk, entries = self._others.popleft()
            blocks = self._live(chunk, entries)
            self._entries -= len(entries) - len(blocks)  # what is stale is looked at only once
            if len(blocks):
                seen.append((chunk, blocks))
                found.append(blocks[:count])
                count -= len(found[-1])
        self._others.extendleft(reversed(seen))
        return np.concatenate(found)

    def append(self, blocks: NDArray[np.int32], *, first: bool = False) -> None:
        """Queue distinct ``blocks`` that are not in the order, behind those that are in their queue."""
        if not len(blocks):
            return
        self._chunk_of[blocks] = self._next_chunk
        (self._first if first else self._others).append((self._next_chunk, blocks))
        self._next_chunk += 1
        self._count += len(blocks)
        self._entries += len(blocks)
        if self._entries > 2 * len(self._chunk_of):
            self._sweep()

    def remove(self, blocks: NDArray[np.int32]) -> None:
        """Take ``blocks`` out, wherever they are."""
        self._chunk_of[blocks] = _NONE
        self._count -= len(blocks)

    def pop(self, count: int) -> NDArray[np.int32]:
        """Take out the next ``count`` blocks; there must be so many."""
        taken = [np.empty(0, dtype=np.int32)]
        while count:
            queue = self._first or self._others
            chunk, entries = queue.popleft()
            looked_at = entries[: max(count, _MIN_LOOKED_AT)]
            live = (self._chunk_of[looked_at] == chunk).nonzero()[0][:count]
            end = int(live[-1]) + 1 if len(live) == count else len(looked_at)
            if end < len(entries):
                queue.appendleft((chunk, entries[end:]))
            self._entries -= end
            taken.append(looked_at[live])
            count -= len(live)
        popped = np.concatenate(taken)
        self.remove(popped)
        return popped

    def _live(self, chunk: int, entries: NDArray[np.int32]) -> NDArray[np.int32]:
        live: NDArray[np.int32] = entries[self._chunk_of[entries] == chunk]
        return live

    def _sweep(self) -> None:
        for queue in (self._first, self._others):
            chunks = [(chunk, self._live(chunk, entries)) for chunk, entries in queue]
            queue.clear()
            queue.extend(chunk for chunk in chunks if len(chunk[1]))
        self._entries = self._count
