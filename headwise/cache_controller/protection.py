"""Cached blocks that somebody has asked to keep for a time: of one pool, they are evicted after all others.

    protect  -->  as any other block, until it would go next  -->  set aside  -->  over: it goes next
                                                                       |
                                                                       +-->  more than may be: it goes

That a block is protected shows only when its turn comes. So it keeps its place in the order of the pool's policy: once
its time is over there are no blocks that were of use before it, and it goes as if nobody had asked. What is protected
is never promised: of blocks set aside the pool has a bounded share, and where nothing else is left they go, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.eviction import Blocks, EvictionOrder, EvictionPolicy

PROTECTED_SHARE = 0.5
"""Of a pool's blocks, how many may be kept in place of others."""

LOOK_S = 1.0
"""Seconds between looks for blocks set aside whose time is over: each look goes over all of them."""

_AT_A_TIME = 256
"""Blocks that are looked at together once protected ones are next."""

_NEVER = -np.inf


class ProtectedLast:
    """An `EvictionPolicy` over another one, by which blocks go while they are not protected, and by which they are
    ordered.

    share: of the pool's blocks, how many may be set aside; the ones longest there go first
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, share: float = PROTECTED_SHARE) -> None:
        self._policy = policy
        self._most = int(share * num_blocks)
        self._until: NDArray[np.float64] = np.full(num_blocks, _NEVER)
        self._latest = _NEVER  # of all that were protected
        self._aside = EvictionOrder(num_blocks)
        self._is_aside: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._now = self._looked_at = _NEVER

    # ---- protection ----

    @property
    def num_protected(self) -> int:
        """Blocks whose time is not over, held ones among them."""
        return int(np.count_nonzero(self._until > self._now)) if self._latest > self._now else 0

    def until(self, blocks: Blocks) -> NDArray[np.float64]:
        """Until when each of ``blocks`` is protected; what is past: it is not."""
        until: NDArray[np.float64] = self._until[blocks]
        return until

    def protect(self, blocks: Blocks, until: float | NDArray[np.float64]) -> None:
        """Keep ``blocks``, which hold what is worth it, until then, or as long as they were to be already."""
        if self._most and len(blocks):
            self._until[blocks] = np.maximum(self._until[blocks], until)
            self._latest = max(self._latest, float(np.max(until)))

    def unprotect(self, blocks: Blocks) -> None:
        """These go as any others from now on."""
        self._until[blocks] = _NEVER
        self._put_back(blocks[self._is_aside[blocks]])

    def advance(self, now: float) -> None:
        """It is ``now``, of a clock that counts seconds."""
        self._now = now
        if len(self._aside) and now >= self._looked_at + LOOK_S:
            self._looked_at = now
            blocks = self._aside.blocks()
            self._put_back(blocks[self._until[blocks] <= now])

    def _put_back(self, blocks: Blocks) -> None:
        if len(blocks):
            self._take_out(blocks)
            self._policy.put_back(blocks)

    def _take_out(self, blocks: Blocks) -> None:
        self._aside.remove(blocks)
        self._is_aside[blocks] = False

    def _set_aside(self, blocks: Blocks) -> Blocks:
        """Keep these; what goes in their place."""
        self._aside.append(blocks)
        self._is_aside[blocks] = True
        return self._pop_aside(max(0, len(self._aside) - self._most))

    def _pop_aside(self, count: int) -> Blocks:
        gone = self._aside.pop(count)
        self._is_aside[gone] = False
        return gone

    def _are_protected(self, blocks: Blocks) -> NDArray[np.bool_]:
        return np.asarray(self._until[blocks] > self._now)

    # ---- the policy ----

    def __len__(self) -> int:
        return len(self._policy) + len(self._aside)

    def blocks(self) -> Blocks:
        others = self._policy.blocks()
        are_kept = self._are_protected(others)
        return np.concatenate([others[~are_kept], self._aside.blocks(), others[are_kept]])

    def peek(self, count: int) -> Blocks:
        if not self._latest > self._now:
            return self._policy.peek(count)
        asked = count
        while True:
            others = self._policy.peek(asked)
            are_kept = self._are_protected(others)
            if len(others) - np.count_nonzero(are_kept) >= count or len(others) < asked:
                return np.concatenate([others[~are_kept], self._aside.blocks(), others[are_kept]])[:count]
            asked *= 2

    def pop(self, count: int) -> Blocks:
        popped = self._policy.pop(min(count, len(self._policy)))
        gone = self._kept_apart(popped) if self._latest > self._now else [popped]
        if missing := count - sum(map(len, gone)):
            gone.append(self._pop_aside(missing))
        return np.concatenate(gone)

    def _kept_apart(self, popped: Blocks) -> list[Blocks]:
        """Set aside what is protected of blocks that were ``popped``; the others, and as many more in place of these as
        the policy has."""
        gone = [popped[:0]]
        missing = len(popped)
        while missing and len(popped):
            are_kept = self._are_protected(popped)
            room = self._most - len(self._aside)
            num_gone = np.cumsum(~are_kept) + np.maximum(0, np.cumsum(are_kept) - room)
            end = int(np.searchsorted(num_gone, missing)) + 1
            self._policy.put_back(popped[end:])
            gone += [popped[:end][~are_kept[:end]], self._set_aside(popped[:end][are_kept[:end]])]
            missing -= len(gone[-2]) + len(gone[-1])
            popped = self._policy.pop(min(max(missing, _AT_A_TIME), len(self._policy))) if missing else popped
        return gone

    def put_back(self, blocks: Blocks) -> None:
        self._policy.put_back(blocks)

    def released(self, blocks: Blocks) -> None:
        self._policy.released(blocks)

    def recycled(self, blocks: Blocks) -> None:
        self._policy.recycled(blocks)

    def copied(self, blocks: Blocks) -> None:
        self._policy.copied(blocks)

    def need(self, blocks: Blocks) -> None:
        self._policy.need(blocks)

    def touch(self, blocks: Blocks) -> None:
        self._put_back(blocks[self._is_aside[blocks]])
        self._policy.touch(blocks)

    def remove(self, blocks: Blocks) -> None:
        are_aside = self._is_aside[blocks]
        if are_aside.any():
            self._take_out(blocks[are_aside])
            blocks = blocks[~are_aside]
        self._policy.remove(blocks)

    def replace(self, old: Blocks, new: Blocks) -> None:
        self._put_back(old[self._is_aside[old]])
        self._until[new] = self._until[old]
        self._until[old] = _NEVER
        self._policy.replace(old, new)

    def forget(self, blocks: Blocks) -> None:
        self._until[blocks] = _NEVER
        self._policy.forget(blocks)

    def check_integrity(self, known: NDArray[np.bool_]) -> None:
        self._policy.check_integrity(known)
        aside = self._aside.blocks()
        assert known[aside].all(), "a block set aside is not registered"
        assert len(aside) == len(self._aside) <= self._most, "more blocks are set aside than may be"
        assert (np.sort(aside) == np.flatnonzero(self._is_aside)).all(), "a block set aside is miscounted"
        assert known[self._until > _NEVER].all(), "an unregistered block is protected"
