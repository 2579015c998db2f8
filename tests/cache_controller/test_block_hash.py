from __future__ import annotations

from hashlib import sha256

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.block_hash import HASH_BYTES, ExtraKey, extend_hashes, hash_seed


def hashes_of(tokens, *, seed=b"seed", block_size=4, extra_keys=()) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, seed, np.array(tokens, dtype=np.int32), block_size, extra_keys)
    return hashes


def test_only_full_blocks_have_a_hash_of_128_bits() -> None:
    hashes = hashes_of(range(11))
    assert len(hashes) == 2
    assert {len(h) for h in hashes} == {HASH_BYTES}


def test_a_hash_is_of_the_one_before_the_tokens_as_they_lie_in_memory_and_the_items() -> None:
    every_other = np.arange(22, dtype=np.int32)[::2]
    hashes: list[bytes] = []
    extend_hashes(hashes, b"seed", every_other, 4, [ExtraKey(5, 7, "cat")])
    first = sha256(b"seed" + every_other[:4].tobytes()).digest()[:HASH_BYTES]
    second = sha256(first + every_other[4:8].tobytes() + b"1:3:0:-1:3:cat;").digest()[:HASH_BYTES]
    assert hashes == [first, second]
    extend_hashes(hashes, b"seed", every_other[8:], 4)
    assert hashes == [first, second]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_two_sequences_share_exactly_the_hashes_of_their_common_full_blocks(left, right) -> None:
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    first, second = hashes_of(left), hashes_of(right)
    shared = sum(a == b for a, b in zip(first, second, strict=False))
    assert shared == common // 4
    assert first[shared:] == [] or second[shared:] == [] or first[shared] != second[shared]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.data())
def test_hashing_in_steps_equals_hashing_at_once(tokens, data) -> None:
    array = np.array(tokens, dtype=np.int32)
    hashes: list[bytes] = []
    for stop in [*sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))), len(tokens)]:
        extend_hashes(hashes, b"seed", array[4 * len(hashes) : stop], 4)
    assert hashes == hashes_of(tokens)


def test_model_salt_and_adapter_each_start_another_chain() -> None:
    seeds = {hash_seed("m"), hash_seed("m", "tenant"), hash_seed("m", "", "tenant"), hash_seed("mtenant")}
    assert len(seeds) == 4


def test_an_item_changes_only_the_blocks_it_overlaps_and_those_behind() -> None:
    plain = hashes_of(range(16))
    item = hashes_of(range(16), extra_keys=[ExtraKey(4, 8, "cat")])
    assert [a == b for a, b in zip(plain, item, strict=True)] == [True, False, False, False]


def test_an_item_that_ends_where_a_block_starts_does_not_overlap_it() -> None:
    ends_there = hashes_of(range(8), extra_keys=[ExtraKey(0, 4, "cat")])
    other = hashes_of(range(8), extra_keys=[ExtraKey(0, 5, "cat")])
    assert ends_there[0] != other[0]
    again: list[bytes] = [ends_there[0]]
    extend_hashes(again, b"seed", np.arange(4, 8, dtype=np.int32), 4, [])
    assert again[1] == ends_there[1]


def test_different_items_at_one_place_give_different_blocks() -> None:
    cat, dog = (hashes_of(range(4), extra_keys=[ExtraKey(0, 4, content)]) for content in ("cat", "dog"))
    assert cat != dog


def test_an_item_that_is_later_than_the_one_in_front_gives_other_blocks() -> None:
    first = ExtraKey(0, 4, "cat", 2)
    of_times = {hashes_of(range(8), extra_keys=[first, ExtraKey(4, 8, "cat", 2, later)])[-1] for later in (-1, 0, 1)}
    assert len(of_times) == 3


def test_an_item_of_another_width_gives_other_blocks() -> None:
    """Its tokens have other positions."""
    of_widths = {hashes_of(range(8), extra_keys=[ExtraKey(0, 4, "cat", columns)])[-1] for columns in (0, 1, 2, 4)}
    assert len(of_widths) == 4


ITEMS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.sampled_from("abc")), max_size=4)


def places(items) -> list[ExtraKey]:
    """Items one behind the other, of gaps, lengths and hashes."""
    found, at = [], 0
    for gap, length, key in items:
        found.append(ExtraKey(at + gap % 6, at + gap % 6 + length, key))
        at = found[-1][1]
    return found


@given(ITEMS, ITEMS)
def test_items_change_exactly_the_blocks_from_the_first_that_overlaps_another_item(left, right) -> None:
    """Blocks of equal tokens are equal as long as equal items overlap them, at equal places."""
    left, right = places(left), places(right)
    first, second = (hashes_of([7] * 60, extra_keys=items) for items in (left, right))

    def of_block(items, block: int) -> list[ExtraKey]:
        return [item for item in items if item[0] < 4 * block + 4 and item[1] > 4 * block]

    same = next((block for block in range(15) if of_block(left, block) != of_block(right, block)), 15)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True] * same + [False] * (15 - same)


@given(ITEMS, st.integers(0, 15))
def test_items_are_hashed_in_steps_as_at_once(items, whole) -> None:
    items, tokens, hashes = places(items), np.arange(60, dtype=np.int32), []
    extend_hashes(hashes, b"seed", tokens[: 4 * whole], 4, items)
    extend_hashes(hashes, b"seed", tokens[4 * whole :], 4, items)
    assert hashes == hashes_of(tokens, extra_keys=items)


def test_two_items_in_a_block_both_count_each_at_its_place() -> None:
    both = [(0, 1, "cat"), (2, 3, "dog")]
    others = [[], both[:1], both[1:], [(0, 1, "dog"), (2, 3, "cat")], [(0, 1, "cat"), (1, 2, "dog")]]
    others += [[(0, 2, "cat"), (2, 3, "dog")], [(0, 1, "cat"), (2, 4, "dog")]]
    blocks = {hashes_of([0] * 4, extra_keys=[ExtraKey(*each) for each in items])[0] for items in (both, *others)}
    assert len(blocks) == 1 + len(others)
