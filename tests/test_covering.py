"""Fewer combinations meet every value, and every pair that they are to meet; none is lost."""

from __future__ import annotations

from itertools import product

import pytest
from support.covering import covering

VALUES = ["a", "b", "c"], [1, 2], [(0.5, True), (1.5, False), (2.5, True)]


def split(found: list) -> tuple[list[tuple], list[tuple]]:
    """What is kept, and what is for the soak."""
    kept = [each.values for each in found if not each.marks]
    return kept, [each.values for each in found if each.marks]


def test_any_two_values_are_met_by_half_of_all() -> None:
    kept, left = split(covering(*VALUES))
    assert sorted(kept + left) == sorted((a, b, *pair) for a, b, pair in product(*VALUES))
    wanted = product(VALUES[0], VALUES[2])
    assert {(a, (c, d)) for a, _, c, d in kept} == set(wanted)
    assert {(a, b) for a, b, *_ in kept} == set(product(*VALUES[:2]))
    assert {(b, (c, d)) for _, b, c, d in kept} == set(product(*VALUES[1:]))
    assert len(kept) == 9


@pytest.mark.parametrize(("pairs", "count"), [((), 3), ([(0, 1)], 6)])
def test_every_value_is_met_and_no_pair_but_those_that_are_asked_for(pairs: list[tuple[int, int]], count: int) -> None:
    kept, _ = split(covering(*VALUES, pairs=pairs))
    assert len(kept) == len({each[:2] for each in kept}) == count
    assert {each[0] for each in kept} == {*VALUES[0]}
    assert {each[1] for each in kept} == {*VALUES[1]}
    assert {each[2:] for each in kept} == {*VALUES[2]}
