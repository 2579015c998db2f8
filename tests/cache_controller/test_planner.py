from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.head_groups import HeadGroup, HeadGroupPlan, Member, Sharing
from headwise.cache_controller.planner import MAX_PADDING, agreed_policies, can_be_dealt, loosest, plan_head_groups
from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.cache_controller.stages import deal_layers

WINDOW = HeadPolicy(window=512)
STREAMING = HeadPolicy(window=256, sink=64)


def test_a_uniform_model_is_one_group_which_is_classic_paged_attention() -> None:
    plan = plan_head_groups([[FULL] * 3] * 30)
    assert (plan.slots, len(plan.groups), plan.padding) == (90, 1, 0.0)


def test_gemma_3_270m_is_one_full_group_and_five_window_groups_of_three() -> None:
    policies = [[FULL if (layer + 1) % 6 == 0 else WINDOW] for layer in range(18)]
    plan = plan_head_groups(policies)
    assert plan.slots == 3
    assert plan.policies == (FULL, *[WINDOW] * 5)
    assert plan.padding == 0.0


def test_per_head_index_makes_one_group_per_kv_head_over_all_layers() -> None:
    plan = plan_head_groups([[FULL] * 4] * 28, tp_size=2, grouping="per_head_index")
    assert (plan.slots, len(plan.groups)) == (28, 2)
    assert plan.groups[1].members[1][5] == Member(5, 3)


def test_a_mixed_group_keeps_what_its_loosest_member_sees() -> None:
    plan = plan_head_groups([[STREAMING], [WINDOW]], grouping="per_head_index")
    assert plan.policies == (HeadPolicy(window=512, sink=64),)


def test_ranks_share_the_groups_when_half_of_the_heads_stream() -> None:
    policies = [[FULL, STREAMING] * 4 if layer % 2 else [STREAMING, FULL] * 4 for layer in range(32)]
    for tp_size in (1, 2, 4):
        plan = plan_head_groups(policies, tp_size)
        assert len(plan.groups) == 2
        assert plan.padding == 0.0


@pytest.mark.parametrize("tp_size", [3, 5, 7])
def test_a_tp_size_that_does_not_fit_says_which_do(tp_size: int) -> None:
    with pytest.raises(
        ValueError, match=rf"tp_size {tp_size} .* 8 KV heads; sizes that fit: \[1, 2, 4, 8\], and more than 8"
    ):
        plan_head_groups([[FULL] * 8], tp_size)


def test_sizes_must_fit_layers_of_every_number_of_heads() -> None:
    policies = [[FULL] * 6, [WINDOW] * 4]
    assert plan_head_groups(policies, 12).copies == (2 * 6 + 3 * 4) / 10
    assert plan_head_groups(policies, 6).copies == (6 + 6) / 10
    for size in (3, 4, 5):
        with pytest.raises(
            ValueError, match=rf"tp_size {size} .* 4 or 6 KV heads; sizes that fit: \[1, 2, 6\], and more than 6"
        ):
            plan_head_groups(policies, size)


def test_ranks_that_are_no_multiple_of_the_heads_keep_one_each_and_pad_nothing() -> None:
    plan = plan_head_groups([[FULL] * 4, [WINDOW, FULL, WINDOW, FULL]] * 4, 6)
    assert [plan.kv_heads(rank)[0] for rank in range(6)] == [(0,), (0,), (1,), (2,), (2,), (3,)]
    assert [plan.sharing(rank)[0] for rank in range(6)] == [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2), (0, 1)]
    assert (plan.copies, plan.padding) == (6 / 4, 0.0)


@given(st.integers(1, 64), st.integers(1, 16))
def test_query_heads_of_a_kv_head_are_dealt_as_equally_as_they_divide(count, ranks) -> None:
    parts = [Sharing(part, ranks).of(count) for part in range(ranks)]
    assert [head for part in parts for head in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_of_which_there_are_more_than_heads_share_them_in_order() -> None:
    plan = plan_head_groups([[FULL] * 2, [WINDOW] * 4, [], [FULL]], 4, sizes=[64, 32, 1, 64])
    assert [plan.kv_heads(rank) for rank in range(4)] == [
        ((0,), (0,), (), (0,)),
        ((0,), (1,), (), (0,)),
        ((1,), (2,), (), (0,)),
        ((1,), (3,), (), (0,)),
    ]
    assert [plan.sharing(rank) for rank in range(4)] == [
        ((0, 2), (0, 1), (0, 1), (0, 4)),
        ((1, 2), (0, 1), (0, 1), (1, 4)),
        ((0, 2), (0, 1), (0, 1), (2, 4)),
        ((1, 2), (0, 1), (0, 1), (3, 4)),
    ]
    assert plan.copies == (4 * 64 + 4 * 32 + 4 * 64) / (2 * 64 + 4 * 32 + 64)


def test_states_are_dealt_and_never_shared() -> None:
    plan = plan_head_groups([[STATE] * 4] * 3 + [[FULL]], 4, sizes=[64, 64, 64, 32])
    assert plan.sharing(3) == ((0, 1), (0, 1), (0, 1), (3, 4))
    assert plan.copies == 4, "of what a token takes"
    with pytest.raises(ValueError, match=r"tp_size 8 .* 1 or 4 KV heads; sizes that fit: \[1, 2, 4\]$"):
        plan_head_groups([[STATE] * 4] * 3 + [[FULL]], 8, sizes=[64, 64, 64, 32])


policies_of_a_model = st.integers(1, 4).flatmap(
    lambda heads: st.lists(
        st.lists(st.sampled_from([FULL, WINDOW, STREAMING]), min_size=heads, max_size=heads), min_size=1, max_size=12
    )
)


@given(policies_of_a_model, st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12]), st.sampled_from(["auto", "per_head_index"]))
def test_a_member_has_a_slot_on_each_rank_that_keeps_it_and_its_group_keeps_what_it_sees(
    policies, tp_size, grouping
) -> None:
    heads = len(policies[0])
    tp_size = tp_size if can_be_dealt(heads, tp_size) else heads
    plan = plan_head_groups(policies, tp_size, grouping)
    for rank in range(tp_size):
        seen = [member for group in plan.groups for member in group.members[rank]]
        assert len({*seen}) == len(seen)
    for group in plan.groups:
        assert len({len(rank) for rank in group.members}) == 1
        for rank in group.members:
            assert len(rank) <= plan.slots
            assert list(rank) == sorted(rank)
            for member in rank:
                _assert_keeps(group.policy, policies[member.layer][member.kv_head])
    _assert_ranks_have_equal_heads(plan, policies)
    assert plan.copies == max(1, tp_size / heads)
    if grouping == "auto":
        assert plan.padding <= MAX_PADDING


LAYERS = {"full": (512, [FULL] * 4), "local": (256, [WINDOW] * 8), "latent": (300, [FULL]), "shared": (512, [])}
"""A shared layer keeps nothing: it uses the cache of another one."""


@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 8, 16]), st.booleans()
)
def test_members_of_several_sizes_share_blocks_of_one_size(kinds, tp_size, is_replicated) -> None:
    sizes, policies = zip(*(LAYERS[kind] for kind in [*kinds, "local"]), strict=True)
    plan = plan_head_groups(policies, tp_size, sizes=sizes, is_replicated=is_replicated)
    filled = 0
    for group in plan.groups:
        for rank in group.members:
            (size,) = {sizes[member.layer] for member in rank}
            assert len(rank) <= group.slots == plan.block_bytes // size
            filled += size * len(rank)
            for member in rank:
                _assert_keeps(group.policy, policies[member.layer][member.kv_head])
    whole = plan.block_bytes * len(plan.groups) * tp_size
    assert plan.padding == (whole - filled) / filled
    heads = [plan.kv_heads(rank) for rank in range(tp_size)]
    for layer, row in enumerate(policies):
        dealt = sorted(head for rank in heads for head in rank[layer])
        copies = tp_size if is_replicated else max(1, tp_size // max(1, len(row)))
        assert dealt == sorted([*range(len(row))] * copies)


def test_members_that_live_together_are_one_group_whatever_their_sizes() -> None:
    """Latents of 78 layers, and keys of 21 indexers, in caches beside them."""
    sizes, layer_of = [1152] * 78 + [256] * 21, [*range(78), 0, 1, *range(5, 78, 4)]
    plan = plan_head_groups([[FULL]] * 99, 4, sizes=sizes, layer_of=layer_of, is_replicated=True)
    (group,) = plan.groups
    assert (plan.block_bytes, plan.padding, group.slots) == (78 * 1152 + 21 * 256, 0, 99)
    assert group.runs == ((1152, 0, 78), (256, 78 * 1152, 21))
    assert [plan.placement(3, cache).tolist() for cache in (77, 78, 98)] == [[[0, 77]], [[0, 0]], [[0, 20]]]
    assert plan.run_of(256).begin == 78 * 1152
    assert plan_head_groups([[FULL]] * 99, 1, "per_head_index", sizes=sizes).groups[0].runs == group.runs
    assert plan_head_groups([[FULL] * 2] * 99, 1, "per_head_index", sizes=sizes).groups[1].runs == group.runs


def test_caches_beside_layers_are_in_the_stage_of_theirs() -> None:
    plan = plan_head_groups(
        [[FULL]] * 7, sizes=[32] * 5 + [8] * 2, layer_of=[0, 1, 2, 3, 4, 0, 3], stages=(range(3), range(3, 5))
    )
    assert [plan.kv_heads(rank)[5:] for rank in (0, 1)] == [((0,), ()), ((), (0,))]
    assert [[*rank] for rank in plan.groups[0].members] == [
        [Member(layer, 0) for layer in layers] for layers in ((0, 1, 2, 5), (3, 4, 6))
    ]
    assert plan.groups[0].runs == ((32, 0, 3), (8, 96, 1))
    assert (plan.block_bytes, plan.padding) == (104, 32 / (5 * 32 + 2 * 8))


@given(
    st.lists(st.sampled_from([(16, 2), (48, 4), (64, 1)]), min_size=1, max_size=20),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([FULL, WINDOW]),
)
def test_places_of_members_that_live_together_are_apart(kinds, tp_size, policy) -> None:
    sizes, policies = [size for size, _ in kinds], [[policy] * heads for _, heads in kinds]
    plan = plan_head_groups(policies, tp_size, sizes=sizes)
    (group,) = plan.groups
    for rank, places in enumerate(plan.places):
        taken: list[range] = []
        for member, (_, slot) in places.items():
            size = sizes[member.layer]
            begin = plan.run_of(size).begin + slot * size
            taken.append(range(begin, begin + size))
        assert len(taken) == len(group.members[rank])
        ends = sorted((part.start, part.stop) for part in taken)
        assert all(before[1] <= after[0] for before, after in pairwise(ends))
        assert ends[-1][1] <= plan.block_bytes
    assert plan.padding == 0


def test_two_heads_of_256_lie_beside_one_of_512() -> None:
    policies = [[FULL] * 4 if (layer + 1) % 6 == 0 else [WINDOW] * 8 for layer in range(30)]
    plan = plan_head_groups(policies, sizes=[512 if (layer + 1) % 6 == 0 else 256 for layer in range(30)])
    assert plan.padding == 0.0
    assert [(group.policy.is_full, group.slots) for group in plan.groups] == [(True, 20), *[(False, 40)] * 5]
    with pytest.raises(ValueError, match=r"hold \[20, 40\] members: ask the group"):
        _ = plan.slots


def test_states_are_dealt_beside_latents_that_every_rank_has() -> None:
    rows = [[STATE] * 4, [STATE] * 4, [FULL], []]
    plan = plan_head_groups(rows, 2, sizes=[64, 64, 128, 64], is_replicated=True)
    assert [plan.kv_heads(rank) for rank in (0, 1)] == [((0, 1), (0, 1), (0,), ()), ((2, 3), (2, 3), (0,), ())]
    assert [(group.policy, group.slots) for group in plan.groups] == [(FULL, 1), (STATE, 2), (STATE, 2)]
    assert (plan.padding, plan.copies) == (0, 2)
    with pytest.raises(ValueError, match=r"tp_size 8 does not divide the model's 4 .* sizes that fit: \[1, 2, 4\]$"):
        plan_head_groups(rows, 8, sizes=[64, 64, 128, 64], is_replicated=True)


def test_every_rank_has_the_latents_of_a_replicated_model() -> None:
    plan = plan_head_groups([[FULL]] * 61, 8, is_replicated=True)
    assert (len(plan.groups), plan.slots, plan.padding) == (1, 61, 0.0)
    assert plan.kv_heads(7) == ((0,),) * 61


@pytest.mark.parametrize(
    ("policies", "sizes", "grouping", "message"),
    [
        ([], None, "auto", "at least one layer"),
        ([[], []], None, "auto", "no layer has head policies"),
        ([[FULL]], [1, 2], "auto", r"sizes \[1, 2\] must be one positive number for each of 1 layers"),
        ([[FULL]], [0], "auto", "positive"),
        ([[FULL], [WINDOW]], [1, 2], "per_head_index", "per_head_index takes layers of equally many heads of one size"),
        ([[FULL], [FULL] * 2], None, "per_head_index", "choose auto"),
    ],
)
def test_a_table_that_cannot_be_planned_says_why(policies, sizes, grouping, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan_head_groups(policies, 1, grouping, sizes=sizes)


@given(policies_of_a_model)
def test_one_rank_never_pads_more_than_allowed(policies) -> None:
    assert plan_head_groups(policies).padding <= MAX_PADDING


def _assert_keeps(group: HeadPolicy, member: HeadPolicy) -> None:
    if not group.is_full:
        assert not member.is_full
        assert group.window >= member.window
        assert group.sink >= member.sink


def _assert_ranks_have_equal_heads(plan: HeadGroupPlan, policies) -> None:
    for layer, row in enumerate(policies):
        dealt = [plan.kv_heads(rank)[layer] for rank in range(plan.tp_size)]
        assert {len(heads) for heads in dealt} == {max(1, len(row) // plan.tp_size)}
        shared = [plan.sharing(rank)[layer] for rank in range(plan.tp_size)]
        for head in range(len(row)):
            parts = [sharing for heads, sharing in zip(dealt, shared, strict=True) if head in heads]
            assert parts == [(part, len(parts)) for part in range(len(parts))]
            assert plan.tp_size // len(row) <= len(parts) <= max(1, -(-plan.tp_size // len(row)))


@given(
    st.sampled_from([2, 4]).flatmap(
        lambda heads: st.lists(
            st.lists(st.sampled_from([FULL, STREAMING, WINDOW]), min_size=heads, max_size=heads),
            min_size=1,
            max_size=6,
        )
    ),
    st.sampled_from(["auto", "per_head_index"]),
)
def test_policies_that_engines_of_all_ranks_agree_on_keep_each_member_alike(policies, grouping) -> None:
    def plans(given):
        return [plan_head_groups(given, ranks, grouping) for ranks in (1, 2, 4, 5, 8)]

    agreed = agreed_policies(policies, plans)
    for plan in plans(agreed):
        for group in plan.groups:
            for layer, head in (member for rank in group.members for member in rank):
                assert agreed[layer][head] == group.policy
                assert loosest([policies[layer][head], group.policy]) == group.policy


def test_policies_are_agreed_on_for_all_copies_of_a_member() -> None:
    """Of two ranks that keep it, one may have it in a looser group."""
    member = (Member(0, 0),)

    def plans(given) -> list[HeadGroupPlan]:
        groups = (HeadGroup(FULL, (member, ()), 1), HeadGroup(given[0][0], ((), member), 1))
        return [HeadGroupPlan((1,), 1, 2, groups, (range(1),))]

    assert agreed_policies([[WINDOW]], plans) == ((FULL,),)


KINDS = {**LAYERS, "states": (128, [STATE] * 4)}


@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=24),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 6),
    st.booleans(),
)
def test_stages_have_the_members_of_their_own_layers_in_the_same_groups(kinds, tp_size, count, is_replicated) -> None:
    """As equal blocks: what has no place in a stage is empty there."""
    sizes, policies = zip(*(KINDS[kind] for kind in [*kinds, "local"]), strict=True)
    stages = deal_layers(range(len(policies)), min(count, len(policies)))
    plan = plan_head_groups(policies, tp_size, sizes=sizes, is_replicated=is_replicated, stages=stages)
    assert (plan.stages, plan.ranks) == (stages, tp_size * len(stages))
    for rank in range(plan.ranks):
        stage = stages[rank // tp_size]
        assert {layer for layer, heads in enumerate(plan.kv_heads(rank)) if heads} == {
            layer for layer in stage if policies[layer]
        }
        seen = [member for group in plan.groups for member in group.members[rank]]
        assert len({*seen}) == len(seen)
    for group in plan.groups:
        assert len(group.members) == plan.ranks
        assert any(group.members)
        for member in (member for rank in group.members for member in rank):
            policy = policies[member.layer][member.kv_head]
            assert group.slots == plan.block_bytes // sizes[member.layer]
            assert policy.is_state == group.policy.is_state
            if not policy.is_state:
                _assert_keeps(group.policy, policy)
        assert max(map(len, group.members)) <= group.slots
    for layer, row in enumerate(policies):
        dealt = [head for rank in range(plan.ranks) for head in plan.kv_heads(rank)[layer]]
        is_copied = is_replicated and not (row and row[0].is_state)
        copies = tp_size if is_copied else max(1, tp_size // max(1, len(row)))
        assert sorted(dealt) == sorted([*range(len(row))] * copies)


@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=12), st.sampled_from([1, 2, 4]))
def test_one_stage_is_planned_as_none_is(kinds, tp_size) -> None:
    sizes, policies = zip(*(KINDS[kind] for kind in [*kinds, "local"]), strict=True)
    plan = plan_head_groups(policies, tp_size, sizes=sizes)
    assert plan_head_groups(policies, tp_size, sizes=sizes, stages=(range(len(policies)),)) == plan
    assert plan.stages == (range(len(policies)),)


def test_stages_of_a_uniform_model_share_its_blocks_equally() -> None:
    plan = plan_head_groups([[FULL] * 8] * 32, 2, stages=deal_layers(range(32), 4))
    assert (len(plan.groups), plan.slots, plan.padding) == (1, 32, 0.0)
    assert [plan.kv_heads(rank)[8:10] for rank in range(8)] == [
        *[((), ())] * 2,
        *[((0, 1, 2, 3),) * 2, ((4, 5, 6, 7),) * 2],
        *[((), ())] * 4,
    ]


def test_a_stage_with_a_layer_less_has_an_empty_slot_in_each_block() -> None:
    plan = plan_head_groups([[FULL] * 2] * 3, stages=deal_layers(range(3), 2))
    assert [len(rank) for group in plan.groups for rank in group.members] == [4, 2]
    assert (plan.slots, plan.padding) == (4, 2 / 6)


def test_heads_by_their_index_are_grouped_so_in_all_stages() -> None:
    plan = plan_head_groups([[FULL] * 4] * 5, 2, "per_head_index", stages=deal_layers(range(5), 2))
    assert (plan.slots, len(plan.groups)) == (3, 2)
    assert plan.groups[1].members == (
        tuple(Member(layer, 1) for layer in (0, 1, 2)),
        tuple(Member(layer, 3) for layer in (0, 1, 2)),
        tuple(Member(layer, 1) for layer in (3, 4)),
        tuple(Member(layer, 3) for layer in (3, 4)),
    )


def test_stages_do_not_make_heads_divide() -> None:
    with pytest.raises(ValueError, match=r"tp_size 3 .* 4 KV heads; sizes that fit: \[1, 2, 4\], and more than 4"):
        plan_head_groups([[FULL] * 4] * 6, 3, stages=deal_layers(range(6), 3))


def test_stages_agree_with_engines_of_other_ranks_on_what_a_member_keeps() -> None:
    rows = [[FULL, STREAMING, STREAMING, WINDOW]] * 5
    stages = deal_layers(range(5), 2)

    def plans(given):
        return [plan_head_groups(given, ranks, stages=stages) for ranks in (1, 2, 4)]

    agreed = agreed_policies(rows, plans)
    for plan in plans(agreed):
        for group in plan.groups:
            assert {agreed[member.layer][member.kv_head] for rank in group.members for member in rank} == {group.policy}
