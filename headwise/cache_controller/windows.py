"""Which token blocks of a sequence each head group still needs: the arithmetic of windows, sinks and states.

A group of states has, in the column of a token block, the state behind that block's last token, or behind the
sequence's last one: so it needs what a window of two tokens does, of which a query's own is one. Unlike a window's,
most of its columns never hold anything: see `states.StateColumns`.

Everything takes one number of tokens or an array of them, and answers for all groups at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headwise.cache_controller.policy import HeadPolicy

UNBOUNDED = 1 << 40
"""The window of a full group: longer than any sequence, so that one formula serves all groups."""

STATE_WINDOW = 2
"""Of a group of states: what is computed next needs the token before it, which the state stands for."""


def num_blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


class GroupWindows:
    """The windows and sinks of an engine's head groups.

    window:      ``int64 [groups]``, `UNBOUNDED` for full groups, `STATE_WINDOW` for states
    sink_blocks: ``int64 [groups]``, leading blocks that hold a sink token
    seen_blocks: ``int64 [groups]``, of whole blocks the last ones that a query right behind them sees
    """

    def __init__(self, policies: Sequence[HeadPolicy], block_size: int) -> None:
        self.block_size = block_size
        self.is_full = np.array([policy.is_full for policy in policies])
        self.is_state = np.array([policy.is_state for policy in policies])
        windows = [STATE_WINDOW if policy.is_state else policy.window or UNBOUNDED for policy in policies]
        self.window = np.array(windows, dtype=np.int64)
        self.sink_blocks = -(-np.array([policy.sink for policy in policies], dtype=np.int64) // block_size)
        self.seen_blocks = -(-(self.window - 1) // block_size)

    def first_live(self, tokens: ArrayLike) -> NDArray[np.int64]:
        """``[..., groups]``: first block behind the sink that the query at position ``tokens``, or a later one, sees.

        Block ``i`` is dead iff its last token ``(i + 1) * block_size - 1 <= tokens - window``.
        """
        behind = np.asarray(tokens, dtype=np.int64)[..., None] - (self.window - 1)
        live: NDArray[np.int64] = np.maximum(0, behind // self.block_size)
        return live

    def next_recycling(self, first_live: NDArray[np.int64]) -> NDArray[np.int64]:
        """``[...]``: the number of tokens at which some group's ``first_live [..., groups]`` next grows."""
        grows: NDArray[np.int64] = (first_live + 1) * self.block_size + (self.window - 1)
        return np.asarray(grows.min(axis=-1))

    def peak_blocks(self, tokens: ArrayLike, in_flight: ArrayLike, state_copies: int = 1) -> NDArray[np.int64]:
        """``[...]``: most blocks, over all groups, of a sequence that grows to ``tokens`` tokens.

        A window group holds its sink, and the blocks that the window and the ``in_flight`` tokens of steps under way
        reach into; the rest is recycled.

        state_copies: of each state: 2 for one that goes on from a checkpoint which others may hold
        """
        whole = -(-np.asarray(tokens, dtype=np.int64)[..., None] // self.block_size)
        reach = self.window - 1 + np.asarray(in_flight, dtype=np.int64)[..., None]
        window = -(-reach // self.block_size) + 1
        window = np.where(self.is_state, state_copies, window)
        return np.asarray(np.minimum(whole, self.sink_blocks + window).sum(axis=-1))


def column_spans(first: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The columns ``first[i] .. last[i] - 1`` of each i, one after the other: (i, column) of each."""
    if len(first) == 1:
        columns = np.arange(first[0], last[0])
        return np.zeros(len(columns), dtype=np.int64), columns
    counts = last - first
    index = np.repeat(np.arange(len(first)), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return index, first[index] + within
