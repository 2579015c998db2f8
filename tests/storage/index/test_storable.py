"""How much of a leaving engine's cache is worth its room in storage that is full."""

from __future__ import annotations

from support.index.truth import block

from headwise.storage.index.prefix_index import PrefixIndex
from headwise.storage.index.storable import worth_storing


def run(number: int, count: int = 10) -> bytes:
    return b"".join(map(block, range(1000 * number, 1000 * number + count)))


def index_of(*held: tuple[str, str, bytes, int]) -> PrefixIndex:
    """Nodes' blocks by tier, each asked for so many times more, in this order. All but x share a volume."""
    index = PrefixIndex()
    for node, tier, hashes, asked in held:
        index.set_volume(node, "its own" if node == "x" else "shared")
        index.apply(node, tier, hashes, True)
        for _ in range(asked):
            index.match(hashes)
    return index


def test_what_is_worth_more_than_what_it_evicts_is_stored_and_nothing_else() -> None:
    index = index_of(("b", "storage", run(1, 4), 1), ("b", "storage", run(2), 9), ("a", "host", run(3), 3))
    assert worth_storing(index, "a") == 4


def test_the_most_asked_for_comes_first_and_evicts_what_was_used_least_recently() -> None:
    index = index_of(
        ("b", "storage", run(1), 2), ("b", "storage", run(2), 0), ("a", "host", run(3, 5), 1), ("a", "host", run(4), 3)
    )
    assert worth_storing(index, "a") == 15, "ten for what was asked for three times, and five for one that never was"
    index.match(run(2))
    index.match(run(1))  # run 2 is the one to go first now, and as much asked for as the least of what comes
    assert worth_storing(index, "a") == 10


def test_where_storage_has_as_much_that_is_worth_more_behind_something_that_is_not_it_is_weighed_together() -> None:
    index = index_of(("b", "storage", run(1, 2), 5), ("b", "storage", run(2, 20), 0), ("a", "host", run(3), 3))
    assert worth_storing(index, "a") == 10
    index = index_of(("b", "storage", run(1, 9), 5), ("b", "storage", run(2, 20), 0), ("a", "host", run(3), 3))
    assert worth_storing(index, "a") == 0


def test_what_an_engine_that_stays_has_in_memory_is_evicted_for_nothing() -> None:
    index = index_of(("b", "storage", run(1), 9), ("b", "host", run(1), 0), ("a", "host", run(3), 1))
    assert worth_storing(index, "a") == 10
    assert worth_storing(index, "a", ["b"]) == 0, "it leaves, too"


def test_engines_that_leave_together_share_what_there_is_to_evict() -> None:
    index = index_of(
        ("c", "storage", run(1, 12), 0), ("c", "storage", run(2), 9), ("a", "host", run(3), 3), ("b", "host", run(4), 2)
    )
    assert (worth_storing(index, "a"), worth_storing(index, "b")) == (10, 10), "each by itself"
    assert (worth_storing(index, "a", ["b"]), worth_storing(index, "b", ["a"])) == (10, 2)


def test_what_others_have_is_not_counted_and_storage_of_others_is_not_evicted() -> None:
    index = index_of(("x", "storage", run(1), 9), ("a", "host", run(3), 1), ("b", "host", run(3), 0))
    assert worth_storing(index, "a") == 0
    index = index_of(("x", "storage", run(1), 9), ("a", "host", run(3), 1))
    assert worth_storing(index, "a") == 10, "nothing is known that would go"
    assert worth_storing(index, "unknown") == 0


def test_what_its_storage_has_already_evicts_nothing() -> None:
    index = index_of(("a", "storage", run(1), 9), ("a", "storage", run(2), 5), ("a", "host", run(3), 1))
    index.set_volume("a", "")
    assert worth_storing(index, "a") == 0
