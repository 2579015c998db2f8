"""What engines are for: the numbers that were asked for, with as few changes as possible."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.runtime.frontend.scaling.roles import Split, deal

NAMES = [f"engine-{n}" for n in range(8)]


def test_engines_get_the_roles_that_were_asked_for_and_the_rest_serves_whole_requests() -> None:
    roles = deal(NAMES[:5], Split(1, 2), {})
    assert Counter(roles.values()) == {"prefill": 1, "decode": 2}
    assert deal(NAMES[:5], Split(), roles) == {}


def test_an_engine_keeps_its_role_when_others_come_and_go() -> None:
    roles = deal(NAMES[:4], Split(2, 2), {})
    (lost,) = [name for name, role in roles.items() if role == "prefill"][:1]
    left = [name for name in NAMES[:4] if name != lost]
    again = deal([*left, "engine-9"], Split(2, 2), roles)
    assert again == {**{name: roles[name] for name in left}, "engine-9": "prefill"}


def test_one_engine_alone_serves_whole_requests_and_of_two_there_is_one_of_each() -> None:
    assert deal(NAMES[:1], Split(3, 5), {}) == {}
    assert Counter(deal(NAMES[:2], Split(3, 5), {}).values()) == {"prefill": 1, "decode": 1}
    assert Counter(deal(NAMES[:2], Split(5, 1), {}).values()) == {"prefill": 1, "decode": 1}


def test_some_engine_always_decodes() -> None:
    assert Counter(deal(NAMES[:2], Split(2), {}).values()) == {"prefill": 1}
    assert Counter(deal(NAMES[:3], Split(2), {}).values()) == {"prefill": 2}


@pytest.mark.parametrize("numbers", [(-1, 2), (2, -1), (0, 1)])
def test_numbers_that_cannot_be_are_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="engines"):
        Split(*numbers)


splits = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda s: s[0] or not s[1]).map(lambda s: Split(*s))


@given(splits, splits, st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)))
def test_roles_are_always_as_many_as_there_are_to_be_and_change_least(
    first: Split, second: Split, some: set[str], others: set[str]
) -> None:
    before = deal(sorted(some), first, {})
    after = deal(sorted(others), second, before)
    counts, numbers = Counter(after.values()), second.of(len(others))
    assert (counts["prefill"], counts["decode"]) == (numbers.prefill, numbers.decode)
    assert len(others) - counts["prefill"] > 0 or not others, "nobody decodes"
    assert deal(sorted(others), second, after) == after
    if some == others and first == second:
        assert after == before
