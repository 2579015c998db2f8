"""The routing policies: each gives every engine a cost, in its own unit. The router takes the engine with the least."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from headwise.runtime.frontend.routing.base import Matches, RoutedRequest, RouterOptions
from headwise.runtime.frontend.routing.costs import Estimate, estimate
from headwise.runtime.frontend.routing.engines import Column, EngineTable


class Policy(Protocol):
    """uses_index: whether `estimate` looks at the index's matches"""

    uses_index: bool

    def estimate(self, table: EngineTable, request: RoutedRequest, matches: Matches | None, now: float) -> Estimate:
        """The cost of every engine, also of those that cannot take the request."""
        ...

    def note_selected(self, row: int) -> None:
        """The engine of this row got the request."""
        ...


class CacheAware:
    """Prefers the engine where the request starts first and takes the least time from others; see `costs`."""

    uses_index = True

    def __init__(self, options: RouterOptions) -> None:
        self._options = options

    def estimate(self, table: EngineTable, request: RoutedRequest, matches: Matches | None, now: float) -> Estimate:
        return estimate(table, request, matches, self._options, now)

    def note_selected(self, row: int) -> None:
        pass


class LeastLoaded:
    """The engine with the fewest requests, running, waiting, or on their way."""

    uses_index = False

    def estimate(self, table: EngineTable, request: RoutedRequest, matches: Matches | None, now: float) -> Estimate:
        return _without_hits(table.requests + table.reserved)

    def note_selected(self, row: int) -> None:
        pass


class RoundRobin:
    """Each engine in turn; one that cannot take the request is skipped."""

    uses_index = False

    def __init__(self) -> None:
        self._last = -1

    def estimate(self, table: EngineTable, request: RoutedRequest, matches: Matches | None, now: float) -> Estimate:
        count = len(table)
        return _without_hits((np.arange(count, dtype=np.float64) - self._last - 1) % count)

    def note_selected(self, row: int) -> None:
        self._last = row


def _without_hits(cost: Column) -> Estimate:
    nothing = np.zeros(len(cost))
    return Estimate(cost, np.zeros((len(cost), 3)), nothing, nothing, nothing)


def make_policy(options: RouterOptions) -> Policy:
    """The policy of the configuration's name."""
    policies: dict[str, Callable[[], Policy]] = {
        "cache_aware": partial(CacheAware, options),
        "least_loaded": LeastLoaded,
        "round_robin": RoundRobin,
    }
    if options.policy not in policies:
        raise ValueError(f"policy must be one of {', '.join(policies)}, got {options.policy!r}")
    return policies[options.policy]()
