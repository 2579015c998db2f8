"""What engines may evict for the blocks of one that leaves."""

from __future__ import annotations

from support.index.truth import block

from headwise.storage.index.allowances import allowances
from headwise.storage.index.prefix_index import PrefixIndex


def run(number: int, count: int = 10) -> bytes:
    return b"".join(map(block, range(1000 * number, 1000 * number + count)))


def index_of(*held: tuple[str, bytes, int]) -> PrefixIndex:
    """Nodes' blocks on their hosts, each asked for so many times more."""
    index = PrefixIndex()
    for node, hashes, asked in held:
        index.apply(node, "host", hashes, True)
        for _ in range(asked):
            index.match(hashes)
    return index


def test_what_is_worth_less_than_what_comes_may_go_and_nothing_else() -> None:
    index = index_of(("a", run(1), 3), ("b", run(2, 4), 1), ("b", run(3), 9), ("c", run(4), 3))
    assert allowances(index, "a", ["b", "c"]) == {"b": 4, "c": 0}


def test_no_more_may_go_than_comes_and_the_least_asked_for_anywhere_first() -> None:
    index = index_of(("a", run(1), 5), ("b", run(2), 2), ("c", run(3, 7), 1))
    assert allowances(index, "a", ["b", "c"]) == {"b": 3, "c": 7}


def test_the_most_asked_for_is_set_against_the_least_asked_for() -> None:
    index = index_of(("a", run(1, 3), 8), ("a", run(2), 1), ("b", run(3), 4))
    assert allowances(index, "a", ["b"]) == {"b": 3}


def test_what_another_engine_or_storage_has_too_is_worth_nothing_but_not_what_only_leaving_ones_have() -> None:
    index = index_of(("a", run(1), 1), ("b", run(2), 9), ("c", run(2), 9))
    assert allowances(index, "a", ["b"]) == {"b": 10}
    assert allowances(index, "a", ["b"], without=["c"]) == {"b": 0}
    assert allowances(index, "a", ["b", "unknown"], without=["c"]) == {"b": 0, "unknown": 0}


def test_what_the_leaving_engine_shares_with_one_that_stays_is_not_offered_and_not_evicted() -> None:
    index = index_of(("a", run(1), 9), ("b", run(1), 0))
    assert allowances(index, "a", ["b"]) == {"b": 0}


def test_what_a_taker_has_in_its_storage_too_may_go_for_what_is_in_the_storage_of_the_one_that_leaves_alone() -> None:
    index = index_of(("a", run(1), 1), ("b", run(2), 9))
    index.apply("b", "storage", run(2), True)
    assert allowances(index, "a", ["b"]) == {"b": 10}
    index.apply("a", "storage", run(1), True)
    index.apply("a", "host", run(1), False)
    assert allowances(index, "a", ["b"]) == {"b": 10}
