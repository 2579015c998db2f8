"""Which token blocks of a sequence a head policy still needs: the arithmetic of windows and sinks."""

from __future__ import annotations

from headwise.cache_controller.policy import HeadPolicy


def num_blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def sink_blocks(policy: HeadPolicy, block_size: int) -> int:
    """Leading blocks that hold a sink token."""
    return num_blocks_for(policy.sink, block_size)


def first_live_block(policy: HeadPolicy, tokens: int, block_size: int) -> int:
    """First block behind the sink that the query at position ``tokens``, or a later one, may see.

    Block ``i`` is dead iff its last token ``(i + 1) * block_size - 1 <= tokens - window``.
    """
    if policy.is_full:
        return 0
    return max(0, (tokens - policy.window + 1) // block_size)


def next_recycling(policy: HeadPolicy, tokens: int, block_size: int) -> int:
    """The number of tokens at which `first_live_block` of a window policy next grows."""
    return (first_live_block(policy, tokens, block_size) + 1) * block_size + policy.window - 1


def peak_blocks(policy: HeadPolicy, tokens: int, block_size: int, in_flight: int) -> int:
    """Most blocks a group ever holds for a sequence that grows to ``tokens`` tokens.

    A window group holds its sink, and the blocks that the window and the ``in_flight`` tokens of steps under way reach
    into; the rest is recycled.
    """
    whole = num_blocks_for(tokens, block_size)
    if policy.is_full:
        return whole
    window = num_blocks_for(policy.window - 1 + in_flight, block_size) + 1
    return min(whole, sink_blocks(policy, block_size) + window)
