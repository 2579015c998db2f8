"""Scheduler and store leave a node that is about to be taken away."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headwise.actors.front_move import ENGINES_S, FrontMove
from headwise.actors.restarts import Life, Phase
from headwise.actors.role import Role
from headwise.actors.supervisor import Supervisor


@dataclass
class Site:
    """Of the front; it may leave for these nodes."""

    node: str = "a"
    others: list[str] = field(default_factory=lambda: ["b"])

    @property
    def address(self) -> str:
        return self.node

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset((self.node,))

    def leave(self) -> bool:
        self.node = self.others.pop() if self.others else self.node
        return self.node != "a"


def role(name: str, site: Site) -> Role:
    return Role("d", name, None, lambda: (), site, Life(60.0))  # type: ignore[arg-type]


def test_it_leaves_once_the_engines_of_the_node_were_told_to_go() -> None:
    site, draining, moved = Site(), set[str](), list[str]()
    scheduler, engine = role("scheduler", site), role("engine-0", Site())
    move = FrontMove(site, [scheduler], lambda: draining, lambda each: moved.append(each.name))
    move.look(0.0, [engine])
    draining.add("a")
    for now in (2.0, 4.0):
        move.look(now, [engine])
    assert (site.node, moved) == ("a", [])
    engine.leave_by = 60.0
    move.look(5.5, [engine])
    assert (site.node, moved) == ("b", ["scheduler"])
    move.look(10.0, [engine])
    assert moved == ["scheduler"], "once"


def test_it_does_not_wait_for_an_owner_that_cannot_decide() -> None:
    site, moved = Site(), list[str]()
    move = FrontMove(site, [role("scheduler", site)], lambda: {"a"}, lambda each: moved.append(each.name))
    engines = [role("engine-0", Site()), role("engine-1", Site("c"))]
    move.look(0.0, engines)
    move.look(ENGINES_S + 1.0, engines)
    assert moved == ["scheduler"]


def test_where_it_cannot_leave_it_stays_until_it_can() -> None:
    site, moved = Site(others=[]), list[str]()
    move = FrontMove(site, [role("scheduler", site)], lambda: {"a"}, lambda each: moved.append(each.name))
    move.look(0.0, [])
    move.look(2.0, [])
    assert moved == []
    site.others = ["b"]
    move.look(4.0, [])
    assert moved == ["scheduler"]


class Actor:
    """What `Role.kill` ends."""


def test_what_moves_is_started_again_at_once_and_nobody_takes_its_place_who_stood_by_on_the_old_node() -> None:
    supervisor = Supervisor()
    scheduler, standby = role("scheduler", Site("b")), role("scheduler-standby", Site("b"))
    scheduler.standby = standby  # type: ignore[assignment]
    for each in (scheduler, standby):
        each.handle = Actor()
        each.life.created(0.0)
        each.life.ready(1.0)
    ended: list[str] = []
    scheduler.kill = lambda: ended.append("scheduler")  # type: ignore[method-assign]
    standby.kill = lambda: ended.append("standby")  # type: ignore[method-assign]
    supervisor.move(scheduler)
    assert ended == ["scheduler", "standby"]
    assert scheduler.life.phase is standby.life.phase is Phase.DOWN
    assert not scheduler.promote()
    assert scheduler.is_due(math.inf)
