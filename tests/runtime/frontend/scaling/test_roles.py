"""What engines are for: the numbers that were asked for, with as few changes as possible."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.runtime.frontend.routing.base import EngineRole
from headwise.runtime.frontend.scaling.roles import RankSizes, Split, deal

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


SIZES = RankSizes(mixed=2, prefill=1, decode=3)


def test_engines_are_dealt_what_they_have_the_ranks_for_and_the_others_do_the_rest() -> None:
    ranks = {"engine-0": 3, "engine-1": 3, "engine-2": 1, "engine-3": 3}

    def fits(name: str, role: EngineRole) -> bool:
        return ranks[name] == SIZES.of_role(role)

    assert deal(NAMES[:3], Split(1, 2), {}, fits) == {
        "engine-0": "decode",
        "engine-1": "decode",
        "engine-2": "prefill",
    }
    more_prompts = deal(NAMES[:4], Split(3, 1), {"engine-0": "decode", "engine-2": "prefill"}, fits)
    assert Counter(more_prompts.values()) == {"prefill": 3, "decode": 1}
    assert more_prompts["engine-0"] == "decode"


@pytest.mark.parametrize(
    ("split", "there", "count", "started"),
    [
        (Split(1, 2), [], 3, [3, 3, 1]),
        (Split(1, 2), [3, 1], 1, [3]),
        (Split(1, 2), [3, 3], 2, [1, 2]),
        (Split(1, 2), [1, 1, 1], 1, [3]),
        (Split(1, 1), [], 1, [2]),
        (Split(1), [2, 2], 1, [1]),
        (Split(), [3], 2, [2, 2]),
    ],
)
def test_engines_start_with_the_ranks_that_are_lacking(split, there, count, started) -> None:
    assert SIZES.to_start(split, there, count) == started


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
