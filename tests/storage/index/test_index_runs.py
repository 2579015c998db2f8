"""The index of runs says what a dictionary of sets would say, whatever was stated in whatever order."""

from __future__ import annotations

import gc
import sys
from functools import reduce
from hashlib import sha256
from operator import xor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.index.truth import block, depths, paths

from headwise.storage.index.messages import TIERS, digest_of
from headwise.storage.index.prefix_index import MAX_RUN, PrefixIndex

PATHS = paths(3, 12)
PATH = PATHS[0]


def run(*numbers: int) -> bytes:
    return b"".join(map(block, numbers))


def holding(index: PrefixIndex, node: str, first: int, last: int, tier: str = "device", resumable: bytes = b"") -> None:
    index.apply(node, tier, b"".join(PATH[first:last]), True, resumable)


def removing(index: PrefixIndex, node: str, first: int, last: int, tier: str = "device") -> None:
    index.apply(node, tier, b"".join(PATH[first:last]), False)


@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 1000, 6401])
def test_a_digest_is_the_exclusive_or_of_the_hashes(blocks: int) -> None:
    hashes = [sha256(bytes([index % 256, index // 256])).digest()[:16] for index in range(blocks)]
    assert digest_of(b"".join(hashes)) == reduce(xor, (int.from_bytes(one, "big") for one in hashes), 0)


STATEMENTS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(TIERS),
        st.sampled_from(range(len(PATHS))),
        st.integers(0, 11),
        st.integers(1, 12),
        st.sampled_from(["held", "held", "some", "none", "gone", "drop", "match"]),
        st.integers(0, 2**12 - 1),
    ),
    max_size=40,
)


@settings(max_examples=400)
@given(statements=STATEMENTS)
def test_any_history_of_statements_gives_what_sets_would_give(statements: list[tuple[Any, ...]]) -> None:
    index = PrefixIndex()
    held: dict[str, dict[str, dict[bytes, bool]]] = {node: {tier: {} for tier in TIERS} for node in "abc"}
    for node, tier, which, first, count, what, bits in statements:
        part = PATHS[which][first : first + count]
        blocks = held[node][tier]
        if what == "match":
            assert index.match(PATHS[which]) == depths(held, PATHS[which])
        elif what == "drop":
            index.drop(node)
            held[node] = {tier: {} for tier in TIERS}
        elif what == "gone":
            index.apply(node, tier, b"".join(part), False)
            for block_hash in part:
                blocks.pop(block_hash, None)
        else:
            flags = {"held": b"", "some": bytes(bits >> i & 1 for i in range(len(part))), "none": bytes(len(part))}[
                what
            ]
            index.apply(node, tier, b"".join(part), True, flags)
            blocks.update(zip(part, map(bool, flags or b"\1" * len(part)), strict=True))
        index.check_integrity()
    for path in (*PATHS, PATH[3:], PATH[:1]):
        assert index.match(path) == depths(held, path)
        index.check_integrity()
        assert index.match(path) == depths(held, path)  # once more: a lookup may have joined runs
    for node, tiers in held.items():
        resident = [digest_of(b"".join(blocks)) for blocks in tiers.values()]
        resumable = [digest_of(b"".join(h for h, flag in blocks.items() if flag)) for blocks in tiers.values()]
        assert index.digests(node) == (*resident, *resumable)


@settings(max_examples=200)
@given(runs=st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(1, 9), max_size=12), st.booleans())))
def test_blocks_in_no_order_at_all_and_named_twice_are_no_trouble(
    runs: list[tuple[str, list[int], bool]],
) -> None:
    index, held = PrefixIndex(), {node: {"device": dict[bytes, bool]()} for node in "ab"}
    for node, numbers, resident in runs:
        index.apply(node, "device", run(*numbers), resident)
        for number in numbers:
            if resident:
                held[node]["device"][block(number)] = True
            else:
                held[node]["device"].pop(block(number), None)
        index.check_integrity()
        path = [block(number) for number in numbers]
        assert index.match(path) == depths(held, path)
        index.check_integrity()


@settings(max_examples=200)
@given(statements=STATEMENTS, room=st.integers(0, 12))
def test_a_full_index_forgets_and_still_says_nothing_untrue(statements: list[tuple[Any, ...]], room: int) -> None:
    index = PrefixIndex(max_blocks=room)
    held: dict[str, dict[str, dict[bytes, bool]]] = {node: {tier: {} for tier in TIERS} for node in "abc"}
    for node, tier, which, first, count, what, _ in statements:
        part = PATHS[which][first : first + count]
        blocks = held[node][tier]
        if what == "match":
            index.match(PATHS[which])
        elif what == "gone":  # as a ledger does: only what was stated is taken back
            part = [block_hash for block_hash in part if block_hash in blocks]
            index.apply(node, tier, b"".join(part), False)
            for block_hash in part:
                del blocks[block_hash]
        else:
            part = [block_hash for block_hash in part if block_hash not in blocks]
            index.apply(node, tier, b"".join(part), True)
            blocks.update(dict.fromkeys(part, True))
        index.check_integrity()
        assert len(index) <= room
        for name, tiers in held.items():
            for name_of_tier, stated in tiers.items():
                assert index.resident(name, name_of_tier) <= stated.keys()
            expected = [digest_of(b"".join(stated)) for stated in tiers.values()]
            assert index.digests(name) == (*expected, *expected)


def test_a_removed_middle_block_hides_what_is_behind_it_only_until_it_is_back() -> None:
    index = PrefixIndex()
    holding(index, "a", 0, 12)
    removing(index, "a", 5, 6)
    assert index.match(PATH) == {"a": (5, 5, 5)}
    holding(index, "a", 5, 6, "host")
    assert index.match(PATH) == {"a": (5, 12, 12)}
    holding(index, "a", 5, 6)
    assert index.match(PATH) == {"a": (12, 12, 12)}


def test_a_prefix_ends_at_a_block_where_a_request_can_resume() -> None:
    index = PrefixIndex()
    holding(index, "a", 0, 8, resumable=b"\0\0\1\0\0\1\0\0")
    assert index.match(PATH) == {"a": (6, 6, 6)}
    assert index.match(PATH[:5]) == {"a": (3, 3, 3)}
    assert index.match(PATH[:2]) == {}
    holding(index, "a", 6, 7, "host")
    assert index.match(PATH) == {"a": (6, 7, 7)}


def test_shared_storage_serves_every_node_behind_what_it_has_itself() -> None:
    index = PrefixIndex()
    for node in "abc":
        index.set_volume(node, "shared")
    holding(index, "a", 2, 12, "storage")
    assert index.match(PATH) == {}
    holding(index, "b", 0, 4)
    assert index.match(PATH) == {"b": (4, 4, 12)}
    holding(index, "a", 0, 2, "storage")
    assert index.match(PATH) == {"a": (0, 0, 12), "b": (4, 4, 12), "c": (0, 0, 12)}
    index.check_integrity()
    index.drop("a")
    assert index.match(PATH) == {"b": (4, 4, 4)}
    index.check_integrity()


def test_storage_serves_the_nodes_of_its_own_volume_only() -> None:
    index = PrefixIndex()
    for node, volume in (("a", "one"), ("b", "one"), ("c", "other"), ("d", "other"), ("e", "alone"), ("f", "")):
        index.set_volume(node, volume)
    holding(index, "a", 0, 12, "storage")
    holding(index, "c", 0, 4, "storage")
    holding(index, "f", 0, 6, "storage")
    holding(index, "e", 0, 2)
    expected = {"a": (0, 0, 12), "b": (0, 0, 12), "c": (0, 0, 4), "d": (0, 0, 4), "e": (2, 2, 2), "f": (0, 0, 6)}
    assert index.match(PATH) == expected
    index.set_volume("b", "alone")
    holding(index, "e", 0, 3, "storage")
    assert index.match(PATH) == {**expected, "b": (0, 0, 3), "e": (2, 2, 3)}
    index.set_volume("b", "")
    assert "b" not in index.match(PATH)
    index.check_integrity()


def test_blocks_whose_parents_were_never_stated_count_once_they_are() -> None:
    index = PrefixIndex()
    holding(index, "a", 4, 12)
    assert index.match(PATH) == {}
    holding(index, "a", 0, 4)
    assert index.match(PATH) == {"a": (12, 12, 12)}


def test_what_a_lookup_goes_through_becomes_one_run_again() -> None:
    index = PrefixIndex()
    for depth in range(12):
        holding(index, "a", depth, depth + 1)
    assert index.num_runs == 12
    index.match(PATH)
    assert index.num_runs == 1
    index.check_integrity()


def test_runs_that_branch_are_not_joined_and_cut_at_every_lookup() -> None:
    index = PrefixIndex()
    for path in PATHS:
        index.apply("a", "device", b"".join(path), True)
    for path in PATHS:
        index.match(path)
    runs = index.num_runs
    for path in PATHS:
        assert index.match(path) == {"a": (12, 12, 12)}
    assert index.num_runs == runs


def test_a_path_longer_than_a_run_is_found_in_one() -> None:
    index, path = PrefixIndex(), [block(number) for number in range(1, 3 * MAX_RUN + 7)]
    index.apply("a", "device", b"".join(path), True)
    index.apply("b", "device", b"".join(path[MAX_RUN - 5 : 2 * MAX_RUN]), True)
    index.check_integrity()
    assert index.match(path) == {"a": (len(path),) * 3}
    assert index.match(path[MAX_RUN - 5 :])["b"] == (MAX_RUN + 5,) * 3


def test_what_was_longest_not_used_is_forgotten_and_of_a_path_its_end_first() -> None:
    index = PrefixIndex(max_blocks=12)
    holding(index, "a", 0, 8)
    index.apply("a", "device", run(901, 902, 903, 904), True)
    index.match(PATH[:8])
    index.apply("a", "device", run(905, 906), True)
    assert index.match(PATH[:8]) == {"a": (8, 8, 8)}
    assert index.match([block(901), block(902), block(903)]) == {"a": (2, 2, 2)}
    index.apply("a", "device", run(907, 908, 909), True)
    assert index.match(PATH[:8]) == {"a": (7, 7, 7)}
    assert len(index) == 12


def test_a_forgotten_block_that_is_stated_again_is_back_and_the_digests_agree_throughout() -> None:
    index = PrefixIndex(max_blocks=8)
    holding(index, "a", 0, 8)
    said = index.digests("a")
    index.apply("b", "device", run(901, 902, 903, 904), True)
    assert index.match(PATH) == {"a": (4, 4, 4)}
    assert index.forgotten_blocks("a") == 4
    assert index.digests("a") == said
    removing(index, "a", 4, 8)
    assert index.forgotten_blocks("a") == 0
    holding(index, "a", 4, 8)
    assert index.digests("a") == said
    assert index.match(PATH) == {"a": (8, 8, 8)}


def test_taking_back_forgotten_blocks_takes_them_out_of_the_digests_whatever_their_flags_were() -> None:
    flags = bytes([1, 1, 0, 0, 1, 0, 1, 1])
    index = PrefixIndex(max_blocks=3)
    holding(index, "a", 0, 8, resumable=flags)
    assert index.forgotten_blocks("a") == 5
    resumable = [block_hash for block_hash, flag in zip(PATH, flags, strict=False) if flag]
    expected = (digest_of(b"".join(PATH[:8])), 0, 0, digest_of(b"".join(resumable)), 0, 0)
    assert index.digests("a") == expected
    index.apply("a", "device", b"".join(PATH[:8]), False, flags)
    assert index.digests("a") == (0,) * 6
    assert (len(index), index.forgotten_blocks("a")) == (0, 0)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="newer collectors go through every dictionary")
def test_the_garbage_collector_leaves_the_dictionary_of_blocks_alone() -> None:
    index = PrefixIndex(max_blocks=10)
    for node, first, last in (("a", 0, 12), ("b", 3, 7), ("a", 5, 9)):
        holding(index, node, first, last)
        removing(index, node, first + 1, first + 2)
        index.match(PATH)
    assert len(index) > 0
    assert not gc.is_tracked(index._where)


def test_a_dropped_node_leaves_nothing_behind_and_its_bit_is_reused() -> None:
    index = PrefixIndex()
    for node in "ab":
        holding(index, node, 0, 4)
    index.drop("a")
    holding(index, "c", 0, 2)
    index.check_integrity()
    assert index.match(PATH) == {"b": (4, 4, 4), "c": (2, 2, 2)}
    for node in "bc":
        index.drop(node)
    assert (len(index), index.num_runs) == (0, 0)


def test_more_nodes_than_bits_of_a_machine_word_are_told_apart() -> None:
    index = PrefixIndex()
    for number in range(200):
        holding(index, f"n{number}", 0, 1 + number % 12)
    assert index.match(PATH) == {f"n{number}": (1 + number % 12,) * 3 for number in range(200)}
