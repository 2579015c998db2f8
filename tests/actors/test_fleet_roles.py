"""The owner deals out what engines are for, and tells the scheduler with the rest."""

from __future__ import annotations

from typing import Any

import pytest

from headwise.actors import fleet as fleets
from headwise.actors import placement
from headwise.actors.restarts import Life
from headwise.actors.role import Role
from headwise.actors.supervisor import Supervisor
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.frontend.scaling import FleetState, SchedulerNews, Split, Wish


class NowhereSite:
    node = address = ""


class Scheduler:
    """Takes what the owner tells, and has a wish of clients."""

    def __init__(self) -> None:
        self.told: list[FleetState] = []
        self.wish: Wish | None = None

    @property
    def exchange(self) -> Scheduler:
        return self

    def options(self, **_: Any) -> Scheduler:
        return self

    def remote(self, state: FleetState) -> SchedulerNews:
        self.told.append(state)
        return SchedulerNews(wish=self.wish)


def role(name: str) -> Role:
    return Role("d", name, None, (), NowhereSite(), Life(60.0))  # type: ignore[arg-type]


def test_roles_are_told_to_the_scheduler_and_change_when_clients_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "draining_nodes", dict)
    monkeypatch.setattr(fleets.ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(fleets.ray, "get", lambda call: call)
    scheduler, supervisor = Scheduler(), Supervisor()
    monkeypatch.setattr(supervisor, "serving", lambda name: scheduler if name == "scheduler" else None)
    config = EngineConfig(replicas=3, prefill_replicas=1, decode_replicas=1, host_cache="1GiB")
    fleet = fleets.Fleet(config, supervisor, role)
    for now in (0.0, 1.0):
        fleet.look(now)
    assert sorted(scheduler.told[-1].roles.values()) == ["decode", "prefill"]
    assert set(scheduler.told[-1].roles) < {"engine-0", "engine-1", "engine-2"}
    assert scheduler.told[-1].reason.endswith("; 1 for prompts, 1 to decode")
    scheduler.wish = Wish("one-1", sets_number=False, split=Split(1, 2))
    for now in (2.0, 3.0, 4.0, 5.0, 6.0):
        fleet.look(now)
    before, after = scheduler.told[0].roles, scheduler.told[-1].roles
    assert sorted(after.values()) == ["decode", "decode", "prefill"]
    assert {**after, **before} == after, "nobody changed who need not"
