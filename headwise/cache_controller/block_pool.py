"""One pool of equal blocks that serves every head group of a tier.

        free  ----allocate---->  held  ----release---->  free      (holds nothing worth keeping)
          ^                       ^  |
          |                    retain release
        evict                     |  v
          +-----------------------cached                           (registered in the radix tree, nobody uses it)

Every operation takes many blocks at once and is O(1) a block: states are arrays, the order of eviction is chunked.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.eviction import Blocks, EvictionPolicy, RecycledFirst
from headwise.cache_controller.protection import PROTECTED_SHARE, ProtectedLast


class BlockPool:
    """Hands out block ids ``0 .. num_blocks - 1`` and keeps released, registered blocks until space is needed.

    on_evict: called with cached blocks, in the order they go, right before they are handed out anew
    eviction: makes the policy by which cached blocks go, for so many blocks
    protected_share: of its blocks, how many may be kept in place of others that are of use later: see `ProtectedLast`
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[Blocks], None],
        eviction: Callable[[int], EvictionPolicy] = RecycledFirst,
        protected_share: float = PROTECTED_SHARE,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._on_evict = on_evict
        self._stack: Blocks = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # the first `num_free` are free
        self._cached = ProtectedLast(eviction(num_blocks), num_blocks, protected_share)
        self._references: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._registered: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return self.num_free + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def free_blocks(self) -> Blocks:
        """The blocks that hold nothing."""
        return self._stack[: self.num_free].copy()

    @property
    def cached_blocks(self) -> Blocks:
        """The blocks that nobody holds and the tree knows, the next to be evicted first."""
        return self._cached.blocks()

    @property
    def references(self) -> NDArray[np.int32]:
        """``[num_blocks]``: how often each block is held."""
        return self._references.copy()

    def is_held(self, block: int) -> bool:
        return bool(self._references[block] > 0)

    def count_held(self, blocks: Blocks) -> int:
        """How many of ``blocks`` somebody holds."""
        return int(np.count_nonzero(self._references[blocks]))

    def count_held_once(self, blocks: Blocks) -> int:
        """How many of ``blocks`` have one reference: they are available once that is dropped."""
        return int(np.count_nonzero(self._references[blocks] == 1))

    def allocate(self, count: int) -> Blocks:
        """``count`` blocks with one reference each; evicts cached ones if free ones do not suffice.

        Raises ValueError if more than `num_available` are asked for; nothing is handed out then.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks were asked for, {self.num_available} of {self.num_blocks} are available")
        if count > self.num_free:
            self._evict(count - self.num_free)
        self.num_free -= count
        blocks = self._stack[self.num_free : self.num_free + count].copy()
        self._references[blocks] = 1
        return blocks

    def register(self, blocks: Blocks) -> None:
        """Keep held blocks as cache after their last release."""
        self._registered[blocks] = True

    def value(self, blocks: Blocks) -> None:
        """Say that a later request may well need those of ``blocks`` that are registered."""
        known = self._registered[blocks]
        self._cached.need(blocks if known.all() else blocks[known])

    @property
    def num_protected(self) -> int:
        """Blocks that are to be kept for a time, held ones among them."""
        return self._cached.num_protected

    def protect(self, blocks: Blocks, until: float | NDArray[np.float64]) -> None:
        """Keep those of ``blocks`` that are registered until then, or ``until [n]`` each, rather than others."""
        known = self._registered[blocks]
        self._cached.protect(blocks[known], until if isinstance(until, float) else until[known])

    def hand_protection(self, blocks: Blocks, to: BlockPool, copies: Blocks) -> None:
        """Keep the ``copies [n]`` of ``blocks [n]`` in another pool instead."""
        until = self._cached.until(blocks)
        if np.isfinite(until).any():
            to.protect(copies, until)
            self._cached.unprotect(blocks)

    def advance(self, now: float) -> None:
        """It is ``now``, in seconds: what was to be kept until then is not any more."""
        self._cached.advance(now)

    def are_unheld(self, blocks: Blocks) -> NDArray[np.bool_]:
        return np.asarray(self._references[blocks] == 0)

    def are_shared(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Whether more than one holds each of ``blocks``."""
        return np.asarray(self._references[blocks] > 1)

    def replace(self, old: Blocks, new: Blocks) -> None:
        """Free cached blocks; held ones that are not registered yet are cache in their place, and of their value."""
        self._cached.replace(old, new)
        self._registered[new] = True
        self._registered[old] = False
        self._push_free(old)

    def retain(self, blocks: Blocks) -> None:
        """Add a reference to each of ``blocks`` (distinct; held or cached)."""
        cached = blocks[self._references[blocks] == 0]
        if len(cached):
            self._cached.remove(cached)
        self._references[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """Drop a reference to each of ``blocks`` (distinct). Of those then unused, the first given are evicted first.

        Raises ValueError if one has no reference left; nothing is changed then.
        """
        self._cached.released(self._free_unregistered(self._drop(blocks)))

    def release_copied(self, blocks: Blocks) -> None:
        """Like `release`, of blocks that were about to be evicted: a slower tier has what they have now."""
        self._cached.copied(self._free_unregistered(self._drop(blocks)))

    def _drop(self, blocks: Blocks) -> Blocks:
        """Drop a reference to each of the distinct ``blocks``; those then unused."""
        references = self._references[blocks]
        if (references == 1).all():  # as most are
            self._references[blocks] = 0
            return blocks.copy()  # the caller's may be a view of what changes
        left = references - 1
        self._check_held(blocks, left)
        self._references[blocks] = left
        unused: Blocks = blocks[left == 0]
        return unused

    def recycle(self, blocks: Blocks) -> None:
        """Drop a reference for each entry of ``blocks``, which windows have moved on from.

        Raises ValueError if one has too few references left; nothing is changed then.
        """
        np.subtract.at(self._references, blocks, 1)
        left = self._references[blocks]
        if len(blocks) and left.min() < 0:
            np.add.at(self._references, blocks, 1)
        self._check_held(blocks, left)
        unused = np.fromiter(dict.fromkeys(blocks[left == 0].tolist()), dtype=np.int32)
        self._cached.recycled(self._free_unregistered(unused))

    def _check_held(self, blocks: Blocks, left: Blocks) -> None:
        if len(blocks) and left.min() < 0:
            raise ValueError(f"blocks {blocks[left < 0].tolist()} are released more often than they were retained")

    def _free_unregistered(self, unused: Blocks) -> Blocks:
        """Free what is not worth keeping; the rest."""
        keep = self._registered[unused]
        if np.count_nonzero(keep) == len(keep):
            return unused
        self._push_free(unused[~keep])
        kept: Blocks = unused[keep]
        return kept

    def next_evicted(self, count: int) -> Blocks:
        """Up to ``count`` cached blocks that go next of those that are worth a copy on a slower tier."""
        return self._cached.peek(count)

    def touch(self, blocks: Blocks) -> None:
        """Those of ``blocks`` that are cached were of use again; of these, the first given are evicted first."""
        self._cached.touch(blocks[self._references[blocks] == 0])

    def evict_all(self) -> int:
        """Forget every cached block; how many those were."""
        count = len(self._cached)
        self._evict(count)
        return count

    def evict(self, blocks: Blocks) -> None:
        """Forget these cached blocks."""
        self._cached.remove(blocks)
        self._forget(blocks)

    def forget(self, blocks: Blocks) -> None:
        """Do not keep held ``blocks`` after their last release."""
        self._registered[blocks] = False
        self._cached.forget(blocks)

    def _evict(self, count: int) -> None:
        if count:
            self._forget(self._cached.pop(count))

    def _forget(self, blocks: Blocks) -> None:
        self._registered[blocks] = False
        self._cached.forget(blocks)
        self._on_evict(blocks)
        self._push_free(blocks)

    def _push_free(self, blocks: Blocks) -> None:
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free, cached and held blocks partition the pool."""
        free, cached = set(self.free_blocks.tolist()), set(self.cached_blocks.tolist())
        held = set(np.flatnonzero(self._references).tolist())
        assert len(free) == self.num_free, "a block is twice in the free list"
        assert len(cached) == len(self.cached_blocks) == self.num_cached, "a block is twice in the order of eviction"
        assert not free & cached, f"blocks {free & cached} are free and cached"
        assert not (free | cached) & held, f"blocks {(free | cached) & held} are held and available"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert not self._registered[list(free)].any(), "a free block is registered"
        self._cached.check_integrity(self._registered)
