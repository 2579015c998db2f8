"""A cache manager with tiny blocks, and sequences that pass through it."""

from __future__ import annotations

import numpy as np

from headwise.cache_controller.block_hash import extend_hashes
from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.prefix_match import PrefixMatch

BLOCK = 4
WINDOW = HeadPolicy(window=6, sink=3)


def manager(num_blocks: int = 24, policies=(FULL,), **kwargs) -> CacheManager:
    sizes = {"num_blocks": num_blocks, "max_rows": 8, "max_blocks": 16, "step_tokens": BLOCK, "resume_slack": 0}
    return CacheManager(policies, block_size=BLOCK, **{**sizes, **kwargs})


def hashes_of(tokens) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, b"seed", np.array(tokens, dtype=np.int32), BLOCK)
    return hashes


def serve(cache: CacheManager, row: int, tokens) -> int:
    """Run a sequence through the cache; the prefix tokens that were served from it."""
    match = cache.match(hashes_of(tokens), len(tokens) - 1)
    cache.adopt(row, match, len(tokens))
    assert extend(cache, row, len(tokens))
    commit(cache, row, tokens)
    return match.num_blocks * BLOCK


def extend(cache: CacheManager, row: int, count: int) -> bool:
    return cache.extend(np.array([row], dtype=np.int32), np.array([count]))


def commit(cache: CacheManager, row: int, tokens) -> None:
    cache.register([row], [hashes_of(tokens)])
    cache.recycle(np.array([row], dtype=np.int32), np.array([len(tokens)]))


def grow(cache: CacheManager, row: int, tokens, done: int = 0, step: int = BLOCK) -> None:
    """Compute the tokens behind the first ``done``, as many a step as the window groups are made for."""
    for stop in [*range(done + step, len(tokens), step), len(tokens)]:
        assert extend(cache, row, stop)
        commit(cache, row, tokens[:stop])


def nothing(cache: CacheManager) -> PrefixMatch:
    return cache.match([], 0)


def evict(cache: CacheManager, block: int) -> None:
    """Evict one cached block out of turn."""
    cache.pool.evict(np.array([block], dtype=np.int32))
