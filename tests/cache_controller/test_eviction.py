"""Eviction: a pool gives up what its policy names, and it is told which windows requests may need."""

import numpy as np
import pytest
from numpy.typing import NDArray

from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.eviction import Blocks, EvictionPolicy, RecycledFirst, ResumePoints
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.windows import GroupWindows


class LatestFirst:
    """A policy as simple as can be, the opposite of recency."""

    def __init__(self, num_blocks: int) -> None:
        self._cached: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def blocks(self) -> Blocks:
        return np.array(list(self._cached), dtype=np.int32)[::-1]

    def peek(self, count: int) -> Blocks:
        return self.blocks()[:count]

    def pop(self, count: int) -> Blocks:
        blocks = self.peek(count)
        self.remove(blocks)
        return blocks

    def put_back(self, blocks: Blocks) -> None:
        self.released(blocks[::-1])

    def released(self, blocks: Blocks) -> None:
        self._cached |= dict.fromkeys(blocks.tolist())

    recycled = copied = released

    def need(self, blocks: Blocks) -> None:
        pass

    def touch(self, blocks: Blocks) -> None:
        self.remove(blocks)
        self.released(blocks)

    def remove(self, blocks: Blocks) -> None:
        for block in blocks.tolist():
            del self._cached[block]

    def replace(self, old: Blocks, new: Blocks) -> None:
        self.remove(old)

    def forget(self, blocks: Blocks) -> None:
        pass

    def check_integrity(self, known: NDArray[np.bool_]) -> None:
        assert known[self.blocks()].all()


POLICIES = {RecycledFirst: [0, 1, 2, 3], LatestFirst: [3, 2, 1, 0]}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_gives_up_the_blocks_that_its_policy_names(policy: type[EvictionPolicy]) -> None:
    evicted: list[int] = []
    pool = BlockPool(4, lambda blocks: evicted.extend(blocks.tolist()), policy)
    blocks = np.sort(pool.allocate(4))
    pool.register(blocks)
    pool.release(blocks)
    pool.check_integrity()
    assert pool.cached_blocks.tolist() == POLICIES[policy]
    pool.allocate(4)
    assert evicted == POLICIES[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_of_use_again_counts_as_released_last(policy: type[EvictionPolicy]) -> None:
    pool = BlockPool(4, lambda blocks: None, policy)
    blocks = np.sort(pool.allocate(4))
    pool.register(blocks)
    pool.release(blocks[:3])
    pool.touch(blocks[[1, 3]])  # the last is held
    pool.release(blocks[3:])
    pool.check_integrity()
    assert pool.cached_blocks.tolist() == {RecycledFirst: [0, 2, 1, 3], LatestFirst: [3, 1, 2, 0]}[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_keeps_its_books_whatever_its_policy(policy: type[EvictionPolicy]) -> None:
    policies = (FULL, HeadPolicy(window=5))
    cache = CacheManager(
        policies, block_size=4, num_blocks=14, max_rows=2, max_blocks=5, step_tokens=8, eviction=policy
    )
    rng, row = np.random.default_rng(1), np.array([0], dtype=np.int32)
    for _ in range(50):
        path = [bytes([int(rng.integers(3)), depth]) for depth in range(5)]
        path = [b"".join(path[: depth + 1]) for depth in range(5)]
        match = cache.match(path, 19)
        cache.adopt(0, match, 20)
        for depth in range(match.num_blocks, 5):
            assert cache.extend(row, np.array([4 * depth + 4]))
            cache.register([0], [path[: depth + 1]])
            cache.recycle(row, np.array([4 * depth + 4]))
        cache.check_integrity()
        cache.release(0)
        cache.check_integrity()
    assert cache.stats().evicted_blocks


def test_blocks_are_needed_in_the_windows_at_which_a_request_may_resume_only() -> None:
    points = ResumePoints(1, GroupWindows([FULL, HeadPolicy(window=9)], 4), slack=6)
    points.open(0, reached=5, prompt_blocks=20)
    columns = np.arange(30)
    inside = np.flatnonzero(points.are_inside(np.zeros(30, dtype=np.int32), np.ones(30, dtype=np.int64), columns))
    # Behind 20 tokens a window of 9 sees from token 12 on; behind a prompt of 80, and up to 6 before, from token 66 on.
    assert inside.tolist() == [3, 4, 16, 17, 18, 19]
