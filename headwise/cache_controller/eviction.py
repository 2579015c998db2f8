"""Which cached blocks are evicted first: the contract, and the policy that there is.

A block is *cached* while nobody holds it and the prefix tree knows what it has. `BlockPool` tells its policy what
happens to blocks, and asks it which ones go when space is needed; nobody else decides that. A policy sees no tree, no
request and no clock: what it must know is said in the words of `EvictionPolicy`. `ResumePoints` finds the blocks that a
running row leaves behind and that a later request may well need.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.windows import GroupWindows

Blocks = NDArray[np.int32]

RESUME_SLACK = 512
"""Tokens before a prompt's end at which the next one may part from it already.

Chat templates, stripped reasoning and trimmed texts change a prompt's last tokens in the next turn.
"""

_NONE = -1

_MIN_LOOKED_AT = 256
"""Entries of a chunk that are looked at together: what few blocks cost must not grow with their chunk."""


class EvictionPolicy(Protocol):
    """Keeps the cached blocks of one pool in the order in which they go. Owned by the pool; nobody else changes it.

    Arguments are distinct block ids. Every call must cost O(1) a block at most.
    """

    def __len__(self) -> int:
        """How many blocks are cached."""

    def blocks(self) -> Blocks:
        """The cached blocks, the next to be evicted first."""

    def peek(self, count: int) -> Blocks:
        """Up to ``count`` cached blocks that go next of those that are worth a copy on a slower tier."""

    def pop(self, count: int) -> Blocks:
        """Take out the next ``count`` blocks; there are so many."""

    def put_back(self, blocks: Blocks) -> None:
        """These, which were popped, stay after all: they go next, the first given first."""

    # ---- blocks become cached ----

    def released(self, blocks: Blocks) -> None:
        """A sequence that ended, or a copy, used them last: of these, the first given are of the least use."""

    def recycled(self, blocks: Blocks) -> None:
        """The windows of running sequences have moved on from them."""

    def copied(self, blocks: Blocks) -> None:
        """`peek` told of them, and a slower tier has a copy now."""

    # ---- what else happens to blocks ----

    def need(self, blocks: Blocks) -> None:
        """A later request may well need these blocks, held ones mostly; so until `forget`."""

    def touch(self, blocks: Blocks) -> None:
        """These cached blocks were of use again: of these, the first given are of the least use."""

    def remove(self, blocks: Blocks) -> None:
        """These cached blocks are held again, or were evicted for another reason."""

    def replace(self, old: Blocks, new: Blocks) -> None:
        """What the cached ``old`` blocks have is kept in the held ``new`` ones from now on, the old are free."""

    def forget(self, blocks: Blocks) -> None:
        """These blocks, none of them cached, have nothing worth keeping any more."""

    def check_integrity(self, known: NDArray[np.bool_]) -> None:
        """Raise AssertionError if it thinks anything of blocks that are not ``known [num_blocks]`` to the tree."""


class RecycledFirst:
    """The `EvictionPolicy` by recency, but what windows leave behind goes before all else, unless it is needed.

    A window group's old blocks are of use only to a request that resumes in the middle of the sequence they belong to,
    and there are as many of them as the sequence is long.
    """

    def __init__(self, num_blocks: int) -> None:
        self._order = EvictionOrder(num_blocks)
        self._needed: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._order)

    def blocks(self) -> Blocks:
        return self._order.blocks()

    def peek(self, count: int) -> Blocks:
        return self._order.peek(count)

    def pop(self, count: int) -> Blocks:
        return self._order.pop(count)

    def put_back(self, blocks: Blocks) -> None:
        self._order.put_back(blocks)

    def released(self, blocks: Blocks) -> None:
        self._order.append(blocks)

    def recycled(self, blocks: Blocks) -> None:
        needed = self._needed[blocks]
        self._order.append(blocks[~needed], first=True)
        self._order.append(blocks[needed])

    def copied(self, blocks: Blocks) -> None:
        self._order.append(blocks, first=True)

    def need(self, blocks: Blocks) -> None:
        self._needed[blocks] = True

    def touch(self, blocks: Blocks) -> None:
        self._order.remove(blocks)
        self._order.append(blocks)

    def remove(self, blocks: Blocks) -> None:
        self._order.remove(blocks)

    def replace(self, old: Blocks, new: Blocks) -> None:
        self._order.remove(old)
        self._needed[new] = self._needed[old]
        self._needed[old] = False

    def forget(self, blocks: Blocks) -> None:
        self._needed[blocks] = False

    def check_integrity(self, known: NDArray[np.bool_]) -> None:
        assert known[self.blocks()].all(), "a cached block is not registered"
        assert not (self._needed & ~known).any(), "an unregistered block is needed"


class ResumePoints:
    """Where another request is likely to resume than where a running row is: in whose windows blocks are needed.

    That is where the row was served from the cache, or could have been had a window group not lost its blocks (the tree
    branches there), where the prompt of one that waits for it parts from its own, the last ``slack`` tokens of its
    prompt, and those of what of it is to be kept.
    """

    def __init__(self, max_rows: int, windows: GroupWindows, slack: int) -> None:
        self._windows, self.slack = windows, slack
        self._depths: NDArray[np.int64] = np.zeros((max_rows, 4), dtype=np.int64)  # blocks

    def open(self, row: int, reached: int, prompt_blocks: int, kept_blocks: int = 0) -> None:
        """A row starts with ``reached`` blocks that the full groups had, and a prompt of ``prompt_blocks``, of which
        the first ``kept_blocks`` are to be kept."""
        self._depths[row] = reached, prompt_blocks, 0, kept_blocks

    def will_part(self, row: int, depth: int) -> None:
        """Another prompt parts from the row's behind ``depth`` blocks."""
        self._depths[row, 2] = depth

    def are_inside(self, rows: Blocks, groups: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether the blocks ``[n]`` of these rows, groups and columns lie in a window of such a point."""
        depths, block_size = self._depths[rows], self._windows.block_size
        behind = depths * block_size - (0, self.slack, 0, self.slack) - (self._windows.window[groups] - 1)[:, None]
        column = columns[:, None]
        return np.asarray(((column >= behind // block_size) & (column < depths)).any(axis=1))


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
        if len(blocks):
            (self._first if first else self._others).append((self._enter(blocks), blocks))
            self._count_entries(blocks)

    def put_back(self, blocks: NDArray[np.int32]) -> None:
        """Queue distinct ``blocks`` that are not in the order before all but those that go first."""
        if len(blocks):
            self._others.appendleft((self._enter(blocks), blocks))
            self._count_entries(blocks)

    def _enter(self, blocks: NDArray[np.int32]) -> int:
        """The number of a new chunk, of these."""
        self._next_chunk += 1
        self._chunk_of[blocks] = self._next_chunk
        return self._next_chunk

    def _count_entries(self, blocks: NDArray[np.int32]) -> None:
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
