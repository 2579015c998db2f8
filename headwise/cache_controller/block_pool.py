"""One pool of equal blocks that serves every head group of a tier.

        free  ----allocate---->  held  ----release---->  free      (holds nothing worth keeping)
          ^                       ^  |
          |                    retain release
        evict                     |  v
          +-----------------------cached                           (registered in the radix tree, nobody uses it)

Every operation is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Hands out block ids ``0 .. num_blocks - 1`` and keeps released, registered blocks until space is needed.

    ``on_evict`` is called with the id of a cached block right before the block is handed out anew.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * num_blocks
        self._registered = bytearray(num_blocks)

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
        return self._references[block] > 0

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; evicts cached ones if free ones do not suffice.

        Raises ValueError if more than `num_available` are asked for; nothing is handed out then.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks were asked for, {self.num_available} of {self.num_blocks} are available")
        while len(self._free) < count:
            self._evict_one()
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int) -> None:
        """Keep a held block as cache after its last release."""
        self._registered[block] = True

    def retain(self, block: int) -> None:
        """Add a reference to a registered or held block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int], *, evict_first: bool = False) -> None:
        """Drop one reference of each. Blocks given first are evicted first; all at once next with ``evict_first``."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released more often than it was retained")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._registered[block]:
                    self._cached[block] = None
                    if evict_first:
                        self._cached.move_to_end(block, last=False)
                else:
                    self._free.append(block)

    def evict_all(self) -> None:
        """Forget every cached block."""
        while self._cached:
            self._evict_one()

    def _evict_one(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self._registered[block] = False
        self._on_evict(block)
        self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free, cached and held blocks partition the pool."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, f"blocks {free & cached} are free and cached"
        assert not (free | cached) & held, f"blocks {(free | cached) & held} are held and available"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert all(self._registered[block] for block in cached), "a cached block is not registered"
        assert not any(self._registered[block] for block in free), "a free block is registered"
