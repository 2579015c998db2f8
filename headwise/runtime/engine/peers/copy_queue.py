"""The copies that were ordered from the workers, in the order in which these make them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from headwise.cache_controller.arrivals import Arrival
from headwise.runtime.engine.peers.load import Load
from headwise.transfer.peer_reads import MAX_OWNERS

Owner = tuple[str, int]
"""An engine, and the epoch of its cache."""


class CopyQueue:
    """Knows whose turn it is: workers read a few owners at a time, and of each what was ordered first (`PeerReads`).
    One that hangs holds up for a timeout what else it was to send; as many as are read at a time hold up all others.
    The time of a load counts from when its turn comes."""

    def __init__(self) -> None:
        self._load_of: dict[Owner, dict[Arrival, tuple[int, Load]]] = {}  # not over yet, in that order, numbered
        self._numbers = itertools.count()
        self._current: list[Load] = []
        self._have_moved: dict[Load, None] = {}

    def add(self, load: Load, arrivals: Iterable[Arrival]) -> None:
        """These were ordered."""
        of_owner = self._load_of.setdefault(_owner_of(load), {})
        of_owner.update((arrival, (next(self._numbers), load)) for arrival in arrivals)

    def reported(self, load: Load, arrivals: Iterable[Arrival]) -> None:
        """These copies of a load are over."""
        owner = _owner_of(load)
        for arrival in arrivals:
            del self._load_of[owner][arrival]
        if not self._load_of[owner]:
            del self._load_of[owner]
        self._have_moved[load] = None

    def is_behind(self, load: Load) -> bool:
        """Whether copies of a load were ordered, and others' come first."""
        return bool(load.ordered) and load not in self._current

    def advance(self, now: float) -> None:
        """Note which loads have got on: by copies of their own, or of others while their turn has not come."""
        firsts = heapq.nsmallest(MAX_OWNERS, (next(iter(of.values())) for of in self._load_of.values()), key=_number)
        current = [load for _, load in firsts]
        for load in self._have_moved:
            load.moved = now
        if self._have_moved:
            for of_owner in self._load_of.values():
                for _, load in of_owner.values():
                    if load not in current:
                        load.moved = now
        for load in current:
            if load not in self._current:
                load.moved = now
        self._current = current
        self._have_moved.clear()


def _owner_of(load: Load) -> Owner:
    return load.engine, load.epoch


def _number(of: tuple[int, Load]) -> int:
    return of[0]
