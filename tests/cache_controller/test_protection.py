"""Protected blocks go last, as long as they are: against a model that takes one block after the other."""

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.eviction import Blocks, EvictionPolicy, RecycledFirst
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.protection import LOOK_S, ProtectedLast

BLOCKS = 12


def of(*blocks: int) -> Blocks:
    return np.array(blocks, dtype=np.int32)


class Protection(RuleBasedStateMachine):
    """``order``: cached blocks that are not set aside, the next first; ``aside``: those that are, the longest first."""

    @initialize(share=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def start(self, share: float) -> None:
        self.policy = ProtectedLast(RecycledFirst(BLOCKS), BLOCKS, share)
        self.most = int(share * BLOCKS)
        self.order: list[int] = []
        self.aside: list[int] = []
        self.until = dict.fromkeys(range(BLOCKS), -math.inf)
        self.now, self.looked_at = -math.inf, -math.inf

    def _some(self, data: st.DataObject, blocks: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(blocks), unique=True, max_size=5)) if blocks else []

    def _back(self, blocks: list[int]) -> None:
        self.aside = [block for block in self.aside if block not in blocks]
        self.order = [*blocks, *self.order]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self._some(data, sorted(set(range(BLOCKS)) - {*self.order, *self.aside}))
        self.policy.released(of(*blocks))
        self.order += blocks

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        blocks = self._some(data, [*self.order, *self.aside])
        self.policy.remove(of(*blocks))
        self.order = [block for block in self.order if block not in blocks]
        self.aside = [block for block in self.aside if block not in blocks]

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = self._some(data, [*self.order, *self.aside])
        self.policy.touch(of(*blocks))
        self._back([block for block in blocks if block in self.aside])
        self.order = [*(block for block in self.order if block not in blocks), *blocks]

    @rule(data=st.data(), seconds=st.integers(-1, 9))
    def protect(self, data: st.DataObject, seconds: int) -> None:
        blocks, until = self._some(data, list(range(BLOCKS))), max(self.now, 0.0) + seconds
        self.policy.protect(of(*blocks), until)
        if self.most:
            self.until |= {block: max(self.until[block], until) for block in blocks}

    @rule(data=st.data())
    def unprotect(self, data: st.DataObject) -> None:
        blocks = self._some(data, list(range(BLOCKS)))
        self.policy.unprotect(of(*blocks))
        self.until |= dict.fromkeys(blocks, -math.inf)
        self._back([block for block in blocks if block in self.aside])

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now = max(self.now, 0.0) + seconds
        self.policy.advance(self.now)
        if self.aside and self.now >= self.looked_at + LOOK_S:
            self.looked_at = self.now
            self._back([block for block in self.aside if self.until[block] <= self.now])

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        cached, free = [*self.order, *self.aside], sorted(set(range(BLOCKS)) - {*self.order, *self.aside})
        if cached and free:
            old, new = data.draw(st.sampled_from(cached)), data.draw(st.sampled_from(free))
            self.policy.replace(of(old), of(new))
            self.until |= {new: self.until[old], old: -math.inf}
            self.order = [block for block in self.order if block != old]
            self.aside = [block for block in self.aside if block != old]

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        count = int(share * (len(self.order) + len(self.aside)))
        gone: list[int] = []
        while len(gone) < count:
            if not self.order:
                gone.append(self.aside.pop(0))
                continue
            block = self.order.pop(0)
            if self.until[block] <= self.now:
                gone.append(block)
                continue
            self.aside.append(block)
            if len(self.aside) > self.most:
                gone.append(self.aside.pop(0))
        popped = self.policy.pop(count)
        self.policy.forget(popped)
        self.until |= dict.fromkeys(gone, -math.inf)
        assert sorted(popped.tolist()) == sorted(gone)

    @rule(count=st.integers(0, BLOCKS))
    def look(self, count: int) -> None:
        kept = [block for block in self.order if self.until[block] > self.now]
        others = [block for block in self.order if block not in kept]
        assert self.policy.blocks().tolist() == [*others, *self.aside, *kept]
        if self.now < max(self.until.values()):
            assert self.policy.peek(count).tolist() == [*others, *self.aside, *kept][:count]

    @invariant()
    def books_agree(self) -> None:
        known = np.ones(BLOCKS, dtype=np.bool_)
        self.policy.check_integrity(known)
        assert len(self.policy) == len(self.order) + len(self.aside)
        assert self.policy.num_protected == sum(until > self.now for until in self.until.values())


TestProtection = Protection.TestCase
TestProtection.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def pool_of(
    num_blocks: int, share: float = 0.5, eviction: type[EvictionPolicy] = RecycledFirst
) -> tuple[BlockPool, Blocks]:
    """A pool of which all blocks are cached, in their order."""
    pool = BlockPool(num_blocks, lambda blocks: None, eviction, share)
    blocks = np.sort(pool.allocate(num_blocks))
    pool.register(blocks)
    pool.release(blocks)
    pool.advance(0.0)
    return pool, blocks


def test_what_is_protected_goes_when_nothing_else_is_left() -> None:
    pool, blocks = pool_of(8)
    pool.protect(blocks[:3], 10.0)
    assert sorted(pool.allocate(5).tolist()) == [3, 4, 5, 6, 7]
    assert (pool.num_protected, pool.num_cached) == (3, 3)
    assert sorted(pool.allocate(3).tolist()) == [0, 1, 2]
    assert pool.num_protected == 0
    pool.check_integrity()


def test_no_more_than_its_share_is_kept_in_place_of_others() -> None:
    pool, blocks = pool_of(8, share=0.25)
    pool.protect(blocks[:6], 10.0)
    assert sorted(pool.allocate(6).tolist()) == [0, 1, 2, 3, 6, 7]  # the longest unused of the six are gone
    pool, blocks = pool_of(4, share=0.0)
    pool.protect(blocks, 10.0)
    assert pool.num_protected == 0


def test_what_was_protected_goes_next_as_the_longest_unused() -> None:
    pool, blocks = pool_of(8)
    pool.protect(blocks[:2], 10.0)
    pool.register(others := pool.allocate(2))  # 2 and 3 go in their place
    pool.release(others)
    pool.advance(10.0)
    assert sorted(pool.allocate(2).tolist()) == [0, 1]
    pool.check_integrity()


def test_protection_ends_with_what_a_block_holds() -> None:
    pool, blocks = pool_of(4)
    pool.protect(blocks, 10.0)
    pool.evict_all()
    pool.register(again := pool.allocate(4))
    pool.release(again)
    assert pool.num_protected == 0


def test_blocks_that_hold_nothing_worth_keeping_are_not_protected() -> None:
    pool = BlockPool(2, lambda blocks: None)
    pool.advance(0.0)
    pool.protect(pool.allocate(2), 10.0)
    assert pool.num_protected == 0


class Counted(RecycledFirst):
    """Counts how often it is asked which blocks go."""

    asked = 0

    def pop(self, count: int) -> Blocks:
        type(self).asked += 1
        return super().pop(count)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_many_protected_blocks_cost_few_looks(share: float) -> None:
    pool, blocks = pool_of(100_000, share, Counted)
    pool.protect(blocks[: len(blocks) // 2], 10.0)
    before = Counted.asked
    for _ in range(100):
        pool.allocate(1)
    assert Counted.asked - before < 2 * 100 + len(blocks) // 256
    assert pool.num_cached == len(blocks) - 100


def test_of_a_path_is_protected_what_a_query_behind_it_sees() -> None:
    """All that full heads have, and of a window its sink and end, though the blocks between are still cached."""
    policies = (FULL, HeadPolicy(window=5, sink=1))
    cache = CacheManager(policies, block_size=4, num_blocks=40, max_rows=1, max_blocks=9, step_tokens=4, resume_slack=0)
    path, row = [bytes([depth]) * 16 for depth in range(8)], np.zeros(1, dtype=np.int32)
    cache.adopt(0, cache.match([], 0), 33)
    for depth in range(1, 9):
        assert cache.extend(row, np.array([4 * depth]))
        cache.register([0], [path[:depth]])
        cache.recycle(row, np.array([4 * depth]))
    cache.advance(0.0)
    cache.protect(path, 10.0)
    cache.release(0)
    assert cache.pool.num_cached == 16
    assert cache.pool.num_protected == 8 + 1 + 1
    cache.protect(path[:4], 10.0)
    assert cache.pool.num_protected == 8 + 1 + 1 + 1, "and the window's end there"
