from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.windows import first_live_block, next_recycling, peak_blocks, sink_blocks

windows = st.builds(HeadPolicy, window=st.integers(1, 50), sink=st.integers(0, 20))


@given(windows, st.integers(0, 200), st.integers(1, 9))
def test_the_first_live_block_is_the_first_with_a_token_that_the_next_query_sees(policy, tokens, block) -> None:
    seen = [k for k in range(tokens + 1) if tokens - k < policy.window]
    assert first_live_block(policy, tokens, block) == min(seen) // block


@given(windows, st.integers(0, 200), st.integers(1, 9))
def test_next_recycling_is_when_the_first_live_block_moves(policy, tokens, block) -> None:
    at = next_recycling(policy, tokens, block)
    assert at > tokens
    now = first_live_block(policy, tokens, block)
    assert first_live_block(policy, at - 1, block) == now
    assert first_live_block(policy, at, block) == now + 1


@given(windows, st.integers(1, 300), st.integers(1, 9), st.integers(1, 12))
def test_peak_blocks_bounds_a_sequence_that_grows_in_steps(policy, tokens, block, step) -> None:
    peak = peak_blocks(policy, tokens, block, step)
    for done in range(0, tokens, step):
        last = -(-min(done + step, tokens) // block)
        live = first_live_block(policy, done, block)
        held = last - live + min(sink_blocks(policy, block), live)
        assert held <= peak
    assert peak_blocks(FULL, tokens, block, step) == -(-tokens // block)
