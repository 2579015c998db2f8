"""What would be lost with a node: the blocks that only it can serve, by how often they were asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.index.truth import block, paths

from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.hash_runs import split
from headwise.storage.index.messages import HASH_BYTES, TIERS, Flush
from headwise.storage.index.prefix_index import PrefixIndex, SoleBlocks

PATHS = paths(3, 12)
FIRST, SECOND, THIRD = (b"".join(map(block, range(1000 * path, 1000 * path + 12))) for path in range(1, 4))


def index_of(*held: tuple[str, bytes], tier: str = "device") -> PrefixIndex:
    index = PrefixIndex()
    for node, hashes in held:
        index.apply(node, tier, hashes, True)
    return index


def test_what_two_nodes_have_is_not_lost_with_one() -> None:
    index = index_of(("a", FIRST), ("b", FIRST), ("a", SECOND))
    assert index.worth() == {"a": 12.0, "b": 0.0}
    assert index.worth(without=["a"]) == {"b": 12.0}


def test_what_a_node_has_on_two_tiers_is_its_alone() -> None:
    index = index_of(("a", FIRST))
    index.apply("a", "host", FIRST, True)
    assert index.worth() == {"a": 12.0}


def test_what_is_asked_for_is_worth_more_and_comes_first() -> None:
    index = index_of(("a", FIRST), ("b", SECOND), ("b", THIRD))
    for _ in range(4):
        index.match(SECOND)
    assert index.worth() == {"a": 12.0, "b": 5 * 12.0 + 12.0}
    assert index.sole_blocks()["b"] == [SoleBlocks(5.0, SECOND), SoleBlocks(1.0, THIRD)]


def test_a_lookup_of_a_part_counts_for_that_many_blocks() -> None:
    index = index_of(("a", FIRST))
    index.match(FIRST[: len(FIRST) // 4])
    assert index.worth() == {"a": pytest.approx(12.0 + 3.0)}


def test_cutting_and_joining_runs_changes_no_worth() -> None:
    index = index_of(("a", FIRST))
    index.match(FIRST)
    index.apply("b", "device", FIRST[: len(FIRST) // 2], True)
    assert index.worth() == {"a": pytest.approx(12.0), "b": 0.0}
    index.apply("b", "device", FIRST[: len(FIRST) // 2], False)
    index.match(FIRST)
    assert index.num_runs == 1
    assert index.worth() == {"a": pytest.approx(36.0), "b": 0.0}


def test_what_was_asked_for_long_ago_counts_less() -> None:
    index = index_of(("a", FIRST))
    index.cool(0.5)
    index.apply("b", "device", SECOND, True)
    assert index.worth() == {"a": pytest.approx(6.0), "b": pytest.approx(12.0)}


def test_cooling_for_years_keeps_numbers_that_can_be_compared() -> None:
    index = index_of(("a", FIRST))
    for _ in range(5000):
        index.cool(0.5)
    index.match(SECOND)
    index.apply("b", "device", SECOND, True)
    assert index.worth() == {"a": pytest.approx(0.0), "b": pytest.approx(12.0)}


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share must be over 0 and at most 1, got"):
        PrefixIndex().cool(share)


def test_what_shared_storage_has_is_not_lost_with_its_writer() -> None:
    index = index_of(("a", FIRST), tier="storage")
    assert index.worth() == {"a": 12.0}
    index.set_volume("a", "files")
    index.set_volume("b", "files")
    assert index.worth() == {"a": 0.0, "b": 0.0}
    assert index.worth(without=["b"]) == {"a": 12.0}, "nobody is left who shares it"


def test_storage_of_a_node_s_own_goes_with_it_though_ones_that_left_had_stored_there_too() -> None:
    index = index_of(("a", FIRST), ("a", SECOND), tier="storage")
    for node, volume in (("a", "disk of a"), ("gone", "disk of a"), ("b", "disk of b")):
        index.set_volume(node, volume)
    index.apply("gone", "storage", FIRST, True)
    index.apply("a", "host", FIRST, True)
    assert index.worth() == {"a": 0.0, "gone": 0.0, "b": 0.0}
    index.bequeath("gone")
    index.drop("gone")
    assert index.worth() == {"a": 24.0, "b": 0.0}
    assert {(each.in_memory, each.in_storage) for each in index.sole_blocks()["a"]} == {(True, True), (False, True)}


def test_storage_is_shared_with_those_of_the_volume_that_stay() -> None:
    index = index_of(("a", FIRST), ("b", FIRST), ("c", FIRST), ("d", FIRST))
    for node, volume in (("a", "one"), ("b", "one"), ("c", "another")):
        index.set_volume(node, volume)
    assert [index.shares_storage(node) for node in ("a", "b", "c", "d", "unknown")] == [True, True, False, False, False]
    assert index.shares_storage("a", without=["c"])
    assert not index.shares_storage("a", without=["b"])
    index.apply("b", "storage", FIRST, True)
    index.bequeath("b")
    index.drop("b")
    assert not index.shares_storage("a"), "one that left does not serve what it finds there"


def test_what_is_handed_over_is_what_is_in_memory_and_in_storage_of_the_engine_s_own() -> None:
    store = AttentionStore()
    store.apply(Flush("a", 1, 0, "storage", 0, FIRST, True))
    store.apply(Flush("a", 1, 1, "host", 0, SECOND, True))
    assert {store.sole_blocks("a", (), 100)} <= {FIRST + SECOND, SECOND + FIRST}
    assert len(store.sole_blocks("a", (), 2)) == 2 * HASH_BYTES


def test_the_store_answers_for_its_index() -> None:
    store = AttentionStore()
    store.apply(Flush("a", 1, 0, "device", 0, FIRST, True))
    store.cool(0.5)
    assert store.worth() == {"a": pytest.approx(6.0)}


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(TIERS),
            st.sampled_from(range(3)),
            st.integers(0, 11),
            st.integers(1, 12),
            st.booleans(),
        ),
        max_size=30,
    ),
    st.sets(st.sampled_from("abc"), max_size=2),
)
def test_after_any_history_sole_blocks_are_those_that_one_node_has(
    statements: list[tuple[str, str, int, int, int, bool]], without: set[str]
) -> None:
    index, held = PrefixIndex(), dict[str, set[tuple[str, bytes]]]()
    for node, tier, path, first, count, resident in statements:
        blocks = PATHS[path][first : first + count]
        index.apply(node, tier, b"".join(blocks), resident)
        index.match(PATHS[path])
        stated = {(tier, block) for block in blocks}
        held[node] = held.get(node, set()) | stated if resident else held.get(node, set()) - stated
    index.check_integrity()
    served = {node: {block for _, block in have} for node, have in held.items() if node not in without}
    for node, sole in index.sole_blocks(without).items():
        others = set().union(*(blocks for other, blocks in served.items() if other != node))
        found = [block for each in sole for block in split(each.hashes)]
        assert len(found) == len(set(found)) == sum(each.count for each in sole)
        assert set(found) == served[node] - others
