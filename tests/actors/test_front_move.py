"""Scheduler, store and HTTP servers leave a node that is about to go: they serve until their successors do."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest

from headwise.actors.front import Front
from headwise.actors.front_move import FrontMove
from headwise.actors.front_switch import ENGINES_S
from headwise.actors.names import in_turn, next_turn
from headwise.actors.restarts import Life, Phase
from headwise.actors.role import Role, StandbyRole
from headwise.actors.supervisor import Supervisor

TIMEOUT_S = 100.0
ROLES = "scheduler", "store", "http-0"


class Site:
    """Of the front; it may leave for these nodes, in this order."""

    def __init__(self, node: str = "a", others: list[str] | None = None) -> None:
        self.node = node
        self.others = ["b", "c"] if others is None else others
        self.dead = set[str]()

    @property
    def address(self) -> str:
        return self.node.rstrip("'")  # a' is another raylet of a's machine

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset((self.node,))

    def is_alive(self) -> bool:
        return self.node not in self.dead

    def is_placed(self) -> bool:
        return True

    def choose(self, life: Life) -> None:
        pass

    def next(self) -> Site | None:
        site = Site(self.node, self.others)
        site.dead = self.dead
        return site if site.leave() else None

    def leave(self) -> bool:
        if self.others:
            self.node = self.others.pop(0)
            return True
        return False

    def go_to(self, site: Site) -> None:
        self.node = site.node

    def release(self) -> None:
        pass


class Method:
    """Of an actor's handle; notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "called"


class Actor:
    """What `Role.kill` ends; its class has these methods."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.ready, self.ended, self.leave, self.__ray_call__ = Method(), Method(), Method(), Method()


class Frontend:
    """`headwise.actors.frontend.Frontend`, without the actors' classes."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.roles = {name: role(name, site) for name in ROLES}

    @property
    def front(self) -> Front:
        return Front(self.site.address, 8700, "", "")

    def successors(self, site: Site, taken: Collection[str]) -> dict[str, Role]:
        turn = next_turn(taken)
        made = {name: role(f"next {name}", site) for name in ROLES}
        for name, each in made.items():
            each.known_as, each.has_streams = in_turn(name, turn), name != "store"
        return made


class Moving:
    """A front on node a, whose move is looked at by hand."""

    def __init__(self, site: Site | None = None) -> None:
        self.site = site or Site()
        self.frontend, self.supervisor = Frontend(self.site), Supervisor()
        self.draining: dict[str, float] = {}
        self.taken = set(ROLES)
        self.engines: list[Role] = []
        self.move = FrontMove(
            self.frontend, self.supervisor, lambda: self.draining, lambda: self.taken, TIMEOUT_S, clock=lambda: 0.0
        )
        for name, each in self.frontend.roles.items():
            each.has_streams = name != "store"
            self.supervisor.add(each)
            self.serves(each)
        self.standby = StandbyRole(self.frontend.roles["scheduler"])
        self.supervisor.add(self.standby)
        self.serves(self.standby)
        self.actors = {name: each.handle for name, each in self.frontend.roles.items()}

    def serves(self, each: Role) -> None:
        each.handle = Actor(each.known_as)
        each.is_ready = each.is_over = f"call of {each.known_as}"
        each.life.created(0.0)
        each.life.ready(1.0)

    def successors_serve(self) -> None:
        for each in self.successors.values():
            self.serves(each)

    def look(self, now: float) -> None:
        self.move.look(now, self.engines)

    @property
    def successors(self) -> dict[str, Role]:
        return {
            name.removeprefix("next "): each for name, each in self.supervisor.roles.items() if name.startswith("next ")
        }

    @property
    def serving(self) -> dict[str, str]:
        """What the actors that serve are called, by role."""
        found = {name: self.supervisor.serving(name) for name in ROLES}
        return {name: handle.name for name, handle in found.items() if handle is not None}


def role(name: str, site: Any) -> Role:
    return Role("d", name, None, lambda: (), site, Life(60.0))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the roles whose actors were."""
    names: list[str] = []
    monkeypatch.setattr(Role, "kill", lambda each: names.append(each.name) if each.handle is not None else None)
    return names


def test_the_old_front_serves_until_its_successors_do(killed: list[str]) -> None:
    moving = Moving()
    moving.look(0.0)
    assert moving.successors == {}
    moving.draining["a"] = 600.0
    moving.look(2.0)
    assert {name: each.known_as for name, each in moving.successors.items()} == {name: f"{name}.1" for name in ROLES}
    assert all(each.site.node == "b" and each.is_due(3.0) for each in moving.successors.values())
    for name in ("scheduler", "http-0"):
        moving.serves(moving.successors[name])
        moving.look(3.0)
    assert moving.serving == {name: name for name in ROLES}, "the store's does not serve yet"
    assert moving.frontend.front.node == "a", "engines report there"
    assert moving.actors["scheduler"].leave.calls == []
    moving.serves(moving.successors["store"])
    moving.look(4.0)
    assert moving.serving == {name: f"{name}.1" for name in ROLES}
    assert moving.frontend.front.node == "b"
    assert moving.successors == {}
    for name in ("scheduler", "http-0"):
        assert moving.actors[name].leave.calls == [(TIMEOUT_S, 600.0, moving.frontend.front)]
        assert moving.frontend.roles[name].awaited() == f"call of {name}.1", "its end will be noticed"
    assert sorted(killed) == ["scheduler-standby", "store"]
    moving.look(9.0)
    assert moving.successors == {}, "once"


def test_the_one_that_stood_by_is_made_anew_beside_the_successor(killed: list[str]) -> None:
    moving = Moving()
    moving.draining["a"] = 600.0
    moving.look(0.0)
    assert moving.standby.handle is not None, "until then it may be needed"
    moving.successors_serve()
    moving.look(1.0)
    assert (moving.standby.handle, moving.standby.known_as) == (None, "scheduler-standby.1")
    assert moving.standby.site.node == "b"
    assert not moving.frontend.roles["scheduler"].promote()
    assert moving.standby.is_due(math.inf)


def test_the_engines_of_the_node_are_told_to_go_first_unless_nobody_can_decide(killed: list[str]) -> None:
    moving = Moving()
    moving.engines = [role("engine-0", Site("a")), role("engine-1", Site("c"))]
    moving.draining["a"] = math.inf
    moving.look(0.0)
    moving.successors_serve()
    moving.look(ENGINES_S - 0.5)
    assert moving.frontend.front.node == "a"
    moving.look(ENGINES_S + 0.5)
    assert moving.frontend.front.node == "b"


def test_where_it_cannot_leave_it_stays_until_it_can(killed: list[str]) -> None:
    moving = Moving(Site(others=[]))
    moving.draining["a"] = math.inf
    for now in (0.0, 2.0):
        moving.look(now)
    assert moving.successors == {}
    moving.site.others.append("b")
    moving.look(4.0)
    assert set(moving.successors) == set(ROLES)


def test_successors_that_do_not_come_up_get_the_roles_when_the_deadline_nears(killed: list[str]) -> None:
    moving = Moving()
    moving.draining["a"] = 40.0
    moving.look(0.0)
    moving.serves(moving.successors["http-0"])
    moving.look(20.0)
    assert moving.serving == {name: name for name in ROLES}
    moving.look(30.0)
    assert moving.serving == {"http-0": "http-0.1"}
    for name in ROLES:
        each = moving.frontend.roles[name]
        assert each.known_as == f"{name}.1"
        assert each.life.phase is (Phase.RUNNING if name == "http-0" else Phase.DOWN), "it is tried again and again"
    assert len(moving.supervisor.formers) == 2


def test_a_scheduler_that_is_lost_meanwhile_is_not_made_again_where_it_was(killed: list[str]) -> None:
    moving = Moving()
    moving.draining["a"] = 600.0
    moving.look(0.0)
    scheduler = moving.frontend.roles["scheduler"]
    moving.standby.handle = None
    moving.supervisor._end(scheduler, "killed", 2.0)
    moving.supervisor._advance(scheduler, 3.0)
    assert scheduler.life.phase is Phase.DOWN, "Ray starts nothing on a node that it drains"
    moving.look(3.0)
    assert moving.frontend.front.node == "b"
    assert scheduler.known_as == "scheduler.1"
    assert [each.known_as for each in moving.supervisor.formers] == ["http-0"]


def test_a_standby_takes_the_place_of_a_scheduler_that_is_lost_meanwhile(killed: list[str]) -> None:
    moving = Moving()
    moving.draining["a"] = 600.0
    moving.look(0.0)
    scheduler, stood_by = moving.frontend.roles["scheduler"], moving.standby.handle
    moving.supervisor._end(scheduler, "killed", 2.0)
    moving.supervisor._advance(scheduler, 3.0)
    moving.look(3.0)
    assert (moving.frontend.front.node, scheduler.handle) == ("a", stood_by)


def test_a_node_that_goes_before_its_time_is_not_waited_for(killed: list[str]) -> None:
    moving = Moving()
    moving.draining["a"] = 600.0
    moving.look(0.0)
    moving.draining.clear()  # Ray has forgotten it
    moving.site.dead.add("a")
    moving.look(1.0)
    assert moving.frontend.front.node == "b"


def test_successors_whose_node_is_drained_too_are_made_on_a_third_one(killed: list[str]) -> None:
    moving = Moving()
    moving.draining["a"] = 600.0
    moving.look(0.0)
    moving.successors_serve()
    moving.draining["b"] = 600.0
    moving.look(1.0)
    assert moving.serving == {name: name for name in ROLES}
    for each in moving.successors.values():
        assert (each.site.node, each.life.phase, each.handle) == ("c", Phase.DOWN, None)
    assert sorted(killed) == [f"next {name}" for name in sorted(ROLES)]
    moving.successors_serve()
    moving.look(2.0)
    assert moving.frontend.front.node == "c"


def test_a_second_raylet_of_the_same_machine_gets_the_port_only_when_the_first_one_has_left_it(
    killed: list[str],
) -> None:
    moving = Moving(Site(others=["a'"]))
    moving.draining["a"] = 600.0
    moving.look(0.0)
    assert moving.site.node == "a'"
    assert moving.serving == {}
    assert [each.known_as for each in moving.supervisor.formers] == ["scheduler", "http-0"]
    assert moving.frontend.roles["store"].is_due(1.0)


def test_one_move_follows_another(killed: list[str]) -> None:
    """And nobody who comes back to a node meets who still leaves it."""
    moving = Moving(Site(others=["b", "a"]))
    for turn, node in enumerate("ab"):
        moving.draining, moving.taken = {node: 600.0}, {in_turn(name, turn) for name in ROLES}
        moving.look(100.0 * turn)
        moving.successors_serve()
        moving.look(100.0 * turn + 1.0)
    assert moving.site.node == "a"
    assert moving.serving == {name: f"{name}.2" for name in ROLES}
    assert [each.known_as for each in moving.supervisor.formers] == ["scheduler.1", "http-0.1"]
    assert {"former scheduler", "former http-0"} <= set(killed)


def test_one_that_leaves_is_ended_if_it_does_not_end_by_itself(killed: list[str]) -> None:
    moving = Moving()
    moving.draining["a"] = 600.0
    moving.look(0.0)
    moving.successors_serve()
    moving.look(1.0)
    scheduler, server = moving.supervisor.formers
    assert (scheduler.name, str(scheduler)) == ("former scheduler", "former scheduler on node a")
    assert moving.supervisor.now() < scheduler.leave_by < moving.supervisor.now() + TIMEOUT_S + 10.0
    moving.supervisor._end(server, "it has stopped", 2.0)
    assert moving.supervisor.formers == [scheduler]
    moving.supervisor._advance(scheduler, scheduler.leave_by)
    assert moving.supervisor.formers == []
    assert killed[-1] == "former scheduler"
