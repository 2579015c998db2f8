"""What a sequence takes of a cache whose page is one layer's: what head groups are compared with.

A server that keeps layers apart, and all of them in one pool, must make their pages equal. It may

    pad:      every page has the bytes of the largest layer's, of as many tokens; a state is one page
    lengthen: a small page has so many times the tokens that it has the bytes of the largest, where these divide; else
              it is padded. Beside states, pages of attention get so many tokens, a multiple of 16, that a state fits,
              and a state's page is padded to that. vLLM does so (`unify_kv_cache_spec_page_size`,
              `_align_hybrid_block_size`)

Either way layers of a kind (bytes and policy) are dealt to groups of equally many: as many as the rarest kind has, or
as the most frequent one where that is less than a quarter more. The last group of a kind is filled up with layers that
nobody has (vLLM's `_get_kv_cache_groups_uniform_page_size`). Pages that a window has left are given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwise.cache_controller.head_groups import HeadGroupPlan
from headwise.cache_controller.planner import Policies, loosest
from headwise.cache_controller.policy import HeadPolicy
from headwise.cache_controller.windows import GroupWindows

STATE_ALIGNMENT = 16
"""Tokens that a page of attention beside states is a multiple of."""

_FEW_MORE = 1.25
"""The most frequent kind sets the size of groups where it has less than this times the layers of the rarest."""


@dataclass(frozen=True)
class LayerMemory:
    """What one rank keeps for a layer.

    policy:     the loosest of its members: a layer's pages are given back as one
    page_bytes: of a page of `UnifiedPages.block_size` tokens
    """

    policy: HeadPolicy
    page_bytes: int


@dataclass(frozen=True)
class UnifiedPages:
    """The cache of one rank.

    layers:     those with attention of their own
    states:     bytes of the state of every layer that keeps one
    block_size: tokens of the largest layer's page
    in_flight:  tokens of a sequence in steps under way
    """

    layers: Sequence[LayerMemory]
    states: Sequence[int]
    block_size: int
    in_flight: int

    def padded_bytes(self, tokens: int) -> int:
        """Of a sequence of so many tokens, with every page padded to the largest."""
        largest = max(*(layer.page_bytes for layer in self.layers), *self.states, 0)
        return largest * self._pages(tokens, dict.fromkeys(self.layers, self.block_size))

    def lengthened_bytes(self, tokens: int) -> int:
        """The same, with pages of more tokens where they are small."""
        lengths = self.page_tokens()
        page = max(length * layer.page_bytes for layer, length in lengths.items()) // self.block_size
        return page * self._pages(tokens, lengths)

    def page_tokens(self) -> dict[LayerMemory, int]:
        """Tokens of each kind of layer's lengthened page."""
        largest = max(layer.page_bytes for layer in self.layers)
        length = self.block_size
        if self.states:
            length = STATE_ALIGNMENT * -(-max(self.states) * self.block_size // (STATE_ALIGNMENT * largest))
        return {
            layer: length * (1 if largest % layer.page_bytes else largest // layer.page_bytes) for layer in self.layers
        }

    def _pages(self, tokens: int, lengths: dict[LayerMemory, int]) -> int:
        kinds = Counter(self.layers)
        counts = [*kinds.values(), *([len(self.states)] if self.states else [])]
        size = max(counts) if max(counts) < _FEW_MORE * min(counts) else min(counts)

        def filled_up(count: int) -> int:
            return -(-count // size) * size

        pages = filled_up(len(self.states))
        for layer, count in kinds.items():
            windows = GroupWindows([layer.policy], lengths[layer])
            pages += filled_up(count) * int(windows.peak_blocks(tokens, self.in_flight))
        return pages


def unified_pages(
    plan: HeadGroupPlan, policies: Policies, block_size: int, in_flight: int, states: Sequence[int] = ()
) -> UnifiedPages:
    """Those of a planned model: ``plan.sizes`` are bytes of ``block_size`` tokens, or of a state.

    states: others than the plan has
    """
    rows = [
        (loosest(row), size * len(heads))
        for row, size, heads in zip(policies, plan.sizes, plan.kv_heads(0), strict=True)
        if heads
    ]
    layers = [LayerMemory(policy, size) for policy, size in rows if not policy.is_state]
    own = [size for policy, size in rows if policy.is_state]
    return UnifiedPages(layers, [*own, *states], block_size, in_flight)


def planned_bytes(plan: HeadGroupPlan, kept: Sequence[HeadPolicy], tokens: int, block_size: int, in_flight: int) -> int:
    """Of one rank's blocks of head groups, what a sequence of so many tokens takes; ``kept`` of each group."""
    blocks = GroupWindows(kept, block_size).peak_blocks(np.int64(tokens), in_flight)
    return int(blocks) * plan.block_bytes
