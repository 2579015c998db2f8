"""Prompts that share prefixes become neighbours, and no prefix is computed twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.sharing_order import PIECE_BYTES, pieces_of, sharing_order

PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=30)


def pieces(path: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in path)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


@given(PATHS)
def test_each_prefix_is_computed_once_if_only_the_last_request_is_cached(paths: list[list[int]]) -> None:
    order, shared = sharing_order([pieces(path) for path in paths])

    assert sorted(order.tolist()) == list(range(len(paths)))
    computed = sum(len(paths[place]) for place in order.tolist()) - int(shared.sum())
    assert computed == len({tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1)})
    for place in range(1, len(paths)):
        assert shared[place] == common(paths[order[place - 1]], paths[order[place]])


def test_who_shares_nothing_and_equals_keep_their_order() -> None:
    order, shared = sharing_order([pieces(path) for path in ([5], [1, 2], [0], [1], [5], [4], [1, 2])])

    assert order.tolist() == [0, 4, 3, 1, 6, 2, 5]
    assert shared.tolist() == [0, 1, 0, 1, 2, 0, 0]


def test_of_no_prompts_there_is_an_order() -> None:
    assert [found.tolist() for found in sharing_order([])] == [[], []]


@pytest.mark.parametrize("length", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 10 * PIECE_BYTES])
def test_prompts_have_as_many_pieces_in_common_as_they_begin_with(length: int) -> None:
    beginning = bytes(index % 251 for index in range(length))
    first, second = pieces_of(beginning + b"who?" * 100), pieces_of(beginning + b"when" * 100)

    whole = length // PIECE_BYTES * 8
    assert first[:whole] == second[:whole]
    assert first[whole:] != second[whole:]
