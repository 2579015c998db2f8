"""Which engines go when there are too many: those that cost least to lose, in engine-seconds.

loss = recomputing what only it has cached, as often as that was asked for lately
       + what it has still to do while it takes no new requests: prompts queued there, and the end of what runs
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headwise.runtime.frontend.scaling.base import CacheWorth, EngineReport, Observation


@dataclass(frozen=True)
class Leaving:
    """An engine that is to go, and the engine-seconds that it costs."""

    name: str
    loss_s: float


def choose_leaving(
    candidates: Sequence[str], count: int, observed: Observation, cache: CacheWorth | None, going: Collection[str] = ()
) -> list[Leaving]:
    """The ``count`` of ``candidates`` that cost least to lose, one after the other: what only two engines have is worth
    something as soon as one of them goes. Equal ones: the fewest requests, then the highest number.

    cache: None: nothing is known of caches
    going: engines that go already: what they have does not count
    """
    reports = {report.name: report for report in observed.engines}
    left, chosen = list(candidates), list[Leaving]()
    while left and len(chosen) < count:
        without = {*going, *(each.name for each in chosen)}
        worth = cache.worth(without) if cache is not None else {}
        best = min(left, key=lambda name: _order(name, reports, worth, observed))
        chosen.append(Leaving(best, _order(best, reports, worth, observed)[0]))
        left.remove(best)
    return chosen


def number_of(name: str) -> int:
    """The number at a name's end; -1: it has none."""
    found = re.search(r"(\d+)$", name)
    return int(found.group(1)) if found else -1


def _order(
    name: str, reports: Mapping[str, EngineReport], worth: Mapping[str, float], observed: Observation
) -> tuple[float, int, int]:
    report = reports.get(name, EngineReport(name, 0.0))
    cached_s = worth.get(name, 0.0) * observed.block_size * observed.token_s
    ending_s = report.backlog_s + (report.turnover_s if report.requests else 0.0)
    return round(cached_s + ending_s, 3), report.requests, -number_of(name)
