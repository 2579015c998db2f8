from __future__ import annotations

import gc
import itertools
import weakref

from headwise.kernels.cuda.latest import OfLatest


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
