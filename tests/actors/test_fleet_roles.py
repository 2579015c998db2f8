"""The owner deals out what engines are for, and tells the scheduler with the rest."""

from __future__ import annotations

from typing import Any

import pytest

from headwise.actors import fleet as fleets
from headwise.actors import placement
from headwise.actors.restarts import Life, Phase
from headwise.actors.role import Role
from headwise.actors.supervisor import Supervisor
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.frontend.routing.engines import Arrivals
from headwise.runtime.frontend.scaling import EngineReport, FleetState, Observation, SchedulerNews, Split, Wish


class NowhereSite:
    node = address = ""
    nodes = frozenset[str]()


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


def role(name: str, ranks: int) -> Role:
    return Role("d", name, None, (), NowhereSite(), Life(60.0))


def made_fleet(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> tuple[fleets.Fleet, Scheduler, Supervisor]:
    monkeypatch.setattr(placement, "draining_nodes", dict)
    monkeypatch.setattr(fleets.ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(fleets.ray, "get", lambda call: call)
    scheduler, supervisor = Scheduler(), Supervisor()
    monkeypatch.setattr(supervisor, "serving", lambda name: scheduler if name == "scheduler" else None)
    return fleets.Fleet(config, supervisor, role), scheduler, supervisor


def test_roles_are_told_to_the_scheduler_and_change_when_clients_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(replicas=3, prefill_replicas=1, decode_replicas=1, host_cache="1GiB")
    fleet, scheduler, _ = made_fleet(monkeypatch, config)
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


def test_roles_follow_what_the_scheduler_observes_and_clients_have_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(
        prefill_replicas=1, decode_replicas=2, elastic_roles=True, upscale_delay_s=3.0, host_cache="1GiB",
        rebalance="never",
    )  # fmt: skip
    fleet, scheduler, _ = made_fleet(monkeypatch, config)
    backlog_s = 0.0

    def remote(self: Scheduler, state: FleetState) -> SchedulerNews:
        """So many seconds of prompts wait at each engine for them."""
        self.told.append(state)
        reports = tuple(
            EngineReport(name, silent_s=0.1, backlog_s=backlog_s * (state.roles.get(name) == "prefill"))
            for name in state.replicas
        )
        return SchedulerNews(int(fleet._now), wish=self.wish, observed=Observation(reports, Arrivals()))

    def pass_time(seconds: int, waiting_s: float) -> None:
        nonlocal backlog_s
        backlog_s = waiting_s
        for _ in range(seconds):
            fleet.look(fleet._now + 1.0)
            for each in fleet.engines:
                if each.life.phase is not Phase.RUNNING:
                    each.life.created(fleet._now)
                    each.life.ready(fleet._now)

    monkeypatch.setattr(Scheduler, "remote", remote)
    pass_time(20, 0.0)
    before = scheduler.told[-1].roles
    assert sorted(before.values()) == ["decode", "decode", "prefill"]
    assert "as they are" in scheduler.told[-1].reason
    pass_time(10, 20.0)
    after = scheduler.told[-1].roles
    assert sorted(after.values()) == ["decode", "prefill", "prefill"]
    assert sum(before[name] != after[name] for name in before) == 1
    assert any("1 for prompts, 2 to decode -> 2 for prompts, 1 to decode" in state.reason for state in scheduler.told)
    scheduler.wish = Wish("one-1", sets_number=False, split=Split(1, 2), deal="one-1")
    pass_time(4, 0.0)
    assert sorted(scheduler.told[-1].roles.values()) == ["decode", "decode", "prefill"]


class Engine:
    """Is told to go, and goes at once."""

    def __init__(self) -> None:
        self.is_drained = False

    @property
    def drain(self) -> Engine:
        return self

    def remote(self, timeout_s: float, sole_blocks: bytes, takers: object, until: float, worth: object) -> None:
        self.is_drained = True


def test_engines_with_other_ranks_than_their_role_takes_are_replaced_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(prefill_replicas=2, decode_replicas=1, decode_tp_size=3, host_cache="1GiB", rebalance="never")
    fleet, scheduler, supervisor = made_fleet(monkeypatch, config)
    ranks: dict[str, int] = {}
    most_leaving, now = 0, 0.0

    def make_role(name: str, size: int) -> Role:
        ranks[name] = size
        return role(name, size)

    def pass_time() -> None:
        """Engines that were started serve, and those that were drained have gone."""
        nonlocal most_leaving, now
        for _ in range(40):
            now += 1.0
            fleet.look(now)
            leaving = [each for each in fleet.engines if each.is_leaving]
            most_leaving = max(most_leaving, len(leaving))
            for each in leaving:
                assert each.handle.is_drained
                del supervisor._roles[each.name], ranks[each.name]
            for each in fleet.engines:
                if each.life.phase is not Phase.RUNNING:
                    each.handle = Engine()
                    each.life.created(now)
                    each.life.ready(now)

    fleet._make_role = make_role
    monkeypatch.setattr(Scheduler, "remote", lambda self, state: self.told.append(state) or news(self.wish, now))
    pass_time()
    assert sorted(ranks.values()) == [1, 1, 3]
    scheduler.wish = Wish("one-1", replicas=3, split=Split(1, 2))
    pass_time()
    roles = scheduler.told[-1].roles
    assert {roles[name]: size for name, size in ranks.items()} == {"prefill": 1, "decode": 3}
    assert sorted(ranks.values()) == [1, 3, 3]
    assert most_leaving == 1
    replaced = [state.reason for state in scheduler.told if "was replaced" in state.reason]
    assert "it has 1 ranks, and as decode it is to have 3" in replaced[0]
    scheduler.wish = Wish("one-2", replicas=1, split=Split())
    pass_time()
    assert len(ranks) == 1, "one that is alone is not replaced"


def news(wish: Wish | None, now: float) -> SchedulerNews:
    return SchedulerNews(int(now), wish=wish, observed=Observation((), Arrivals()))
