"""Scheduler and store leave a node that is about to be taken away."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from headwise.actors.front_move import ENGINES_S, FrontMove
from headwise.actors.restarts import Life, Phase
from headwise.actors.role import PastSite, Role
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
    site, draining, moved = Site(), dict[str, float](), list[tuple[str, str, float]]()
    scheduler, engine = role("scheduler", site), role("engine-0", Site())
    move = FrontMove(site, [scheduler], lambda: draining, lambda *told: moved.append(in_words(*told)))
    move.look(0.0, [engine])
    draining["a"] = 600.0
    for now in (2.0, 4.0):
        move.look(now, [engine])
    assert (site.node, moved) == ("a", [])
    engine.leave_by = 60.0
    move.look(5.5, [engine])
    assert (site.node, moved) == ("b", [("scheduler", "a", 600.0)])
    move.look(10.0, [engine])
    assert len(moved) == 1, "once"


def test_it_does_not_wait_for_an_owner_that_cannot_decide() -> None:
    site, moved = Site(), list[str]()
    move = FrontMove(site, [role("scheduler", site)], lambda: {"a": math.inf}, lambda each, *_: moved.append(each.name))
    engines = [role("engine-0", Site()), role("engine-1", Site("c"))]
    move.look(0.0, engines)
    move.look(ENGINES_S + 1.0, engines)
    assert moved == ["scheduler"]


def test_where_it_cannot_leave_it_stays_until_it_can() -> None:
    site, moved = Site(others=[]), list[str]()
    move = FrontMove(site, [role("scheduler", site)], lambda: {"a": math.inf}, lambda each, *_: moved.append(each.name))
    move.look(0.0, [])
    move.look(2.0, [])
    assert moved == []
    site.others = ["b"]
    move.look(4.0, [])
    assert moved == ["scheduler"]


def in_words(role: Role, since: PastSite, until: float) -> tuple[str, str, float]:
    return role.name, since.node, until


class Method:
    """Of an actor's handle; notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "called"


class Actor:
    """What `Role.kill` ends; its class has these methods."""

    def __init__(self) -> None:
        self.ended, self.leave, self.__ray_call__ = Method(), Method(), Method()


def moving(*, has_streams: bool) -> tuple[Supervisor, Role, Role]:
    """A scheduler that serves, and the one that stands by, whose site has become another node."""
    supervisor = Supervisor()
    scheduler, standby = role("scheduler", Site("b")), role("scheduler-standby", Site("b"))
    scheduler.standby = standby  # type: ignore[assignment]
    scheduler.has_streams = has_streams
    for each in (scheduler, standby):
        each.handle = Actor()
        each.life.created(0.0)
        each.life.ready(1.0)
        supervisor.add(each)
    return supervisor, scheduler, standby


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the roles whose actors were."""
    names: list[str] = []
    monkeypatch.setattr(Role, "kill", lambda each: names.append(each.name))
    return names


def test_what_moves_is_started_again_at_once_and_nobody_takes_its_place_who_stood_by_on_the_old_node(
    killed: list[str],
) -> None:
    supervisor, scheduler, standby = moving(has_streams=False)
    supervisor.move(scheduler, PastSite("a", "a"), 60.0, math.inf)
    assert sorted(killed) == ["scheduler", "scheduler-standby"]
    assert scheduler.life.phase is standby.life.phase is Phase.DOWN
    assert not scheduler.promote()
    assert scheduler.is_due(math.inf)
    assert scheduler.known_as == "scheduler"


def test_what_has_streams_is_told_to_end_them_and_another_one_under_another_name_takes_its_place_meanwhile(
    killed: list[str],
) -> None:
    supervisor, scheduler, _ = moving(has_streams=True)
    actor = scheduler.handle
    assert actor is not None
    now = supervisor.now()
    supervisor.move(scheduler, PastSite("a", "a"), 60.0, 1e9, ["scheduler", "scheduler-standby", "store"])
    assert killed == ["scheduler-standby"]
    assert actor.leave.calls == [(60.0, 1e9)]
    assert scheduler.is_due(math.inf)
    assert scheduler.handle is None
    assert scheduler.known_as == "scheduler.1"
    assert supervisor.serving("scheduler") is None, "nobody takes the one that leaves for the one that serves"
    (former,) = supervisor.formers
    assert (former.name, former.known_as, str(former)) == (
        "former scheduler",
        "scheduler",
        "former scheduler on node a",
    )
    assert now + 60.0 < former.leave_by < now + 70.0
    supervisor._advance(former, former.leave_by)
    assert killed == ["scheduler-standby", "former scheduler"], "it did not end by itself"
    assert supervisor.formers == []


def test_one_that_leaves_is_forgotten_when_it_ends(killed: list[str]) -> None:
    supervisor, scheduler, _ = moving(has_streams=True)
    supervisor.move(scheduler, PastSite("a", "a"), 60.0, math.inf)
    (former,) = supervisor.formers
    supervisor._end(former, "it has stopped", 2.0)
    assert supervisor.formers == []


def test_who_comes_back_to_a_node_does_not_meet_who_still_leaves_it(killed: list[str]) -> None:
    supervisor, scheduler, _ = moving(has_streams=True)
    supervisor.move(scheduler, PastSite("a", "a"), 60.0, math.inf, ["scheduler", "scheduler-standby"])
    scheduler.handle = Actor()
    scheduler.life.created(3.0)
    scheduler.life.ready(4.0)
    scheduler.site.node = "a"
    supervisor.move(scheduler, PastSite("b", "b"), 60.0, math.inf, ["scheduler", "scheduler.1"])
    assert killed == ["scheduler-standby", "former scheduler"]
    assert [former.known_as for former in supervisor.formers] == ["scheduler.1"]
    assert scheduler.known_as == "scheduler.2"
