"""An owner that is started again tells what serves from what is leaving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import ray

from headwise import EngineConfig
from headwise.actors import frontend
from headwise.actors.cluster import Cluster
from headwise.actors.deployment import Deployment
from headwise.actors.found import Found, serving_names
from headwise.actors.front import Front, Keys
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
    def remote(self, *_: Any) -> str:
        return "called"


class Actor:
    """Its class has these methods."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready, self.ended, self.__ray_call__ = Method(), Method(), Method()


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
    deployment = Deployment(
        EngineConfig(http=8000, http_servers=2, standby=False), Cluster(), Keys("secret"), is_detached=True
    )
    knowing = {name: front for name, front in stay.items() if front is not None}
    known_as = serving_names(stay, knowing)
    actors = {name: Actor(name) for name in (*stay, *leave)}
    deployment.adopt(Found(actors, front=FRONT, leaving=frozenset(leave), known_as=known_as))
    return deployment, engines, killed


def test_actors_that_leave_are_left_to_it_and_those_that_came_after_them_are_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stay = {"scheduler.1": FRONT, "scheduler-standby": None, "store": None, "http-0.1": None, "http-1.1": None}
    leave = ["scheduler", "http-0", "http-1"]
    deployment, engines, killed = adopted(monkeypatch, stay={**stay, "engine-0": FRONT}, leave=leave)
    assert engines == ["engine-0"], "HTTP servers, which have numbers, too, are none"
    assert killed == ["scheduler-standby"]
    roles = deployment._roles
    names = {"scheduler": "scheduler.1", "store": "store", "http-0": "http-0.1", "http-1": "http-1.1"}
    assert {name: roles[name].known_as for name in names} == names
    assert {name: roles[name].handle.name for name in names} == names  # type: ignore[union-attr]
    formers = deployment._supervisor.formers
    assert sorted(each.handle.name for each in formers) == sorted(leave)
    assert all(each.life.phase is Phase.RUNNING and each.is_leaving for each in formers)


def test_while_the_one_before_leaves_the_next_one_is_made_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stay = {"scheduler": FRONT, "store": None, "http-1": None}
    deployment, _, killed = adopted(monkeypatch, stay=stay, leave=["http-0"])
    assert killed == []
    role = deployment._roles["http-0"]
    assert (role.handle, role.known_as) == (None, "http-0.1")
    assert role.life.phase is Phase.DOWN
