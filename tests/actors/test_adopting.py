"""An owner that is started again tells what serves from what is leaving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import ray

from headwise import EngineConfig
from headwise.actors import frontend, placement
from headwise.actors.cluster import Cluster
from headwise.actors.deployment import Deployment
from headwise.actors.found import Found
from headwise.actors.front import Front, Keys
from headwise.actors.front_switch import sort_out
from headwise.actors.restarts import Phase

FRONT = Front("10.0.0.2", 8700, "tcp://10.0.0.2:8701", "namespace")


class Site:
    """Of the front; nobody asks where it is."""

    node = address = "10.0.0.1"

    def __init__(self, *_: Any) -> None:
        pass

    def adopt(self, address: str) -> None:
        self.node = self.address = address


class Method:
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "called"


class Actor:
    """Its class has these methods."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready, self.ended, self.leave, self.__ray_call__ = Method(), Method(), Method(), Method()


def adopted(
    monkeypatch: pytest.MonkeyPatch, *, stay: Mapping[str, Front | None], leave: list[str]
) -> tuple[Deployment, list[str], list[str]]:
    """A deployment whose owner found these actors, the engines that it takes over, and the names of the actors that it
    has killed.

    stay: those that serve or stand by, by name, and where they know the front to be
    """
    engines, killed = list[str](), list[str]()
    monkeypatch.setattr(frontend, "FrontendSite", Site)
    monkeypatch.setattr(ray, "kill", lambda actor: killed.append(actor.name))
    monkeypatch.setattr(Deployment, "_supervise", lambda self, found, names: engines.extend(names))
    config = EngineConfig(host="0.0.0.0", http=8000, http_servers=2, standby=False)
    deployment = Deployment(config, Cluster(), Keys("secret"), is_detached=True)
    knowing = {name: front for name, front in stay.items() if front is not None}
    parts = sort_out(stay, leave, knowing)
    actors = {name: Actor(name) for name in (*stay, *leave)}
    found = Found(
        actors,
        front=FRONT,
        leaving=frozenset(leave),
        late=parts.late,
        idle=parts.idle,
        turn=parts.turn,
        known_as=parts.known_as,
    )
    deployment.adopt(found)
    return deployment, engines, killed


def test_actors_that_leave_are_left_to_it_and_those_that_came_after_them_are_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stay = {"scheduler.1": FRONT, "scheduler-standby.1": None, "store.1": None, "http-0.1": None, "http-1.1": None}
    leave = ["scheduler", "http-0", "http-1"]
    deployment, engines, killed = adopted(monkeypatch, stay={**stay, "engine-0": FRONT}, leave=leave)
    assert engines == ["engine-0"], "HTTP servers, which have numbers, too, are none"
    assert killed == ["scheduler-standby.1"]
    roles = deployment._roles
    names = {"scheduler": "scheduler.1", "store": "store.1", "http-0": "http-0.1", "http-1": "http-1.1"}
    assert {name: roles[name].known_as for name in names} == names
    assert {name: roles[name].handle.name for name in names} == names
    formers = deployment._supervisor.formers
    assert sorted(each.handle.name for each in formers) == sorted(leave)
    assert all(each.life.phase is Phase.RUNNING and each.is_leaving for each in formers)
    assert not any(each.handle.leave.calls for each in formers), "they were told before"


def test_an_owner_that_dies_before_the_switch_has_another_one_that_goes_on_with_those_that_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = ("scheduler", "store", "http-0", "http-1"), ("scheduler.1", "store.1", "http-0.1")
    stay = {name: FRONT if name in ("scheduler", "scheduler.1") else None for name in (*old, *new)}
    deployment, _, killed = adopted(monkeypatch, stay=stay, leave=[])
    assert sorted(killed) == sorted(new)
    assert {name: role.known_as for name, role in deployment._roles.items()} == {name: name for name in old}
    assert deployment._supervisor.formers == []


def test_an_owner_that_dies_in_the_middle_of_the_switch_has_another_one_that_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "draining_nodes", lambda: {"a": 1e12})
    old, new = ("store", "http-0", "http-1"), ("scheduler.1", "store.1", "http-0.1", "http-1.1")
    stay = {name: FRONT if name == "scheduler.1" else None for name in (*old, *new)}
    deployment, _, killed = adopted(monkeypatch, stay=stay, leave=["scheduler"])
    assert killed == ["store"]
    assert {role.handle.name for role in deployment._frontend.roles.values()} == set(new)
    told = {each.handle.name: each.handle.leave.calls for each in deployment._supervisor.formers}
    assert set(told) == {"scheduler", "http-0", "http-1"}
    assert told["scheduler"] == []
    ((stay_s, until, front),) = told["http-0"]
    assert 0.0 < stay_s <= deployment.config.drain_timeout_s
    assert (until, front.node) == (1e12, FRONT.node), "they ask the scheduler there, as far as they can"


def test_while_all_before_leave_the_next_ones_are_made_under_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    stay = {"http-1.1": None, "store.1": None, "engine-0": FRONT}
    deployment, _, killed = adopted(monkeypatch, stay=stay, leave=["scheduler", "http-0"])
    assert killed == []
    for name in ("scheduler", "http-0"):
        role = deployment._roles[name]
        assert (role.handle, role.known_as) == (None, f"{name}.1")
        assert role.life.phase is Phase.DOWN


def test_successors_serve_at_their_own_node_and_their_http_servers_ask_the_scheduler_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stay = {name: FRONT if name == "scheduler" else None for name in ("scheduler", "store", "http-0", "http-1")}
    deployment, *_ = adopted(monkeypatch, stay=stay, leave=[])
    frontend, there = deployment._frontend, Site()
    assert frontend is not None
    there.adopt("10.0.0.3")
    made = frontend.successors(there, ["scheduler", "former.4"])
    assert {name: role.known_as for name, role in made.items()} == {name: f"{name}.5" for name in stay}
    assert made["scheduler"]._arguments()[2:] == (FRONT.port, "tcp://10.0.0.3:8701")
    assert made["store"]._arguments()[1] == replace(FRONT, node="10.0.0.3", store_endpoint="tcp://10.0.0.3:8701")
    assert made["http-0"]._arguments()[2] == "tcp://10.0.0.2:8700"
    assert frontend.front == FRONT, "until the switch"
    assert all(role.starts == 2 for role in made.values()), "they follow others, for whose ports they may have to wait"
