"""The controller of elastic replicas: what it decides, when, and why, on reports that are made up."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.elastic import DRAINING, LOST, RUNNING, STARTING, Deployment

from headwise.runtime.frontend.routing import RouterOptions
from headwise.runtime.frontend.routing.engines import Arrivals, EngineTable
from headwise.runtime.frontend.scaling import EngineReport, Observation, Replica, ReplicaSet, ScalingPolicy, observe
from headwise.runtime.protocol.messages import EngineLoad, EngineStatus

POLICY = ScalingPolicy(1, 8, target_ttft_s=2.0, upscale_delay_s=10, downscale_delay_s=60, pending_timeout_s=100)


def deployment(number: int = 1, policy: ScalingPolicy = POLICY, **more: Any) -> Deployment:
    """That many engines, which serve."""
    found = Deployment(ReplicaSet(policy, number), **more)
    found.tick(7)
    assert len(found.names(RUNNING)) == number
    return found


def from_nothing(**more: Any) -> Deployment:
    return deployment(0, replace(POLICY, min_replicas=0), **more)


# ---- the policy ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas must be from 0 to max_replicas, got 3 and 2"),
        ({"min_replicas": 0, "max_replicas": 0}, "max_replicas must be at least 1, got 0"),
        ({"target_queue_s": 1.0}, "give one of target_ttft_s and target_queue_s"),
        ({"target_ttft_s": 0.0}, "target_ttft_s or target_queue_s must be over 0, got 0"),
        ({"upscale_delay_s": -1.0}, "upscale_delay_s must be at least 0, got -1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalingPolicy(**{"target_ttft_s": 1.0, **wrong})


# ---- up and down ----


def test_more_load_starts_engines_after_the_delay_and_says_why() -> None:
    one = deployment()
    one.work = 3.0
    rose = next(number for number in range(1, 60) if one.tick().number > 1)
    assert rose >= POLICY.upscale_delay_s
    decision = one.tick(90)
    assert 4 <= decision.number <= 5
    assert "3.00 engine-seconds of prompts arrive a second; with" in decision.reason
    assert "first token within about" in decision.reason
    assert len(one.names(RUNNING)) == decision.number


def test_a_peak_shorter_than_the_delay_starts_none() -> None:
    one = deployment()
    one.tick(60)
    one.held = 100
    assert one.tick(9).number == 1
    one.held = 0
    assert one.tick(60).number == 1


def test_less_load_ends_engines_after_the_delay() -> None:
    one = deployment(4, work=3.0)
    one.tick(120)
    before = one.controller.number
    one.work = 0.4
    assert one.tick(60).number == before, "the load of the last minute is still in the window"
    assert one.tick(120).number == 1
    assert any(f"{before} -> " in decision.reason for _, decision in one.log)


def test_a_load_that_needs_more_than_the_maximum_gets_the_maximum() -> None:
    one = deployment(work=50.0)
    assert one.tick(60).number == 8
    assert one.log[-1][1].reason.startswith("8: 50.00 engine-seconds of prompts arrive a second; with 50 engines")


def test_long_prompts_alone_do_not_start_engines() -> None:
    """No number of engines makes a prompt of ten seconds faster than the target of two."""
    one = deployment()
    for _ in range(120):
        one.arrivals = Arrivals(one.arrivals.requests + 1, one.arrivals.seconds + 10, one.arrivals.squares + 100)
        one.tick(30)
    assert one.controller.number == 2


def test_a_queue_target_counts_waits_only() -> None:
    policy = replace(POLICY, target_ttft_s=None, target_queue_s=2.0)
    one = deployment(1, policy, work=3.0)
    assert "nine of ten start within about" in one.tick(90).reason
    assert one.controller.number == 4


def test_full_pools_start_engines_though_prompts_do_not_wait() -> None:
    table, options = EngineTable(RouterOptions()), RouterOptions()
    controller = ReplicaSet(POLICY)
    for second in range(30):
        work = EngineLoad(running=40, used_blocks=1000, total_blocks=1000, prefill_token_s=1e-4)
        table.update(EngineStatus("", "engine-0", "tcp://0", 40, {}, 1, work), float(second))
        decision = controller.decide(
            observe(table, options, float(second)), [Replica("engine-0", RUNNING, 1)], float(second)
        )
    assert decision.number == 2
    assert "running requests fill 1.00 engines" in decision.reason


# ---- from nothing ----


def test_from_nothing_a_waiting_request_asks_for_one_at_once() -> None:
    one = from_nothing()
    assert one.tick(300).number == 0
    one.held = 3
    decision = one.tick()
    assert decision.start == ("engine-0",)
    assert decision.reason == "0 -> 1: 3 requests wait, and there is no engine"


def test_without_requests_all_engines_end_if_none_is_the_minimum() -> None:
    one = from_nothing()
    one.held = 1
    one.tick(8)
    one.held = 0
    one.tick(90)
    assert one.controller.number == 0
    assert not one.replicas
    assert "there are no requests" in " ".join(decision.reason for _, decision in one.log)


def test_an_engine_whose_request_runs_on_is_not_ended() -> None:
    one = from_nothing()
    one.held = 1
    one.tick(8)
    one.held, one.requests = 0, {"engine-0": 1}
    assert one.tick(600).number == 1


# ---- reports that do not come ----


def test_a_stale_report_holds_the_number_and_names_the_engine() -> None:
    one = deployment(2)
    one.work, one.silent = 5.0, {"engine-1"}
    decision = one.tick(300)
    assert decision.number == 2
    assert decision.reason == "2: held: no report of engine-1"
    one.silent, one.work = set(), 0.0
    one.tick(60)
    assert one.controller.number == 2, "what is known begins anew after a silence"
    assert one.tick(60).number == 1


def test_an_engine_that_was_given_up_does_not_hold_the_others() -> None:
    one = deployment(2)
    one.replicas["engine-1"] = replace(one.replicas["engine-1"], state=LOST)
    one.work = 3.0
    assert one.tick(90).number >= 4
    assert "engine-1" not in {name for _, decision in one.log for name in (*decision.cancel, *decision.drain)}


def test_a_scheduler_that_starts_again_counts_from_nothing() -> None:
    one = deployment(4, work=3.0)
    number = one.tick(120).number
    one.arrivals = Arrivals()
    assert {one.tick().number for _ in range(55)} == {number}


def test_a_clock_that_goes_back_changes_nothing() -> None:
    one = deployment(2, work=1.0)
    number = one.tick(100).number
    one.now -= 500.0
    assert {one.tick().number for _ in range(100)} == {number}


def test_clocks_of_other_machines_are_never_read() -> None:
    """Epochs are made of engines' clocks; a day between two machines makes no difference."""
    decisions = []
    for skew in (0, 86_400_000, -86_400_000):
        table, options, controller = EngineTable(RouterOptions()), RouterOptions(), ReplicaSet(POLICY, 2)
        there = [Replica("engine-0", RUNNING, 10**9), Replica("engine-1", RUNNING, 10**9 + skew)]
        for second in range(100):
            for each in there:
                work = EngineLoad(0, 5, 100, 990, 1000, prefill_token_s=1e-4)
                status = EngineStatus("", each.name, f"tcp://{each.name}", 5, {}, each.epoch, work)
                table.update(status, float(second))
            decisions.append(controller.decide(observe(table, options, float(second)), there, float(second)))
    assert decisions[:100] == decisions[100:200] == decisions[200:]


def test_engines_that_have_not_measured_their_speed_say_nothing_of_the_load() -> None:
    """Costs that are assumed until then may be ten times too high."""
    table, options, controller = EngineTable(RouterOptions()), RouterOptions(), ReplicaSet(POLICY)
    for second in range(60):
        status = EngineStatus("", "engine-0", "tcp://0", 0, {}, 1, EngineLoad())
        table.update(status, float(second))
        table.reserve(f"{second}", 0, 5000, float(second))
        decision = controller.decide(observe(table, options, second), [Replica("engine-0", RUNNING, 1)], second)
    assert decision.reason == "1: the load is not measured yet"


def test_an_engine_that_starts_and_then_waits_for_its_first_request_holds_the_number() -> None:
    """While nothing runs, nothing is needed; once an engine runs, what is needed is not known until it has measured."""
    controller, starting, running = (
        ReplicaSet(POLICY),
        *(Replica("engine-0", each, 1) for each in (STARTING, RUNNING)),
    )
    waits = EngineReport("engine-0", 0.1)
    for second in range(20):
        controller.decide(Observation((), Arrivals()), [starting], float(second))
    for second in range(20, 200):
        decision = controller.decide(Observation((waits,), Arrivals(), token_s=0.0), [running], float(second))
    assert decision.reason == "1: the load is not measured yet"


# ---- engines that start, or do not ----


def test_engines_that_wait_for_a_node_do_not_multiply_and_are_told_of() -> None:
    one = deployment(start_s=1e9, number=0, policy=replace(POLICY, min_replicas=0))
    one.held = 50
    decision = one.tick(90)
    assert set(decision.start) <= set(one.replicas)
    number = decision.number
    decision = one.tick(100)
    assert len(one.replicas) == decision.number == number
    assert decision.overdue
    assert re.search(r"engine-0.* not started after \d+ s: is there a node for it\?", decision.reason)


def test_an_order_that_got_lost_is_given_again() -> None:
    controller = ReplicaSet(POLICY)
    seen = Observation((), Arrivals())
    for second in range(10):
        assert controller.decide(seen, [], float(second)).start == ("engine-0",)


def test_what_has_not_started_goes_first() -> None:
    one = deployment(2)
    one.start_s = 1e9
    one.controller.set_by_hand(4)
    assert one.tick().start == ("engine-2", "engine-3")
    one.controller.set_by_hand(3)
    decision = one.tick()
    assert decision.cancel == ("engine-3",)
    assert not decision.drain
    assert one.names(STARTING) == ["engine-2"]


def test_an_engine_that_serves_before_its_cancellation_comes_is_drained() -> None:
    one = deployment(1)
    one.controller.set_by_hand(2)
    one.tick()
    started = one.replicas["engine-1"]
    one.controller.set_by_hand(1)
    seen = one.observation()
    there = [one.replicas["engine-0"], started]
    assert one.controller.decide(seen, there, one.now + 1, one).cancel == ("engine-1",)
    there[1] = replace(started, state=RUNNING)
    decision = one.controller.decide(seen, there, one.now + 2, one)
    assert decision.cancel == ()
    assert decision.drain == ("engine-1",)


# ---- by hand ----


def test_a_number_set_by_hand_holds_whatever_the_load_until_it_is_given_back() -> None:
    one = deployment(2)
    one.work = 5.0
    one.controller.set_by_hand(3)
    assert one.tick().reason == "2 -> 3: set by hand"
    assert one.tick(200).number == 3
    one.controller.set_by_hand(None)
    assert one.tick(8).number == 3
    assert one.tick(60).number > 5


@pytest.mark.parametrize("number", [0, 9])
def test_a_number_out_of_bounds_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"from min_replicas 1 to max_replicas 8, got {number}"):
        ReplicaSet(POLICY).set_by_hand(number)


def test_without_a_target_the_number_changes_by_hand_only() -> None:
    one = deployment(2, policy=ScalingPolicy(0, 8))
    one.work, one.held = 7.5, 9
    assert one.tick(600).number == 2
    one.controller.set_by_hand(3)
    assert one.tick().start == ("engine-2",)
    one.controller.set_by_hand(0)
    assert one.tick(600).number == 0, "requests that wait are no reason"
    assert not one.controller.may_grow_from_nothing
    with pytest.raises(ValueError, match="neither target_ttft_s nor target_queue_s"):
        one.controller.set_by_hand(None)


def test_from_nothing_it_grows_where_there_is_a_target_and_no_number_set_by_hand() -> None:
    one = deployment(0, policy=ScalingPolicy(0, 8, target_ttft_s=2.0))
    assert one.controller.may_grow_from_nothing
    assert one.controller.is_on_demand
    one.controller.set_by_hand(0)
    one.tick()
    assert not one.controller.may_grow_from_nothing
    assert not one.controller.is_on_demand
    one.controller.set_by_hand(None)
    assert one.controller.may_grow_from_nothing
    assert not deployment(1, policy=ScalingPolicy(1, 8, target_ttft_s=2.0)).controller.is_on_demand
    assert not deployment(1, policy=ScalingPolicy(0, 8)).controller.is_on_demand


def test_all_engines_are_replaced_one_after_the_other() -> None:
    one = deployment(3, policy=ScalingPolicy(1, 8))
    before = {each.name: each.epoch for each in one.replicas.values()}
    one.controller.roll()
    assert "still to be replaced: engine-1, engine-2" in one.tick().reason
    for _ in range(100):
        one.tick()
        assert len(one.names(RUNNING)) >= 2
        assert len(one.names(DRAINING)) <= 1
    assert one.names(STARTING, DRAINING) == []
    assert len(one.names(RUNNING)) == 3
    assert not set(before.values()) & {each.epoch for each in one.replicas.values()}
    assert one.tick().reason.startswith("3: as configured")


def test_where_there_is_room_an_engine_goes_when_the_one_that_takes_its_place_serves() -> None:
    one = deployment(3, policy=ScalingPolicy(1, 3), has_room=True)
    before = {each.epoch for each in one.replicas.values()}
    one.controller.roll()
    for _ in range(100):
        decision = one.tick()
        assert len(one.names(RUNNING)) >= 3
        assert len(one.replicas) <= 4
        assert decision.number == 3
        assert len(decision.drain) <= 1
        assert set(decision.replaced) <= set(one.names(RUNNING))
    assert one.names(STARTING, DRAINING) == []
    assert len(one.names(RUNNING)) == 3
    assert not before & {each.epoch for each in one.replicas.values()}


def test_a_roll_does_not_wait_for_ever_for_engines_ahead_of_those_that_go() -> None:
    """The first one's node was taken by somebody else; the engines start where those that go have been."""
    one = deployment(2, policy=ScalingPolicy(1, 8, pending_timeout_s=100.0), has_room=True)
    before = {each.epoch for each in one.replicas.values()}
    one.start_s = 1e9
    one.controller.roll()
    one.tick(90)
    assert one.names(RUNNING) == ["engine-0", "engine-1"]
    assert one.names(STARTING) == ["engine-2"]
    one.tick(20)
    assert one.names(RUNNING) == ["engine-1"]
    one.start_s = 5.0
    one.due["engine-2"] = one.now
    for _ in range(60):
        one.tick()
        assert len(one.names(RUNNING, STARTING)) <= 2, "nor is another one started ahead"
    assert one.names(STARTING, DRAINING) == []
    assert not before & {each.epoch for each in one.replicas.values()}


def test_an_engine_that_dies_while_the_one_that_takes_its_place_starts_is_not_missed() -> None:
    one = deployment(1, policy=ScalingPolicy(1, 8), has_room=True)
    one.controller.roll()
    assert one.tick().start == ("engine-1",)
    del one.replicas["engine-0"]
    one.tick(60)
    assert len(one.names(RUNNING)) == 1
    assert one.names(STARTING, DRAINING) == []


def test_a_roll_holds_while_an_engine_is_lost_and_a_second_one_begins_anew() -> None:
    one = deployment(2, policy=ScalingPolicy(1, 8))
    one.replicas["engine-1"] = replace(one.replicas["engine-1"], state=LOST)
    one.controller.roll()
    assert one.tick(20).drain == ()
    one.replicas["engine-1"] = replace(one.replicas["engine-1"], state=RUNNING)
    assert one.tick().drain == ("engine-0",)
    one.controller.roll()
    assert "; a roll was under way (engine-1 left), and begins anew" in one.tick().reason
    assert "begins anew" not in one.tick().reason
    one.tick(60)
    assert one.names(STARTING, DRAINING) == []
    assert min(each.epoch for each in one.replicas.values()) > 2


# ---- who goes ----


def test_the_engine_whose_cache_is_worth_least_goes() -> None:
    one = deployment(3)
    one.caches = {"engine-0": 500.0, "engine-1": 20.0, "engine-2": 400.0}
    one.controller.set_by_hand(2)
    assert one.tick().drain == ("engine-1",)


def test_an_order_to_drain_is_repeated_until_it_is_seen_and_takes_nobody_else() -> None:
    one = deployment(3)
    one.controller.set_by_hand(2)
    seen, there = one.observation(), list(one.replicas.values())
    for second in range(5):
        decision = one.controller.decide(seen, there, one.now + second, one)
        assert decision.drain == ("engine-2",)
    one.controller.set_by_hand(None)
    assert "held" not in one.controller.decide(seen, there, one.now + 5, one).reason
    there[2] = replace(there[2], state=DRAINING)
    assert one.controller.decide(seen, there, one.now + 5, one).drain == ()


def test_an_engine_that_is_drained_twice_is_replaced_once() -> None:
    """Its node's notice comes, and comes again; nobody else goes, and one engine takes its place."""
    one = deployment(2)
    epoch = one.replicas["engine-1"].epoch
    one.controller.drain("engine-1", epoch)
    assert one.tick().drain == ("engine-1",)
    one.controller.drain("engine-1", epoch)
    one.tick(20)
    assert one.names(RUNNING, STARTING, DRAINING) == ["engine-0", "engine-2"]
    assert sum(bool(decision.drain) for _, decision in one.log) == 1


def test_an_engine_that_left_and_is_back_with_its_old_epoch_goes_again() -> None:
    one = deployment(2)
    old = one.replicas["engine-1"]
    one.controller.set_by_hand(1)
    one.tick(10)
    assert "engine-1" not in one.replicas
    one.replicas["engine-1"] = old
    assert one.tick().drain == ("engine-1",)


def test_a_name_that_comes_back_with_a_new_epoch_is_a_new_engine() -> None:
    one = deployment(2)
    old = one.replicas["engine-1"]
    one.controller.set_by_hand(1)
    one.tick(10)
    one.controller.set_by_hand(2)
    one.tick(10)
    assert one.replicas["engine-1"].epoch > old.epoch
    assert one.names(RUNNING) == ["engine-0", "engine-1"]
    assert one.tick().drain == ()


# ---- whatever happens ----


class Happenings(RuleBasedStateMachine):
    """Load, silences, losses, nodes that do not come, orders by hand: in any order, a second after the other."""

    @initialize(least=st.integers(0, 2), more=st.integers(0, 4), up=st.integers(0, 15), down=st.integers(0, 40))
    def begin(self, least: int, more: int, up: int, down: int) -> None:
        policy = ScalingPolicy(
            least, max(1, least + more), 2.0, upscale_delay_s=up, downscale_delay_s=down, pending_timeout_s=20
        )
        self.one = Deployment(ReplicaSet(policy), start_s=3.0, drain_s=4.0)
        self.policy, self.by_hand, self.silent_at = policy, False, set[float]()
        self.free_at = set[float]()

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            if self.one.silent & set(self.one.names(RUNNING)):
                self.silent_at.add(self.one.now + 1)
            if self.by_hand:
                self.free_at.add(self.one.now + 1)
            self.one.tick()

    @rule(work=st.sampled_from([0.0, 0.3, 1.0, 2.5, 9.0]), held=st.sampled_from([0, 0, 1, 40]))
    def load(self, work: float, held: int) -> None:
        self.one.work, self.one.held = work, held

    @rule(names=st.sets(st.sampled_from(["engine-0", "engine-1", "engine-2"])))
    def fall_silent(self, names: set[str]) -> None:
        self.one.silent = names

    @rule(start_s=st.sampled_from([1.0, 10.0, 1e9]))
    def nodes(self, start_s: float) -> None:
        self.one.start_s = start_s

    @rule(number=st.integers(0, 6))
    def lose(self, number: int) -> None:
        name = f"engine-{number}"
        if name in self.one.names(RUNNING):
            self.one.replicas[name] = replace(self.one.replicas[name], state=LOST)
            self.one.due[name] = self.one.now + 5

    @rule(number=st.integers(0, 6))
    def notice(self, number: int) -> None:
        name = f"engine-{number}"
        if name in self.one.replicas:
            self.one.controller.drain(name, self.one.replicas[name].epoch)

    @rule(number=st.none() | st.integers(0, 6))
    def hand(self, number: int | None) -> None:
        if number is None or self.policy.min_replicas <= number <= self.policy.max_replicas:
            self.one.controller.set_by_hand(number)
            self.by_hand = number is not None

    @rule(seconds=st.floats(0, 100))
    def clock_goes_back(self, seconds: float) -> None:
        observed, there = self.one.observation(), list(self.one.replicas.values())
        decision = self.one.controller.decide(observed, there, self.one.now - seconds, self.one)
        counted = self.one.controller._now  # the latest time that it was ever told
        self.one.log.append((counted, decision))
        if self.by_hand:
            self.free_at.add(counted)
        self.one.obey(decision)

    @invariant()
    def the_number_is_within_its_bounds(self) -> None:
        for _, decision in self.one.log:
            assert self.policy.min_replicas <= decision.number <= self.policy.max_replicas

    @invariant()
    def there_are_never_more_than_that(self) -> None:
        staying = self.one.names(STARTING, RUNNING, LOST)
        assert len(staying) <= self.policy.max_replicas

    @invariant()
    def stale_reports_never_change_it(self) -> None:
        for (_, before), (at, decision) in zip(self.one.log, self.one.log[1:], strict=False):
            if at in self.silent_at and at not in self.free_at:
                assert decision.number == before.number

    @invariant()
    def it_never_turns_back_within_the_delays(self) -> None:
        """But for orders by hand, and the first request after there was nothing."""
        rose = fell = float("-inf")
        for (_, before), (at, decision) in zip(self.one.log, self.one.log[1:], strict=False):
            if at in self.free_at:
                rose = fell = float("-inf")
            elif decision.number > before.number:
                assert at - fell >= self.policy.upscale_delay_s or before.number == 0
                rose = at
            elif decision.number < before.number:
                assert at - rose >= self.policy.downscale_delay_s
                fell = at


Happenings.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestWhateverHappens = Happenings.TestCase
