"""Engines change what they are for where requests wait less then: late enough, one at a time, never the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.runtime.frontend.routing.base import EngineRole
from headwise.runtime.frontend.routing.engines import Arrivals
from headwise.runtime.frontend.scaling import (
    EngineReport,
    Observation,
    RankSizes,
    Replica,
    ReplicaState,
    RoleBalance,
    RolePolicy,
    Split,
    deal,
)

POLICY = RolePolicy(delay_s=15.0, rest_s=60.0)
NAMES = [f"engine-{number}" for number in range(4)]
RUNNING = [Replica(name, ReplicaState.RUNNING) for name in NAMES]
TURNOVER_S = 4.0


class Cluster:
    """Four engines whose reports are handed in: seconds of prompts that wait, and engines' worth of answers.

    changes: when the split changed
    """

    def __init__(self, split: Split, fits: Callable[[str, EngineRole], bool] = lambda name, role: True) -> None:
        self.balance, self.split, self.fits = RoleBalance(POLICY), split, fits
        self.now, self.seconds = 0.0, 0.0
        self.changes: list[float] = []
        self.roles: Mapping[str, EngineRole] = deal(NAMES, split, {}, fits)
        self.reason = ""

    def observed(self, backlog_s: float, answers: float, silent: str = "") -> Observation:
        kinds = [self.roles.get(name, "mixed") for name in NAMES]
        decodes = "decode" if "decode" in kinds else "mixed"
        reports = tuple(
            EngineReport(
                name,
                silent_s=9.0 if name == silent else 0.1,
                backlog_s=backlog_s / kinds.count("prefill") if kind == "prefill" else 0.0,
                turnover_s=TURNOVER_S,
                sequences=answers / kinds.count(decodes) if kind == decodes else 0.0,
            )
            for name, kind in zip(NAMES, kinds, strict=True)
        )
        prompts = Arrivals(int(self.seconds * 4), self.seconds, self.seconds)
        return Observation(reports, prompts, prompts=prompts)

    def rests(self) -> list[float]:
        """Seconds between changes."""
        return [later - earlier for earlier, later in pairwise(self.changes)]

    def run(
        self, seconds: int, backlog_s: float = 0.0, answers: float = 0.0, work: float = 0.1, silent: str = "",
        replicas: list[Replica] | None = None,
    ) -> Split:  # fmt: skip
        """So many seconds, with a decision in each. ``work``: engine-seconds of prompts that arrive in a second"""
        for _ in range(seconds):
            self.now += 1.0
            self.seconds += work
            observed = self.observed(backlog_s, answers, silent)
            decision = self.balance.decide(observed, replicas or RUNNING, self.roles, self.split, self.now, self.fits)
            assert decision.is_change == (decision.split != self.split)
            if decision.is_change:
                self.changes.append(self.now)
            self.split, self.reason = decision.split, decision.reason
            self.roles = deal(NAMES, self.split, self.roles, self.fits)
        return self.split


def test_prompts_that_wait_get_one_engine_after_another_but_not_the_last_that_decodes() -> None:
    cluster = Cluster(Split(1, 3))
    assert cluster.run(14, backlog_s=20.0) == Split(1, 3)
    assert cluster.run(2, backlog_s=20.0) == Split(2, 2)
    assert "1 for prompts, 3 to decode -> 2 for prompts, 2 to decode: for 15 s" in cluster.reason
    cluster.run(300, backlog_s=20.0)
    assert cluster.split == Split(3, 1)
    assert cluster.rests()[0] >= POLICY.rest_s


def test_answers_that_pile_up_get_engines_but_not_the_last_for_prompts() -> None:
    cluster = Cluster(Split(3, 1))
    cluster.run(300, answers=3.0)
    assert cluster.split == Split(1, 3)
    assert len(cluster.changes) == 2


def test_prompts_that_would_pile_up_then_keep_their_engines_though_none_waits_now() -> None:
    cluster = Cluster(Split(2, 2))
    assert cluster.run(300, answers=2.2, work=1.6) == Split(2, 2)
    assert cluster.run(300, answers=2.2, work=0.1) == Split(1, 3)


def test_a_load_that_goes_to_and_fro_changes_nothing_and_a_slow_one_no_more_than_once_a_rest() -> None:
    cluster = Cluster(Split(2, 2))
    for _ in range(20):
        cluster.run(10, backlog_s=20.0)
        cluster.run(10, answers=4.0)
    assert not cluster.changes
    for _ in range(10):
        cluster.run(25, backlog_s=20.0)
        cluster.run(25, answers=4.0)
    assert cluster.changes
    assert (
        min(later - earlier for earlier, later in zip(cluster.changes, cluster.changes[1:], strict=False))
        >= POLICY.rest_s
    )


def test_what_is_balanced_or_idle_stays() -> None:
    assert not any(Cluster(Split(2, 2)).run(300, backlog_s=s, answers=s) != Split(2, 2) for s in (0.0, 0.5, 1.0))


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.LOST, ReplicaState.DRAINING])
def test_nothing_changes_while_an_engine_comes_goes_or_says_nothing(state: ReplicaState) -> None:
    cluster = Cluster(Split(1, 3))
    unready = [*RUNNING[:3], Replica(NAMES[3], state)]
    assert cluster.run(100, backlog_s=20.0, replicas=unready) == Split(1, 3)
    assert cluster.reason == "held: engine-3 is starting or leaving"
    assert cluster.run(100, backlog_s=20.0, silent="engine-2") == Split(1, 3)
    assert cluster.reason == "held: no report of engine-2"
    assert cluster.run(14, backlog_s=20.0) == Split(1, 3), "what was seen before counts no more"
    assert cluster.run(2, backlog_s=20.0) == Split(2, 2)


@pytest.mark.parametrize(("ranks", "after"), [([1, 2, 2, 2], Split(1, 3)), ([1, 2, 1, 2], Split(2, 2))])
def test_an_engine_without_the_ranks_for_the_other_role_keeps_its_own(ranks: list[int], after: Split) -> None:
    sizes = RankSizes(mixed=1, prefill=1, decode=2)
    cluster = Cluster(Split(1, 3), lambda name, role: ranks[NAMES.index(name)] == sizes.of_role(role))
    assert cluster.run(300, backlog_s=20.0) == after
    prefill = [name for name, role in cluster.roles.items() if role == "prefill"]
    assert [ranks[NAMES.index(name)] for name in prefill] == [1] * after.prefill


def test_a_split_that_somebody_asks_for_stays_for_as_long_as_any_other() -> None:
    cluster = Cluster(Split(2, 2))
    cluster.run(14, backlog_s=20.0)
    cluster.split = Split(1, 3)
    assert cluster.run(14, backlog_s=20.0) == Split(1, 3)
    assert cluster.run(3, backlog_s=20.0) == Split(2, 2)


def test_where_none_only_decodes_engines_that_serve_whole_requests_change() -> None:
    cluster = Cluster(Split(1))
    assert cluster.run(16, backlog_s=20.0) == Split(2)
    assert cluster.run(300, answers=4.0) == Split(1)


def test_all_that_serve_whole_requests_go_on_doing_so() -> None:
    cluster = Cluster(Split())
    assert cluster.run(100, backlog_s=20.0) == Split()
    assert cluster.reason == "no engine is for prompts alone"


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 100), st.floats(0, 10), st.floats(0, 3)), max_size=8))
def test_whatever_is_reported_one_engine_changes_at_a_time_and_each_kind_has_one(
    loads: list[tuple[int, float, float, float]],
) -> None:
    cluster = Cluster(Split(2, 2))
    for seconds, backlog_s, answers, work in loads:
        before = cluster.split
        after = cluster.run(seconds, backlog_s, answers, work)
        assert after.total == 4
        assert after.prefill >= 1
        assert after.decode >= 1
        assert abs(after.prefill - before.prefill) <= 1
    assert min(cluster.rests(), default=POLICY.rest_s) >= POLICY.rest_s


@pytest.mark.parametrize("numbers", [(-1.0, 1.0), (1.0, -1.0), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_times_that_cannot_be_are_refused(numbers: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and finite"):
        RolePolicy(*numbers)
