"""What arrives of another engine's blocks is the right member's, whatever the ranks on either side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.head_exchange import Arrangement, HeadExchange
from headwise.cache_controller.head_groups import HeadGroupPlan, Member
from headwise.cache_controller.layout import BlockLayout, Role
from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, STATE, HeadPolicy

WINDOW, STREAMING = HeadPolicy(window=8), HeadPolicy(window=4, sink=2)
POISON = 0
"""No byte of a member is that."""

LAYERS = {
    "full": (32, [FULL] * 4),
    "mixed": (32, [FULL, STREAMING, WINDOW, STREAMING]),
    "local": (16, [WINDOW] * 8),
    "wide": (48, [FULL] * 4),
    "state": (64, [STATE] * 4),
    "shared": (32, []),
    "few": (32, [FULL] * 2),
    "few local": (48, [STREAMING] * 2),
    "few mixed": (32, [WINDOW, FULL]),
    "one": (96, [WINDOW]),
}
"""Bytes of a slot, and the policies of a layer's members. A shared layer keeps nothing.

Where there are more ranks than members, several have each.
"""


def arrangement(policies, sizes, tp_size: int, grouping="auto", *, is_replicated: bool = False) -> Arrangement:
    plan = plan_head_groups(policies, tp_size, grouping, sizes=sizes, is_replicated=is_replicated)
    return Arrangement(plan, tuple(sizes), plan.block_bytes, tuple(f"{size} bytes" for size in sizes))


def content(member: Member, size: int) -> np.ndarray:
    return np.random.default_rng([*member]).integers(1, 256, size, dtype=np.uint8)


def blocks_of(kept: Arrangement, rank: int) -> np.ndarray:
    """``[groups, block_bytes]``: one block of each group with its members' content."""
    blocks = np.full((len(kept.plan.groups), kept.block_bytes), POISON, dtype=np.uint8)
    for index, group in enumerate(kept.plan.groups):
        of_group = [(size, 0) for size in {*kept.slot_bytes}]
        taken = dict(of_group if not group.runs else ((run.size, run.begin) for run in group.runs))
        for member in group.members[rank]:
            size = kept.slot_bytes[member.layer]
            blocks[index, taken[size] : taken[size] + size] = content(member, size)
            taken[size] += size
    return blocks


def assert_all_arrives(ours: Arrangement, owner: Arrangement) -> None:
    exchange = HeadExchange(ours, owner)
    theirs = [blocks_of(owner, rank) for rank in range(owner.plan.tp_size)]
    for rank in range(ours.plan.tp_size):
        arrived = np.full((len(ours.plan.groups), ours.block_bytes), POISON, dtype=np.uint8)
        for group, owner_group, owner_rank, first, to, count in exchange.pieces(rank).tolist():
            assert exchange.needs[group, owner_group]
            assert not arrived[group, to : to + count].any(), "written once"
            arrived[group, to : to + count] = theirs[owner_rank][owner_group, first : first + count]
        assert (arrived == blocks_of(ours, rank)).all()


@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=10).filter(lambda kinds: set(kinds) != {"shared"}),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
)
def test_every_member_arrives_in_its_slot_and_nothing_else_does(kinds, here, there, is_replicated) -> None:
    if 8 in (here, there):
        kinds = ["one" if kind == "state" else kind for kind in kinds]  # four states, which are not shared
    sizes, policies = zip(*(LAYERS[kind] for kind in kinds), strict=True)
    ours, owner = (arrangement(policies, sizes, ranks, is_replicated=is_replicated) for ranks in (here, there))
    assert_all_arrives(ours, owner)


@given(
    st.sampled_from([2, 4]).flatmap(
        lambda heads: st.lists(
            st.lists(st.sampled_from([FULL, WINDOW, STREAMING]), min_size=heads, max_size=heads),
            min_size=1,
            max_size=8,
        )
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["auto", "per_head_index"]),
)
def test_patterns_that_differ_from_layer_to_layer_arrive_whichever_way_they_are_grouped(
    policies, here, there, grouping
) -> None:
    sizes = [32] * len(policies)
    assert_all_arrives(arrangement(policies, sizes, here, grouping), arrangement(policies, sizes, there))


@pytest.mark.parametrize("ranks", [1, 3])
def test_with_as_many_ranks_each_takes_whole_blocks_of_its_like(ranks) -> None:
    ours = arrangement([[FULL, WINDOW, WINDOW] * 3] * 4, [32] * 4, ranks)
    exchange = HeadExchange(ours, ours)
    groups = len(ours.plan.groups)
    assert (exchange.needs == np.eye(groups, dtype=bool)).all()
    assert exchange.pieces(ranks - 1).tolist() == [[g, g, ranks - 1, 0, 0, ours.block_bytes] for g in range(groups)]


def test_one_rank_takes_each_head_of_three_from_the_one_that_has_it() -> None:
    ours, owner = (arrangement([[FULL] * 3] * 2, [32] * 2, ranks) for ranks in (1, 3))
    pieces = HeadExchange(ours, owner).pieces(0)
    assert pieces[:, 2].tolist() == [0, 1, 2, 0, 1, 2]
    assert pieces[:, 4].tolist() == [0, 32, 64, 96, 128, 160], "one block, filled from the first to the last byte"


def test_ranks_that_all_have_a_latent_are_asked_in_turn() -> None:
    ours, owner = (arrangement([[FULL]] * 3, [32] * 3, ranks, is_replicated=True) for ranks in (4, 2))
    exchange = HeadExchange(ours, owner)
    assert [exchange.pieces(rank)[:, 2].tolist() for rank in range(4)] == [[0], [1], [0], [1]]
    assert exchange.pieces(0)[:, 5].tolist() == [96], "members that lie together are one piece"


def test_members_of_two_sizes_that_live_together_arrive_in_their_parts_of_a_block() -> None:
    """Latents that all ranks have, and heads that are dealt to them."""
    sizes, policies = [32, 16, 32, 16], [[FULL] * 4] * 4
    ours, owner = (arrangement(policies, sizes, ranks) for ranks in (1, 4))
    assert [run.begin for run in ours.plan.groups[0].runs] == [0, 8 * 32]
    assert [run.begin for run in owner.plan.groups[0].runs] == [0, 2 * 32]
    assert_all_arrives(ours, owner)
    assert_all_arrives(owner, ours)
    alike = [arrangement([[FULL]] * 4, sizes, ranks, is_replicated=True) for ranks in (2, 8)]
    assert HeadExchange(*alike).pieces(1).tolist() == [[0, 0, 1, 0, 0, 96]], "one piece"


def test_ranks_that_share_a_head_are_asked_in_turn() -> None:
    """Of eight that keep two heads: by each of two, and by one for each of its groups."""
    policies = [[FULL] * 2, *[[WINDOW] * 2] * 3]
    one, two, eight = (arrangement(policies, [32] * 4, ranks) for ranks in (1, 2, 8))
    groups = range(len(two.plan.groups))
    assert [HeadExchange(two, eight).pieces(rank)[:, 2].tolist() for rank in range(2)] == [
        [group % 4 for group in groups],
        [4 + (1 + group) % 4 for group in groups],
    ]
    assert len({*HeadExchange(one, eight).pieces(0)[:, 2].tolist()}) == min(8, 2 * len(one.plan.groups))
    assert [{*HeadExchange(eight, two).pieces(rank)[:, 2].tolist()} for rank in range(8)] == [{0}] * 4 + [{1}] * 4


def test_what_cannot_be_exchanged_says_why() -> None:
    ours = arrangement([[FULL] * 2] * 2, [32] * 2, 1)
    two = arrangement([[FULL] * 2] * 2, [32] * 2, 2)
    with pytest.raises(ValueError, match=r"layer 0 has 32 bytes here and other there"):
        HeadExchange(ours, replace(two, identities=("other", "other")))
    with pytest.raises(ValueError, match=r"4 members of 2 layers here and 6 of 3 there are not the same ones"):
        HeadExchange(ours, arrangement([[FULL] * 2] * 3, [32] * 3, 2))
    with pytest.raises(ValueError, match=r"4 members of 2 layers here and 8 of 2 there"):
        HeadExchange(ours, arrangement([[FULL] * 4] * 2, [32] * 2, 2))
    with pytest.raises(ValueError, match="is a state on one side only"):
        HeadExchange(ours, arrangement([[STATE] * 2] * 2, [32] * 2, 2))


def test_slots_are_told_apart_by_all_that_their_bytes_depend_on() -> None:
    layout = BlockLayout(64, 4, (Role("key", (8,), "float32"), Role("value", (8,), "float32")))
    plan = HeadGroupPlan(
        (layout.slot_bytes,), layout.block_bytes, 1, plan_head_groups([[FULL] * 4]).groups, (range(1),)
    )
    assert Arrangement.of(plan, [layout]).slot_bytes == (layout.slot_bytes,)
    assert replace(layout, slots=2, tail_bytes=64).slot_identity == layout.slot_identity
    others = [replace(layout, block_size=32), replace(layout, alignment=128)]
    others.append(replace(layout, roles=(Role("key", (8,), "bfloat16"), Role("value", (8,), "bfloat16"))))
    assert len({other.slot_identity for other in (layout, *others)}) == 4
