"""One pool of equal blocks that serves every head group of a tier.

        free  ----allocate---->  held  ----release---->  free      (holds nothing worth keeping)
          ^                       ^  |
          |                    retain release
        evict                     |  v
          +-----------------------cached                           (registered in the radix tree, nobody uses it)

Every operation is O(1) a block, and takes many blocks at once: counts are arrays, order is an ordered dictionary's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Blocks = Sequence[int] | NDArray[np.int32]


class BlockPool:
    """Hands out block ids ``0 .. num_blocks - 1`` and keeps released, registered blocks until space is needed.

    ``on_evict`` is called with cached blocks, least recently used first, right before they are handed out anew.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[list[int]], None]) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._registered: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def is_held(self, block: int) -> bool:
        return bool(self._references[block] > 0)

    def count_held(self, blocks: Blocks) -> int:
        """How many of ``blocks`` somebody holds."""
        return int(np.count_nonzero(self._references[np.asarray(blocks, dtype=np.int32)]))

    def allocate(self, count: int) -> NDArray[np.int32]:
        """``count`` blocks with one reference each; evicts cached ones if free ones do not suffice.

        Raises ValueError if more than `num_available` are asked for; nothing is handed out then.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks were asked for, {self.num_available} of {self.num_blocks} are available")
        self._evict(count - len(self._free))
        at = len(self._free) - count
        blocks = np.array(self._free[at:], dtype=np.int32)
        del self._free[at:]
        self._references[blocks] = 1
        return blocks

    def register(self, block: int) -> None:
        """Keep a held block as cache after its last release."""
        self._registered[block] = True

    def retain(self, blocks: Blocks) -> None:
        """Add a reference to each of ``blocks`` (distinct; held or cached)."""
        ids = np.asarray(blocks, dtype=np.int32)
        for block in ids[self._references[ids] == 0].tolist():
            del self._cached[block]
        self._references[ids] += 1

    def release(self, blocks: Blocks, *, evict_first: bool = False) -> None:
        """Drop a reference of each of ``blocks`` (distinct). Those given first are evicted first.

        With ``evict_first`` they are the next to be evicted, before all that is cached now.
        """
        ids = np.asarray(blocks, dtype=np.int32)
        if (self._references[ids] < 1).any():
            over = ids[self._references[ids] < 1].tolist()
            raise ValueError(f"blocks {over} are released more often than they were retained")
        self._references[ids] -= 1
        unused = ids[self._references[ids] == 0]
        keep = self._registered[unused]
        self._free.extend(unused[~keep].tolist())
        kept = unused[keep].tolist()
        self._cached.update(dict.fromkeys(kept))
        if evict_first:
            for block in reversed(kept):
                self._cached.move_to_end(block, last=False)

    def evict_all(self) -> None:
        """Forget every cached block."""
        self._evict(len(self._cached))

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        pop = self._cached.popitem
        blocks = [pop(last=False)[0] for _ in range(count)]
        self._registered[blocks] = False
        self._on_evict(blocks)
        self._free.extend(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free, cached and held blocks partition the pool."""
        free, cached = set(self._free), set(self._cached)
        held = set(np.flatnonzero(self._references).tolist())
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, f"blocks {free & cached} are free and cached"
        assert not (free | cached) & held, f"blocks {(free | cached) & held} are held and available"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert all(self._registered[block] for block in cached), "a cached block is not registered"
        assert not any(self._registered[block] for block in free), "a free block is registered"
