"""How long an engine may take to go, and who takes its cache."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest

from headwise.actors import placement
from headwise.actors.fleet import Fleet
from headwise.actors.notice import at_its_node, drain_time
from headwise.actors.restarts import Life
from headwise.actors.role import Role
from headwise.actors.supervisor import Supervisor
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.frontend.routing.engines import Arrivals
from headwise.runtime.frontend.scaling import Observation


@pytest.mark.parametrize(
    ("timeout_s", "left_s", "drain_s"),
    [
        (60.0, math.inf, 60.0),
        (60.0, 90.0, 60.0),
        (60.0, 62.0, 57.0),
        (60.0, 30.0, 27.0),
        (60.0, 1.0, 0.9),
        (0.0, 90.0, 0.0),
    ],
)
def test_an_engine_is_gone_before_its_node_is(timeout_s: float, left_s: float, drain_s: float) -> None:
    assert drain_time(timeout_s, left_s) == pytest.approx(drain_s)


def test_a_clock_that_is_ahead_leaves_an_engine_time_to_go() -> None:
    assert drain_time(60.0, -3600.0) == drain_time(60.0, 0.0) == 27.0
    assert drain_time(10.0, -3600.0) == 10.0
    assert at_its_node(20.0, until=1000.0, now=4600.0) == 20.0


def test_a_clock_that_is_behind_keeps_no_engine_beyond_its_node_s_end_as_the_node_sees_it() -> None:
    """The node is told to go in 30 s, by its own clock; the owner's is an hour behind."""
    until, now = 100_030.0, 100_000.0
    by_owner = drain_time(60.0, until - (now - 3600.0))
    assert by_owner == 60.0, "no longer than drain_timeout_s, however wrong the clock"
    assert at_its_node(by_owner, until, now) == 27.0
    assert at_its_node(by_owner, math.inf, now) == 60.0


def test_a_node_that_is_drained_without_a_deadline_is_not_taken_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.state, "get_draining_nodes", lambda: {"a": 0, "b": 1_700_000_000_500})
    assert placement.draining_nodes() == {"a": math.inf, "b": 1_700_000_000.5}


class Site:
    node = address = "a"
    nodes = frozenset((node,))


class Handle:
    """An engine that is told to go."""

    def __init__(self) -> None:
        self.drained: list[tuple[float, bytes, dict[str, int], float, int | None]] = []

    def __getattr__(self, method: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> None:
        if arguments:
            self.drained.append(arguments)


class Store:
    """Where nothing is known of storage but which engines share it. Each may evict 7 blocks."""

    def __init__(self, *shared: str) -> None:
        self.shared = set(shared)

    def shares_storage(self, node: str, without: Collection[str]) -> bool:
        return node in self.shared and bool(self.shared - {node, *without})

    def allowances(self, node: str, takers: Collection[str], without: Collection[str]) -> dict[str, int]:
        return dict.fromkeys(takers, 7)

    def worth_storing(self, node: str, without: Collection[str]) -> int:
        return 3

    def sole_blocks(self, node: str, without: Collection[str]) -> bytes:
        return b" ".join(name.encode() for name in (node, *without))


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Three engines that serve, with storage."""
    monkeypatch.setattr(placement, "draining_nodes", dict)
    config = EngineConfig(replicas=3, host_cache="1GiB", storage="file:///blocks?capacity=1GiB")
    supervisor = Supervisor()
    fleet = Fleet(config, supervisor, lambda name, ranks: Role("d", name, None, lambda: (), Site(), Life(60.0)))
    fleet.look(0.0)
    for role in fleet.engines:
        role.handle = Handle()
        role.life.created(0.0)
        role.life.ready(0.0)
    return fleet


def drained(fleet: Fleet, name: str) -> tuple[bytes, dict[str, int]]:
    """What this engine is told to hand over, and to whom."""
    (role,) = (each for each in fleet.engines if each.name == name)
    fleet._drain(role, 0.0)
    ((_, sole_blocks, takers, _, worth),) = role.handle.drained
    assert worth == 3, "of the blocks, so many are worth it even where storage is full"
    return sole_blocks, takers


def test_what_goes_into_storage_that_stays_is_not_given_to_other_engines_too(fleet: Fleet) -> None:
    fleet._store = Store("engine-0", "engine-1")
    assert drained(fleet, "engine-0") == (b"engine-0", {})


def test_what_goes_into_storage_that_no_other_engine_reads_is_given_to_those_that_stay(fleet: Fleet) -> None:
    fleet._store = Store("engine-0", "engine-1")
    assert drained(fleet, "engine-2") == (b"engine-2", {"engine-0": 7, "engine-1": 7})


def test_storage_that_only_engines_share_that_go_too_does_not_stay(fleet: Fleet) -> None:
    fleet._store = Store("engine-0", "engine-1")
    fleet._controller.drain("engine-0", fleet._epoch["engine-0"])
    fleet._controller.drain("engine-1", fleet._epoch["engine-1"])
    fleet._decide(Observation((), Arrivals()), 1.0)
    told = {role.name: role.handle.drained for role in fleet.engines if role.is_leaving}
    assert told.keys() == {"engine-0", "engine-1"}
    assert all(takers == {"engine-2": 7} for ((_, _, takers, _, _),) in told.values())
