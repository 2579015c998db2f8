"""Which engines go when there are too many."""

from __future__ import annotations

from collections.abc import Collection

from support.index.truth import block

from headwise.runtime.frontend.routing.engines import Arrivals
from headwise.runtime.frontend.scaling import EngineReport, Observation
from headwise.runtime.frontend.scaling.leaving import choose_leaving
from headwise.storage.index.prefix_index import PrefixIndex

NAMES = ["engine-0", "engine-1", "engine-2"]


class Caches:
    def __init__(self, **worth: float) -> None:
        self._worth = {name.replace("_", "-"): value for name, value in worth.items()}

    def worth(self, without: Collection[str] = ()) -> dict[str, float]:
        return self._worth


def observed(*requests: int, backlog_s: float = 0.0) -> Observation:
    reports = tuple(
        EngineReport(f"engine-{number}", 0.1, count, backlog_s if count else 0.0, 10.0)
        for number, count in enumerate(requests)
    )
    return Observation(reports, Arrivals(), token_s=1e-3, block_size=100)


def test_of_equal_ones_the_highest_number_goes() -> None:
    names = ["engine-9", "engine-10", "engine-2"]
    assert [each.name for each in choose_leaving(names, 2, observed(), None)] == ["engine-10", "engine-9"]


def test_of_equal_ones_the_one_with_the_fewest_requests_goes() -> None:
    assert choose_leaving(NAMES, 1, observed(5, 3, 4), Caches())[0].name == "engine-1"


def test_a_cache_is_worth_the_seconds_of_computing_it_again() -> None:
    seen, caches = observed(0, 0, 0), Caches(engine_0=300.0, engine_1=200.0, engine_2=250.0)
    gone = choose_leaving(NAMES, 1, seen, caches)[0]
    assert (gone.name, gone.loss_s) == ("engine-1", 200 * 100 * 1e-3)


def test_an_engine_with_work_stays_if_its_end_takes_longer_than_computing_the_other_ones_cache() -> None:
    seen = observed(4, 0, 4, backlog_s=20.0)
    assert choose_leaving(NAMES, 1, seen, Caches(engine_1=299.0))[0].name == "engine-1"
    assert choose_leaving(NAMES, 1, seen, Caches(engine_1=301.0))[0].name == "engine-2"


def test_what_two_leaving_engines_share_is_worth_something_when_the_first_has_gone() -> None:
    """Engines 1 and 2 have the same blocks: as soon as one of them goes, the other is the last that has them."""
    index = PrefixIndex()
    own, common = b"".join(map(block, range(5))), b"".join(map(block, range(100, 120)))
    index.apply("engine-0", "device", own, True)
    index.apply("engine-1", "device", common, True)
    index.apply("engine-2", "host", common, True)
    gone = choose_leaving(NAMES, 2, observed(0, 0, 0), index)
    assert [each.name for each in gone] == ["engine-2", "engine-0"]
    assert choose_leaving(NAMES[:2], 1, observed(0, 0, 0), index, going=["engine-2"])[0].name == "engine-0"


def test_there_may_be_fewer_than_are_to_go() -> None:
    assert len(choose_leaving(NAMES, 5, observed(), None)) == 3
    assert choose_leaving(NAMES, 0, observed(), None) == []
