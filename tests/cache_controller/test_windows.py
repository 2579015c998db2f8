from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.windows import GroupWindows

windows = st.builds(HeadPolicy, window=st.integers(1, 50), sink=st.integers(0, 20))
policies = st.lists(windows | st.just(FULL), min_size=1, max_size=4)


def first_live(policy: HeadPolicy, tokens: int, block: int) -> int:
    """First block behind the sink that the query at position ``tokens`` sees, by looking at every token."""
    return min(k for k in range(tokens + 1) if policy.is_full or tokens - k < policy.window) // block


@given(policies, st.lists(st.integers(0, 200), max_size=4), st.integers(1, 9))
def test_the_first_live_block_is_the_first_with_a_token_that_the_next_query_sees(groups, tokens, block) -> None:
    live = GroupWindows(groups, block).first_live(np.array(tokens, dtype=np.int64))
    assert live.tolist() == [[first_live(policy, count, block) for policy in groups] for count in tokens]


@given(st.lists(windows, min_size=1, max_size=3), st.integers(0, 200), st.integers(1, 9))
def test_next_recycling_is_when_the_first_live_block_of_some_group_moves(groups, tokens, block) -> None:
    plan = GroupWindows(groups, block)
    at = int(plan.next_recycling(plan.first_live(tokens)))
    assert at > tokens
    now = plan.first_live(tokens).tolist()
    assert plan.first_live(at - 1).tolist() == now
    assert plan.first_live(at).tolist() != now


@given(policies, st.integers(1, 300), st.integers(1, 9), st.integers(1, 12))
def test_peak_blocks_bounds_a_sequence_that_grows_in_steps(groups, tokens, block, step) -> None:
    plan = GroupWindows(groups, block)
    peak = int(plan.peak_blocks(tokens, step))
    for done in range(0, tokens, step):
        last = -(-min(done + step, tokens) // block)
        held = sum(
            last if policy.is_full else last - live + min(-(-policy.sink // block), live)
            for policy, live in ((policy, first_live(policy, done, block)) for policy in groups)
        )
        assert held <= peak
    assert int(GroupWindows([FULL], block).peak_blocks(tokens, step)) == -(-tokens // block)
