from __future__ import annotations

import gc
import itertools
import weakref

from headwise.kernels.latest import OfEach, OfLatest


class Batch:
    """Equal to all others, as batches of the same arrays are."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def test_what_is_made_of_the_latest_source_is_kept_and_of_no_other() -> None:
    numbers = itertools.count(1)
    number_of = OfLatest[Batch, int](lambda batch: next(numbers))
    first, second = Batch(), Batch()
    assert [number_of(batch) for batch in (first, first, second, second, first)] == [1, 1, 2, 2, 3]


def test_a_source_that_has_gone_is_taken_for_no_other() -> None:
    """Whose memory, and so whose id, the next one may have."""
    numbers = itertools.count()
    number_of = OfLatest[Batch, int](lambda batch: next(numbers))
    for number in range(50):
        assert number_of(Batch()) == number
    batch = Batch()
    number_of(batch)
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None, "sources are not kept"


def test_what_is_made_of_each_is_kept_with_its_sources_up_to_so_many() -> None:
    numbers = itertools.count(1)
    number_of = OfEach(lambda *batches: next(numbers), most=2)
    first, second, third = Batch(), Batch(), Batch()
    assert [number_of(batch) for batch in (first, second, first, second)] == [1, 2, 1, 2]
    assert number_of(first, None) == 3, "another call, and one too many"
    assert [number_of(batch) for batch in (first, first)] == [4, 4]
    kept = weakref.ref(third)
    assert number_of(third) == 5
    del third
    gc.collect()
    assert kept() is not None, "or its id would be another one's"
    assert [number_of(Batch()) for _ in range(20)] == list(range(6, 26))
