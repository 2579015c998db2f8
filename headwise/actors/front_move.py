"""Has scheduler, store and HTTP servers leave a node in time that is about to be taken away."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from headwise.actors.front import Front, Notice
from headwise.actors.front_switch import Seen, Step, Successors, next_step, patience_s
from headwise.actors.names import SCHEDULER
from headwise.actors.notice import drain_time
from headwise.actors.restarts import Phase
from headwise.actors.role import PastSite, Role

log = logging.getLogger(__name__)

LOOK_S = 1.0


class FrontSite(Protocol):
    """`headwise.actors.placement.FrontendSite`."""

    node: str
    address: str

    def is_alive(self) -> bool: ...
    def next(self) -> FrontSite | None: ...
    def leave(self) -> bool: ...
    def go_to(self, site: FrontSite) -> None: ...


class Frontend(Protocol):
    """`headwise.actors.frontend.Frontend`."""

    roles: dict[str, Role]
    site: Any

    @property
    def front(self) -> Front: ...
    def successors(self, site: Any, taken: Collection[str]) -> dict[str, Role]: ...


class Stage(Protocol):
    """`headwise.actors.supervisor.Supervisor`."""

    def prepare(self, role: Role, successor: Role) -> None: ...
    def prepare_elsewhere(self, successor: Role) -> None: ...
    def switch(self, role: Role, since: PastSite, notice: Notice) -> None: ...


class FrontMove:
    """frontend: what is to leave, all on one node
    stage:     where the actors of both nodes are
    draining:  returns the nodes that are about to be taken away, and when, as `time.time` counts
    taken:     returns the names that the deployment's actors have
    timeout_s: in which requests may end
    """

    def __init__(
        self,
        frontend: Frontend,
        stage: Stage,
        draining: Callable[[], Mapping[str, float]],
        taken: Callable[[], Collection[str]],
        timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._frontend, self._stage = frontend, stage
        self._draining, self._taken, self._timeout_s, self._clock = draining, taken, timeout_s, clock
        self._look_at = -math.inf
        self._since = math.inf  # when the notice was seen
        self._until = math.inf  # when the node goes, by the other clock
        self._patience_s = math.inf
        self._next: FrontSite | None = None  # where the successors are
        self._successors: dict[str, Role] = {}
        self._told = ""  # the node that cannot be left, as the log says

    def look(self, now: float, engines: Iterable[Role]) -> None:
        """Have successors made, and have them be the front, if it is time. Several times a second."""
        if now < self._look_at and self._next is None:
            return
        self._look_at = now + LOOK_S
        draining = self._draining()
        step = next_step(self._seen(now, draining, engines))
        if step is Step.STAY:
            self._since = math.inf
        elif step is Step.BEGIN:
            self._begin()
        if step is Step.SWITCH or (self._next is not None and not self._is_apart):
            self._switch()

    def _seen(self, now: float, draining: Mapping[str, float], engines: Iterable[Role]) -> Seen:
        here = self._frontend.site.node
        if here in draining and self._since == math.inf:
            self._since, self._until = now, draining[here]
            self._patience_s = patience_s(self._timeout_s, self._until - self._clock())
        return Seen(
            is_draining=here in draining,
            is_up=self._frontend.site.is_alive() and self._frontend.roles[SCHEDULER].handle is not None,
            has_engines=any(here in each.site.nodes and not each.is_leaving for each in engines),
            waited_s=now - self._since,
            patience_s=self._patience_s,
            successors=self._seen_of_successors(draining),
        )

    def _seen_of_successors(self, draining: Mapping[str, float]) -> Successors | None:
        if self._next is None:
            return None
        serve = all(each.life.phase is Phase.RUNNING for each in self._successors.values())
        return Successors(serve, self._next.is_alive() and self._next.node not in draining, self._is_apart)

    @property
    def _is_apart(self) -> bool:
        return self._next is not None and self._next.address != self._frontend.site.address

    def _begin(self) -> None:
        """Have the successors made, or if they are made where they cannot stay, elsewhere."""
        here: FrontSite = self._frontend.site
        if self._next is not None:
            if self._next.leave():
                log.warning("the next scheduler and store are to be on node %s", self._next.address)
                for successor in self._successors.values():
                    self._stage.prepare_elsewhere(successor)
            return
        self._next = here.next()
        if self._next is None:
            if self._told != here.node:
                self._told = here.node
                log.warning("Ray drains node %s, on which scheduler and store are: they cannot leave it", here.address)
            return
        log.warning("Ray drains node %s: scheduler and store leave it for %s", here.address, self._next.address)
        self._successors = self._frontend.successors(self._next, self._taken())
        for name, successor in self._successors.items():
            self._stage.prepare(self._frontend.roles[name], successor)

    def _switch(self) -> None:
        """From now on the successors are the front; who was it takes nothing new."""
        assert self._next is not None
        log.warning("scheduler and store are on node %s from now on", self._next.address)
        site: FrontSite = self._frontend.site
        since = PastSite(site.node, site.address)
        site.go_to(self._next)
        stay_s = drain_time(self._timeout_s, self._until - self._clock())
        notice = Notice(stay_s, self._until, self._frontend.front)
        for name in self._successors:  # the scheduler first: from then on whoever asks takes the others for the front
            self._stage.switch(self._frontend.roles[name], since, notice)
        self._next, self._successors, self._since = None, {}, math.inf
