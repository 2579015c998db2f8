from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.eviction import EvictionOrder

BLOCKS = 12
some_blocks = st.lists(st.integers(0, BLOCKS - 1), unique=True)


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


class EvictionMachine(RuleBasedStateMachine):
    """Against two ordered dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder(BLOCKS)
        self.first: OrderedDict[int, None] = OrderedDict()
        self.others: OrderedDict[int, None] = OrderedDict()

    @property
    def expected(self) -> list[int]:
        return [*self.first, *self.others]

    @rule(blocks=some_blocks, first=st.booleans())
    def append(self, blocks, first) -> None:
        new = [block for block in blocks if block not in self.expected]
        self.order.append(ids(*new), first=first)
        (self.first if first else self.others).update(dict.fromkeys(new))

    @rule(blocks=some_blocks)
    def remove(self, blocks) -> None:
        there = [block for block in blocks if block in self.expected]
        self.order.remove(ids(*there))
        for block in there:
            (self.first if block in self.first else self.others).pop(block)

    @rule(count=st.integers(0, BLOCKS))
    def pop(self, count) -> None:
        count = min(count, len(self.expected))
        expected = self.expected[:count]
        assert self.order.pop(count).tolist() == expected
        for block in expected:
            (self.first if block in self.first else self.others).pop(block)

    @rule(count=st.integers(0, BLOCKS))
    def peek(self, count) -> None:
        assert self.order.peek(count).tolist() == list(self.others)[:count]

    @invariant()
    def both_agree(self) -> None:
        assert self.order.blocks().tolist() == self.expected
        assert len(self.order) == len(self.expected)
        assert self.order._entries <= 2 * BLOCKS


TestEvictionMachine = EvictionMachine.TestCase
TestEvictionMachine.settings = settings(max_examples=60, stateful_step_count=60)


@pytest.mark.parametrize("count", [1, 7, 300])
def test_a_long_chunk_that_has_gaps_is_taken_piece_by_piece_in_order(count: int) -> None:
    order = EvictionOrder(2_000)
    order.append(np.arange(1_500, dtype=np.int32))
    order.append(np.arange(1_500, 2_000, dtype=np.int32))
    order.remove(np.arange(3, 1_200, dtype=np.int32))
    order.remove(np.arange(1_201, 1_990, 2, dtype=np.int32))
    left = order.blocks().tolist()
    popped: list[int] = []
    while len(order):
        popped += order.pop(min(count, len(order))).tolist()
        assert order.blocks().tolist() == left[len(popped) :]
    assert popped == left


def test_what_is_asked_for_beyond_the_pool_is_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(3, on_evict=lambda blocks: None)
    with pytest.raises(ValueError, match="4 blocks were asked for, 3 of 3 are available"):
        pool.allocate(4)
    assert pool.num_available == 3
    with pytest.raises(ValueError, match="at least one block, got 0"):
        BlockPool(0, on_evict=lambda blocks: None)


@pytest.mark.parametrize("how", ["release", "recycle"])
def test_one_release_too_many_is_an_error_and_changes_nothing(how) -> None:
    pool = BlockPool(3, on_evict=lambda blocks: None)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="released more often"):
        getattr(pool, how)(ids(*held.tolist(), 2 if 2 not in held else 0))
    assert pool.num_held == 2
    pool.check_integrity()


def test_rows_that_share_a_block_may_recycle_it_at_once() -> None:
    pool = BlockPool(3, on_evict=lambda blocks: None)
    shared = pool.allocate(1)
    pool.register(shared)
    pool.retain(shared)
    pool.recycle(np.concatenate([shared, shared]))
    assert pool.cached_blocks.tolist() == shared.tolist()
    pool.check_integrity()


def test_blocks_of_value_are_not_evicted_before_the_others() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=lambda blocks: evicted.extend(blocks.tolist()))
    blocks = pool.allocate(4)
    pool.register(blocks)
    pool.value(blocks[:1])
    pool.release(blocks[3:])
    pool.recycle(blocks[:3])
    pool.allocate(4)
    assert evicted == [*blocks[1:3].tolist(), int(blocks[3]), int(blocks[0])]
