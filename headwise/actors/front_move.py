"""Has scheduler, store and HTTP servers leave a node in time that is about to be taken away."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from headwise.actors.role import PastSite, Role

log = logging.getLogger(__name__)

LOOK_S = 1.0
ENGINES_S = 5.0
"""Longest wait for that node's engines to be told to go: the owner hears by the scheduler what they have cached."""


class FrontSite(Protocol):
    """`headwise.actors.placement.FrontendSite`."""

    node: str
    address: str

    def leave(self) -> bool: ...


class FrontMove:
    """site:     where they are, all on one node
    draining: returns the nodes that are about to be taken away, and when, as `time.time` counts
    move:     has a role's next actor started where ``site`` is now, and the present one end in time. Is given the role,
              where the present one is, and when that node goes
    """

    def __init__(
        self,
        site: FrontSite,
        roles: Collection[Role],
        draining: Callable[[], Mapping[str, float]],
        move: Callable[[Role, PastSite, float], None],
    ) -> None:
        self._site, self._roles, self._draining, self._move = site, roles, draining, move
        self._look_at = -math.inf
        self._since: float | None = None  # when the notice was seen
        self._told = ""  # the node that cannot be left, as the log says

    def look(self, now: float, engines: Iterable[Role]) -> None:
        """Move, if it is time: those of the node's engines that serve are to be told to go before. Several times a
        second."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        draining = self._draining()
        if self._site.node not in draining:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        stays = any(self._site.node in each.site.nodes and not each.is_leaving for each in engines)
        if stays and now - self._since < ENGINES_S:
            return
        here = PastSite(self._site.node, self._site.address)
        if self._site.leave():
            log.warning("Ray drains node %s: scheduler and store leave it for %s", here.address, self._site.address)
            self._since = None
            for role in self._roles:
                self._move(role, here, draining[here.node])
        elif self._told != here.node:
            self._told = here.node
            log.warning("Ray drains node %s, on which scheduler and store are: they cannot leave it", here.address)
