"""The policies: what each engine would cost a request, in a unit of the policy's own. The router takes the least."""

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
        """Per engine the cost that is to be least, whether or not the engine can be asked."""
        ...

    def took(self, row: int) -> None:
        """The engine of this row got the request."""
        ...


class CacheAware:
    """Where the request is expected to start first and to cost others least; see `costs`."""

    uses_index = True

    def __init__(self, options: RouterOptions) -> None:
        self._options = options

    def estimate(self, table: EngineTable, request: RoutedRequest, matches: Matches | None, now: float) -> Estimate:
        return estimate(table, request, matches, self._options, now)

    def took(self, row: int) -> None:
        pass


class LeastLoaded:
    """The engine with the fewest requests, running, waiting, or on their way."""

    uses_index = False

    def estimate(self, table: EngineTable, request: RoutedRequest, matches: Matches | None, now: float) -> Estimate:
        return _without_hits(table.requests + table.reserved)

    def took(self, row: int) -> None:
        pass


class RoundRobin:
    """Each engine in turn; one that cannot be asked is passed over."""

    uses_index = False

    def __init__(self) -> None:
        self._last = -1

    def estimate(self, table: EngineTable, request: RoutedRequest, matches: Matches | None, now: float) -> Estimate:
        count = len(table)
        return _without_hits((np.arange(count, dtype=np.float64) - self._last - 1) % count)

    def took(self, row: int) -> None:
        self._last = row


def _without_hits(cost: Column) -> Estimate:
    return Estimate(cost, np.zeros((len(cost), 3)))


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
