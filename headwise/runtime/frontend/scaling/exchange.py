"""What the scheduler and the owner of the engines tell each other once a second, in one call of the owner.

The owner is the process that started the deployment. It decides (`ReplicaSet`) and acts: it outlives the scheduler, so
a number set by hand, and what was needed lately, survive a scheduler that is started again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from headwise.runtime.frontend.routing.base import EngineRole
from headwise.runtime.frontend.scaling.base import Observation
from headwise.runtime.frontend.scaling.replica_set import ReplicaSet
from headwise.runtime.frontend.scaling.roles import Split
from headwise.runtime.protocol.weights import FIRST, Weights


@dataclass(frozen=True)
class Wish:
    """What clients asked for.

    id:          no other wish has it, also none that was told to another scheduler
    replicas:    so many engines; None: as many as the load needs
    sets_number: whether anybody asked for a number
    roll:        id of the last wish that all engines be replaced; empty: there was none
    split:       how many engines compute prompts only, and how many decode only; None: nobody asked for that
    deal:        id of the last wish that named a split; empty: there was none
    weights:     that engines are started with; None: nobody asked for others than those of the start
    """

    id: str
    replicas: int | None = None
    sets_number: bool = True
    roll: str = ""
    split: Split | None = None
    deal: str = ""
    weights: Weights | None = None


@dataclass(frozen=True)
class FleetState:
    """From the owner: the engines that there are or will be, and its last decision.

    number:   engines that are to serve
    reason:   of the last decision, in words
    replicas: by name, how far each is, in words
    expected: engines that have a node and are not leaving
    is_awaited: whether requests that no engine can take may wait for one
    is_on_demand: whether it has no engines while there are no requests, and the first one gets one
    is_closing: whether the deployment ends, so that it takes no requests any more
    wish:     id of the last wish that was taken; empty: none yet
    refusal:  why that wish was refused; empty: it was not
    roles:    by name, what engines are for; those that are not named serve whole requests
    weights:  that engines are started with; None: the owner does not know, as it took the deployment over
    """

    number: int
    reason: str
    replicas: Mapping[str, str] = field(default_factory=dict)
    expected: int = 0
    is_awaited: bool = True
    is_on_demand: bool = False
    is_closing: bool = False
    wish: str = ""
    refusal: str = ""
    roles: Mapping[str, EngineRole] = field(default_factory=dict)
    weights: Weights | None = FIRST


@dataclass(frozen=True)
class SchedulerNews:
    """From the scheduler.

    serial:   of the observation: the same one as last time says nothing new, for example while the scheduler hangs
    silent:   engines that were found silent since the last call, and are to be replaced
    observed: None: nothing was observed yet
    wish:     the last one; None: there is none
    """

    serial: int = 0
    silent: tuple[str, ...] = ()
    observed: Observation | None = None
    wish: Wish | None = None


class Exchange:
    """The scheduler's end: its server's thread leaves news here and reads what the owner told; the owner's call comes
    on another thread.

    fleet: what the owner told last; None: it has not called yet
    """

    def __init__(self) -> None:
        self.fleet: FleetState | None = None
        self._lock = threading.Lock()
        self._news = SchedulerNews()
        self._silent: set[str] = set()

    def note_silent(self, engine: str) -> None:
        """This engine has been silent for too long."""
        with self._lock:
            self._silent.add(engine)

    def observe(self, observed: Observation) -> None:
        """This is how it looks now."""
        with self._lock:
            self._news = SchedulerNews(self._news.serial + 1, (), observed, self._news.wish)

    def wish(self, wish: Wish) -> None:
        """A client asks for it. It takes the place of any wish before."""
        with self._lock:
            self._news = SchedulerNews(self._news.serial, (), self._news.observed, wish)

    @property
    def agreed(self) -> Wish | None:
        """The last wish, if the owner has taken it."""
        with self._lock:
            wish = self._news.wish
            return wish if wish is not None and self.fleet is not None and self.fleet.wish == wish.id else None

    def swap(self, fleet: FleetState) -> SchedulerNews:
        """The owner tells how the engines are, and gets the news."""
        with self._lock:
            self.fleet = fleet
            silent, self._silent = tuple(sorted(self._silent)), set()
            return SchedulerNews(self._news.serial, silent, self._news.observed, self._news.wish)


class Wishes:
    """The owner's end: has the controller do what clients ask for, each thing once, whichever scheduler tells of it.

    last:    id of the last wish that was taken; empty: none yet
    refusal: why it was refused; empty: it was not
    split:   of the engines, now: the one that was asked for last, or what was decided since
    weights: that engines are started with; None: not known
    """

    def __init__(self, controller: ReplicaSet, split: Split | None = None) -> None:
        self.last = self.refusal = ""
        self.split = split or Split()
        self.weights: Weights | None = FIRST
        self._controller = controller
        self._roll = self._deal = ""

    def resume(self, wish: Wish | None) -> None:
        """The owner before this one took it: a number still holds, and what was replaced is not replaced again. None:
        nobody knows of one."""
        self.weights = None
        if wish is not None:
            self._roll = wish.roll
            self.take(wish)

    def take(self, wish: Wish) -> bool:
        """False: it was taken before."""
        if wish.id == self.last:
            return False
        self.last, self.refusal = wish.id, ""
        if wish.roll and wish.roll != self._roll:
            self._roll = wish.roll
            self._controller.roll()
        self.weights = wish.weights or self.weights
        try:
            if wish.sets_number:
                self._controller.set_by_hand(wish.replicas)
        except ValueError as error:
            self.refusal = str(error)
            return True
        if wish.split is not None and (wish.deal != self._deal or not wish.deal):
            self.split, self._deal = wish.split, wish.deal
        return True
