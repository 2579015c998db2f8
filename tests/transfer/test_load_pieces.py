from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.transfer.load_pieces import load_pieces


def side_by_side(layers: int, slot: int, groups: int = 1) -> np.ndarray:
    """``[layers, groups, 2]``: every group has a slot in each layer, in order."""
    firsts = np.repeat(np.arange(layers)[:, None] * slot, groups, axis=1)
    return np.stack([firsts, firsts + slot], axis=2)


def test_without_a_least_size_each_layer_is_a_piece() -> None:
    ranges = side_by_side(5, 10, groups=2)
    pieces = load_pieces(ranges, 0)
    assert pieces.first_layers.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(pieces.ranges, ranges)


@pytest.mark.parametrize(
    ("layers", "least", "firsts"),
    [
        (28, 128, [0, 1, 2, 4, 8, 15, 22]),  # no more than come before, nor than a quarter
        (28, 40, [0, 1, 2, 4, 8, 12, 16, 20, 24]),  # four are enough
        (28, 31, [0, 1, 2, 4, 8, 12, 16, 20, 24]),
        (3, 128, [0, 1, 2]),
        (0, 128, []),
    ],
)
def test_layers_are_joined_until_a_block_has_enough(layers: int, least: int, firsts: list[int]) -> None:
    pieces = load_pieces(side_by_side(layers, 10), least)
    assert pieces.first_layers.tolist() == firsts
    assert pieces.ranges.shape == (len(firsts), 1, 2)
    ends = [*firsts, layers][1:]
    assert pieces.ranges[:, 0].tolist() == [[10 * first, 10 * end] for first, end in zip(firsts, ends, strict=True)]


def test_layers_that_lie_apart_in_some_group_are_not_joined() -> None:
    ranges = side_by_side(8, 10, groups=2)
    ranges[3:, 1] += 5
    assert load_pieces(ranges, 100).first_layers.tolist() == [0, 1, 2, 3, 5, 7]
    assert load_pieces(side_by_side(8, 10, groups=2), 100).first_layers.tolist() == [0, 1, 2, 4, 6]


@given(
    members=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=40),
    least=st.integers(0, 200),
)
def test_pieces_are_all_bytes_once_and_no_layer_comes_after_it_is_needed(members: list[list[int]], least: int) -> None:
    """members: of each group, by layer; groups lie in blocks of their own."""
    counts = np.array(members)
    ends = 10 * counts.cumsum(axis=0)
    ranges = np.stack([ends - 10 * counts, ends], axis=2)
    pieces = load_pieces(ranges, least)
    firsts = pieces.first_layers.tolist()
    assert firsts == sorted({0, *firsts})
    ends_at = [*firsts[1:], len(counts)]
    for first, end, piece in zip(firsts, ends_at, pieces.ranges, strict=True):
        for group in range(2):
            wanted = {byte for layer in range(first, end) for byte in range(*ranges[layer, group])}
            assert set(range(*piece[group])) == wanted
        assert end - first <= max(1, min(first, len(counts) // 4))
