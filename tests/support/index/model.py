"""What the attention store would make of a cache's statements, and by brute force what the cache itself can serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.kv_events import IndexUpdate

Said = dict[tuple[str, bytes], int]
"""By tier and hash of what is resident: whether it is resumable."""


def stated(updates: Iterable[IndexUpdate], said: Said | None = None) -> Said:
    """``said``, and the statements behind it."""
    said = {} if said is None else said
    for update in updates:
        assert update.resident or not update.resumable
        assert len(update.resumable) in (0, len(update.block_hashes))
        for index, block_hash in enumerate(update.block_hashes):
            if update.resident:
                said[update.tier, block_hash] = update.resumable[index] if update.resumable else 1
            else:
                said.pop((update.tier, block_hash), None)
    return said


class Heard:
    """What is known of a cache by its statements alone.

    said: see `Said`
    """

    def __init__(self, cache: CacheManager) -> None:
        self.said: Said = {}
        self._tiers = list(cache.tree.tiers)

    def hear(self, updates: Iterable[IndexUpdate]) -> None:
        for update in updates:
            if not update.resident:
                known = [(update.tier, block_hash) in self.said for block_hash in update.block_hashes]
                assert all(known), "what was never said is taken back"
            stated([update], self.said)

    def depths(self, path: Sequence[bytes]) -> list[int]:
        """How many blocks of a path can be served from each tier together with the faster ones, fastest first."""
        depths = []
        for count in range(1, len(self._tiers) + 1):
            tiers, deepest = self._tiers[:count], 0
            for depth, block_hash in enumerate(path, 1):
                if not any((tier, block_hash) in self.said for tier in tiers):
                    break
                if any(self.said.get((tier, block_hash)) for tier in tiers):
                    deepest = depth
            depths.append(deepest)
        return depths


def servable_depths(cache: CacheManager, path: Sequence[bytes]) -> list[int]:
    """The same by what the tiers hold: token by token, from the definition of what a query sees."""
    nodes = cache.tree.find(path)
    depths, held = [], np.zeros((len(nodes), len(cache.policies)), dtype=np.bool_)
    for tier in cache.tree.tiers.values():
        held |= tier.has(nodes)
        can = [depth for depth in range(1, len(nodes) + 1) if _can_go_on(cache, held.tolist(), depth)]
        depths.append(max(can, default=0))
    return depths


def _can_go_on(cache: CacheManager, held: list[list[bool]], depth: int) -> bool:
    """Whether everything is held that a query behind ``depth`` blocks sees of them, and all of what full groups do."""
    query = depth * cache.block_size
    for group, policy in enumerate(cache.policies):
        if policy.is_state and not held[depth - 1][group]:
            return False
        for token in range(query):
            is_seen = policy.is_full or token < policy.sink or query - token < policy.window
            if is_seen and not held[token // cache.block_size][group]:
                return False
    return True


def assert_match_serves(cache: CacheManager, path: Sequence[bytes], depths: Sequence[int]) -> None:
    """`CacheManager.match` must serve these, of the device and the host. Copies must not be too slow to be worth it."""
    match = cache.match(path, len(path) * cache.block_size)
    assert match.num_blocks - match.gained == depths[0]
    assert not cache.host.is_there or match.num_blocks == depths[1]
