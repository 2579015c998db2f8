"""The copies that were ordered from the workers, in the order in which these make them."""

from __future__ import annotations

from collections.abc import Iterable

from headwise.cache_controller.arrivals import Arrival
from headwise.runtime.engine.peers.load import Load


class CopyQueue:
    """Knows whose turn it is: workers read owners one after the other (`PeerReads`), and one that hangs holds up those
    behind it for a timeout. The time of a load counts from when its turn comes."""

    def __init__(self) -> None:
        self._load_of: dict[Arrival, Load] = {}  # not over yet, in that order
        self._first: Load | None = None
        self._have_moved: dict[Load, None] = {}

    def add(self, load: Load, arrivals: Iterable[Arrival]) -> None:
        """These were ordered."""
        self._load_of.update(dict.fromkeys(arrivals, load))

    def reported(self, loads: Iterable[Load], arrivals: Iterable[Arrival]) -> None:
        """These copies, of those loads, are over."""
        for arrival in arrivals:
            del self._load_of[arrival]
        self._have_moved.update(dict.fromkeys(loads))

    def is_behind(self, load: Load) -> bool:
        """Whether copies of a load were ordered, and others' come first."""
        return bool(load.ordered) and load is not self._first

    def advance(self, now: float) -> None:
        """Note which loads have got on: by copies of their own, or of others before them."""
        first = next(iter(self._load_of.values()), None)
        for load in self._have_moved:
            load.moved = now
        if self._have_moved:
            for load in self._load_of.values():
                if load is not first:
                    load.moved = now
        if first is not None and first is not self._first:
            first.moved = now
        self._first = first
        self._have_moved.clear()
