"""Ranks that keep tokens together: each token is on one of them, and blocks have as many bytes less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare


@given(tokens=st.integers(0, 300), parts=st.integers(1, 9))
def test_each_token_is_one_ranks_and_counts_are_of_those(tokens: int, parts: int) -> None:
    positions, shares = np.arange(tokens), [TokenShare.of_rank(rank, parts) for rank in range(parts)]
    held = np.array([share.has(positions) for share in shares])
    assert (held.sum(axis=0) == 1).all()
    for share, own in zip(shares, held, strict=True):
        assert share.count(tokens) == own.sum()
        np.testing.assert_array_equal(share.count(positions + 1), np.cumsum(own))
        np.testing.assert_array_equal(positions[own] // parts, np.arange(own.sum()))  # places have no gaps


def test_neighbours_keep_tokens_together() -> None:
    assert [TokenShare.of_rank(rank, 2).part for rank in range(4)] == [0, 1, 0, 1]
    assert TokenShare() == ALL_TOKENS


ROLES = Role("latent", (48,), "bfloat16"), Role("latent_scale", (), "float32")


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_a_block_has_the_bytes_of_a_ranks_own_tokens(parts: int) -> None:
    layout = BlockLayout(64, 3, ROLES, tail_bytes=64, parts=parts)
    assert layout.own_tokens == 64 // parts
    assert layout.slot_bytes == 96 * 64 // parts + max(64, 4 * 64 // parts)
    own = layout.own
    assert (own.block_size, own.parts) == (layout.own_tokens, 1)
    assert (own.block_bytes, own.slot_bytes, own.role_offsets) == (
        layout.block_bytes,
        layout.slot_bytes,
        layout.role_offsets,
    )
    assert layout.own is own, "kernels know layouts by what they are"


def test_blocks_of_other_tokens_have_other_names() -> None:
    whole, half, short = (BlockLayout(*of, 3, ROLES, parts=parts) for of, parts in (((64,), 1), ((64,), 2), ((32,), 1)))
    assert half.block_bytes == short.block_bytes
    assert len({layout.identity for layout in (whole, half, short)}) == 3
    assert len({layout.slot_identity for layout in (whole, half, short)}) == 3
    assert BlockLayout(64, 3, ROLES).identity == "v1/b64/s3/a64/latent:48:bfloat16,latent_scale::float32"


def test_copies_are_counted_by_what_each_rank_has() -> None:
    """Of two layers with one head each on four ranks, one with a window: two have parts of the other one's tokens."""
    policies = [[FULL], [HeadPolicy(window=64)]]
    plan = plan_head_groups(policies, 4, sizes=[32, 64])
    assert plan.copies == 4
    assert plan.copies_beside([2, 1]) == 4 * (32 + 64) / (2 * 32 + 64)
