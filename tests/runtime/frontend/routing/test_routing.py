"""What the router promises: pure arithmetic, so every example is a few numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulation.gpu import A800, SimulatedGpu
from simulation.machine import StepTime
from support.routers import BLOCK, choose, choose_with, path, report, request, router

from headwise.errors import OverloadedError
from headwise.runtime.frontend.routing import STATUS_TIMEOUT_S, Router, RouterOptions
from headwise.runtime.frontend.routing.base import RESERVATION_S, EngineRole
from headwise.runtime.frontend.routing.engines import IN_FLIGHT_S, prefill_of
from headwise.runtime.frontend.routing.expected import EXPECTED_BLOCKS, EXPECTED_S, ExpectedBlocks
from headwise.runtime.models.registry import model_config

_numbers = itertools.count()


# ---- where a request goes ----


def test_a_request_goes_where_most_of_its_prefix_is() -> None:
    r = router()
    report(r, "a", "b", "c")
    choice = choose_with(r, {"a": (4, 4, 4), "b": (12, 12, 12)})
    assert (choice.engine, choice.device, choice.reason) == ("b", 12 * BLOCK, "hit")


def test_a_holder_that_is_too_busy_is_passed_over() -> None:
    r = router()
    report(r, "a", queued_tokens=4000)
    report(r, "b")
    choice = choose_with(r, {"a": (16, 16, 16)})
    assert (choice.engine, choice.reason) == ("b", "spread")


def test_where_prompts_have_turns_a_holder_that_is_busy_with_long_ones_is_not_passed_over() -> None:
    """One token of the prompt is left to compute, and six long prompts are there. A request without a prefix there
    waits for as much of each as it has itself."""
    for fair, engine in ((False, "b"), (True, "a")):
        r = router(fair_prompts=fair)
        report(r, "a", queued_tokens=40_000, waiting=5)
        report(r, "b")
        assert choose_with(r, {"a": (16, 16, 16)}).engine == engine
        assert choose_with(r, {}, name="another").engine == "b"


def test_a_holder_that_is_a_little_busy_is_waited_for() -> None:
    r = router()
    report(r, "a", queued_tokens=500)
    report(r, "b")
    assert choose_with(r, {"a": (16, 16, 16)}).engine == "a"


def test_faster_tiers_win_for_the_same_prefix() -> None:
    r = router()
    report(r, "a", "b", "c")
    assert choose_with(r, {"a": (0, 16, 16), "b": (16, 16, 16), "c": (0, 0, 16)}).engine == "b"
    assert choose_with(r, {"a": (0, 16, 16), "c": (0, 0, 16)}, name="another").engine == "a"


def test_a_tier_is_used_only_where_loading_beats_computing() -> None:
    r = router()
    report(r, "a", "b", host_token_s=2e-3)
    assert choose_with(r, {"a": (4, 16, 16)}).host == 0
    r = router()
    report(r, "a", "b", storage_token_s=2e-3)
    choice = choose_with(r, {"a": (4, 8, 16)})
    assert (choice.device, choice.host, choice.storage) == (4 * BLOCK, 4 * BLOCK, 0)


def test_a_slow_host_is_worth_it_for_what_storage_has_behind_it() -> None:
    r = router()
    report(r, "a", "b", host_token_s=5e-4, storage_token_s=1e-4)
    choice = choose_with(r, {"a": (0, 1, 16)}, name="x")
    assert (choice.host, choice.storage) == (BLOCK, 15 * BLOCK)


def test_what_is_in_shared_storage_serves_an_engine_that_has_nothing() -> None:
    r = router()
    report(r, "a", queued_tokens=20_000)
    report(r, "b", "c")
    choice = choose_with(r, {"a": (0, 0, 16), "b": (0, 0, 16), "c": (0, 0, 16)})
    assert choice.engine in "bc"
    assert choice.storage == 16 * BLOCK


def test_storage_that_is_not_shared_serves_its_own_engine_only() -> None:
    r = router()
    report(r, "a", queued_tokens=20_000)
    report(r, "b")
    assert choose_with(r, {"a": (0, 0, 16)}).storage == 0


def test_the_last_token_is_computed_always() -> None:
    r = router()
    report(r, "a", "b")
    choice = choose_with(r, {"a": (16, 16, 16)}, num_tokens=16 * BLOCK)
    assert choice.device == 15 * BLOCK


def test_a_request_that_does_not_fit_beside_what_is_held_goes_elsewhere() -> None:
    r = router()
    report(r, "a", total_blocks=1000, used_blocks=995, running=5)
    report(r, "b", total_blocks=1000, used_blocks=100, running=5)
    assert choose_with(r, {}).engine == "b"
    assert choose_with(r, {"a": (2, 2, 2)}).engine == "b"


def test_a_little_shortage_of_blocks_costs_less_than_a_prefix() -> None:
    r = router()
    report(r, "a", total_blocks=1000, used_blocks=985, running=5)
    report(r, "b", total_blocks=1000, running=5)
    assert choose_with(r, {"a": (16, 16, 16)}).engine == "a"


def test_speeds_that_an_engine_has_not_measured_are_the_others() -> None:
    r = router()
    report(r, "b", prefill_token_s=1e-2)
    report(r, "a", prefill_token_s=0.0, queued_tokens=2000)
    assert r.table.stats(0.0)["a"]["backlog_s"] == pytest.approx(20.0)


def test_an_engine_that_is_much_slower_than_the_others_gets_less() -> None:
    r = router()
    report(r, "a", "b")
    report(r, "c", prefill_token_s=1e-2)
    went = Counter(choose(r, name=str(n)).engine for n in range(100))
    assert went["c"] < 0.2 * went["a"]


def test_an_engine_that_measured_while_it_was_suspended_gets_as_much_as_the_others() -> None:
    r = router()
    report(r, *"abc")
    report(r, *"ab", now=59.9)
    report(r, "c", prefill_token_s=1e-2, now=60.0)
    went = Counter(choose(r, name=str(n), now=60.0).engine for n in range(99))
    assert went["c"] == pytest.approx(33, abs=3)


def test_a_little_difference_of_measured_speeds_decides_nothing() -> None:
    r = router()
    report(r, "a", prefill_token_s=1.0e-3)
    report(r, "b", prefill_token_s=1.3e-3)
    went = Counter(choose(r, name=str(n)).engine for n in range(100))
    assert abs(went["a"] - went["b"]) <= 2


def test_a_backlog_shrinks_as_time_passes() -> None:
    r = router()
    report(r, "a", queued_tokens=4000)
    report(r, "b")
    assert choose_with(r, {"a": (16, 16, 16)}, now=0.0).engine == "b"
    assert choose_with(r, {"a": (16, 16, 16)}, name="another", now=2.9).engine == "a"


# ---- what was sent a moment ago ----


def test_a_burst_with_one_new_prefix_stays_together() -> None:
    r = router()
    report(r, *"abcdefgh")
    burst = [request(name=f"p{n}", hashes=path(17, f"p{n}", shared=16), num_tokens=17 * BLOCK) for n in range(6)]
    choices = [r.select_and_reserve(each, None, 0.0) for each in burst]
    assert len({choice.engine for choice in choices if choice}) == 1
    assert [choice.device for choice in choices if choice] == [0] + [16 * BLOCK] * 5


@pytest.mark.parametrize("fair", [False, True])
def test_a_hot_prefix_spreads_once_its_holder_is_busy(fair: bool) -> None:
    r = router(engine_queue=10_000, fair_prompts=fair)
    report(r, *"abcd")
    went = Counter(choose(r, hashes=path(17, f"p{n}", shared=16), num_tokens=17 * BLOCK + 1).engine for n in range(400))
    assert set(went) == set("abcd")
    assert max(went.values()) < 2 * min(went.values())


def test_requests_with_nothing_to_compute_spread_by_what_runs() -> None:
    r = router(engine_queue=10_000)
    report(r, "a", running=60)
    report(r, "b", running=0)
    assert choose_with(r, {"a": (16, 16, 16), "b": (15, 15, 15)}).engine == "b"


def test_what_was_sent_is_forgotten_when_the_engine_comes_back_empty() -> None:
    r = router()
    report(r, "a", "b")
    first = choose(r)
    report(r, first.engine, epoch=2, now=1.0)
    assert choose(r, now=1.0).device == 0


def test_what_was_sent_is_forgotten_when_the_engine_has_forgotten_it() -> None:
    r = router()
    report(r, "a", "b")
    first = choose(r)
    assert choose(r).device > 0
    report(r, first.engine, device_resets=1, now=1.0)
    assert choose(r, now=1.0).device == 0
    report(r, first.engine, device_resets=1, now=2.0)
    assert choose(r, now=2.0).device > 0


def test_each_new_epoch_of_an_engine_counts_as_a_restart() -> None:
    r = router()
    for epoch in (5, 5, 6, 9):
        report(r, "a", epoch=epoch)
    report(r, "b", epoch=9)
    assert {name: engine["restarts"] for name, engine in r.table.stats(0.0).items()} == {"a": 2, "b": 0}


def test_what_was_sent_is_forgotten_after_a_while() -> None:
    expected = ExpectedBlocks()
    slot = expected.take_slot()
    expected.add(path(9), slot, 0.0)
    for now in (EXPECTED_S / 4, EXPECTED_S / 2 + 1):
        expected.expire(now)
        assert expected.depths(path(12)) == {slot: 9}
    expected.expire(EXPECTED_S + 2)
    assert expected.depths(path(12)) == {}


def test_depths_of_long_paths_are_expected_in_steps() -> None:
    expected = ExpectedBlocks(step=8)
    slot = expected.take_slot()
    expected.add(path(30), slot, 0.0)
    assert len(expected) == 10
    found = [expected.depths(path(count)).get(slot) for count in (1, 7, 8, 15, 16, 29, 30, 99)]
    assert found == [1, 7, 8, 8, 16, 24, 24, 24]


def test_what_is_expected_is_bounded() -> None:
    expected = ExpectedBlocks()
    slot = expected.take_slot()
    for n in range(40):
        expected.add(path(EXPECTED_BLOCKS // 16, str(n)), slot, float(n))
        assert len(expected) <= EXPECTED_BLOCKS
    assert expected.depths(path(9, "39")) == {slot: 9}


paths = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.integers(0, 3), paths), max_size=20), paths, st.integers(0, 20))
def test_expected_depths_are_those_of_a_plain_search(
    added: list[tuple[int, list[int]]], wanted: list[int], turn: int
) -> None:
    def prefixes(tokens: list[int]) -> list[bytes]:
        return [bytes(tokens[: n + 1]) for n in range(len(tokens))]

    expected, sent = ExpectedBlocks(), {}
    slots = [expected.take_slot() for _ in range(4)]
    for step, (slot, tokens) in enumerate(added):
        if step == turn:
            expected.expire(EXPECTED_S)
        expected.add(prefixes(tokens), slots[slot], 0.0)
        sent.setdefault(slots[slot], set()).update(prefixes(tokens))
    plain = {slot: sum(each in blocks for each in prefixes(wanted)) for slot, blocks in sent.items()}
    assert expected.depths(prefixes(wanted)) == {slot: depth for slot, depth in plain.items() if depth}


def test_a_slot_that_was_given_back_says_nothing_of_its_next_owner() -> None:
    expected = ExpectedBlocks()
    slot = expected.take_slot()
    expected.add(path(9), slot, 0.0)
    expected.free_slot(slot)
    taken = {expected.take_slot() for _ in range(3)}
    assert slot not in taken
    for now in (EXPECTED_S, 2 * EXPECTED_S, 3 * EXPECTED_S):
        expected.expire(now)
    assert expected.take_slot() == slot
    assert expected.depths(path(9)) == {}


# ---- who can be asked ----


def test_no_engine_no_choice() -> None:
    assert router().select_and_reserve(request(), None, 0.0) is None


@pytest.mark.parametrize("work", [{"waiting": 64}, {"accepts": False}])
def test_an_engine_that_is_full_or_takes_nothing_gets_nothing(work: dict[str, Any]) -> None:
    r = router()
    report(r, "a", **work)
    assert r.select_and_reserve(request(), None, 0.0) is None
    report(r, "b")
    assert {choose(r, name=str(n)).engine for n in range(5)} == {"b"}


def test_requests_on_their_way_count_towards_an_engine_s_queue() -> None:
    r = router(engine_queue=3)
    report(r, "a", waiting=1)
    assert r.room(0.0) == 2
    assert [r.select_and_reserve(request(), None, 0.0) is None for _ in range(3)] == [False, False, True]
    assert r.room(0.0) == 0


def test_a_silent_engine_gets_nothing_and_is_told_of_once() -> None:
    r = router(engine_timeout_s=20.0)
    report(r, "a", now=0.0, epoch=7)
    report(r, "b", now=2.0)
    now = STATUS_TIMEOUT_S + 0.1
    assert choose(r, now=now).engine == "b"
    assert [(each.engine, each.epoch, each.is_given_up) for each in r.watch(now)] == [("a", 7, False)]
    assert r.watch(now + 0.1) == []
    report(r, "b", now=20.0)
    assert [(each.engine, each.is_given_up) for each in r.watch(20.1)] == [("a", True)]
    report(r, "a", now=21.0, epoch=7)
    assert [text for _, text in r.faults()][-1] == "a reports again after 21.0 s"


def test_an_engine_that_is_not_expected_back_is_forgotten_with_all_that_was_sent() -> None:
    r = router(forget_s=60.0)
    report(r, "a", "b")
    for n in range(8):
        choose(r, name=str(n))
    for now in (10.0, 40.0, 61.0):
        report(r, "b", now=now)
        r.watch(now)
    assert r.num_engines == 1
    assert choose(r, now=61.0).engine == "b"
    report(r, "a", now=61.5)
    assert {choose(r, name=f"new {n}", now=61.5).engine for n in range(20)} == {"a", "b"}


def test_a_lost_engine_gets_nothing_before_a_status_that_was_sent_after() -> None:
    r = router()
    report(r, "a")
    r.mark_lost("tcp://a", 1.0)
    report(r, "a", now=1.0 + IN_FLIGHT_S / 2)
    assert r.select_and_reserve(request(), None, 1.2) is None
    report(r, "a", now=1.5)
    assert choose(r, now=1.5).engine == "a"
    assert [text for _, text in r.faults()] == ["a was lost by a client"]


def test_many_clients_that_lose_an_engine_are_one_fault() -> None:
    r = router()
    report(r, "a")
    for n in range(5):
        r.mark_lost("tcp://a", 1.0 + n / 100)
    assert len(r.faults()) == 1


def test_an_excluded_engine_is_taken_only_if_no_other_can_take_the_request() -> None:
    r = router()
    report(r, "a")
    report(r, "b", queued_tokens=50_000)
    choice = choose_with(r, {"a": (16, 16, 16)}, exclude="tcp://a")
    assert (choice.engine, choice.reason) == ("b", "rerouted")
    report(r, "a", now=10.0)
    assert choose(r, now=10.0, exclude="tcp://a").engine == "a"


def test_a_status_of_the_process_before_is_ignored() -> None:
    r = router()
    report(r, "a", epoch=2)
    report(r, "a", epoch=1, accepts=False, now=0.1)
    assert choose(r, now=0.1).engine == "a"


def test_faults_that_engines_report_are_kept_with_their_time() -> None:
    r = Router(RouterOptions(), unix_clock=lambda: 997.0)
    report(r, "a", now=5.0, faults=("lost a worker",))
    assert r.faults() == ((997.0, "a: lost a worker"),)


def test_an_operation_needs_every_engine() -> None:
    r = router()
    report(r, "a")
    with pytest.raises(OverloadedError, match="1 of 2 engines are ready"):
        r.endpoints(0.0, 2)
    report(r, "b")
    assert r.endpoints(0.0, 2) == {"a": "tcp://a", "b": "tcp://b"}


# ---- sessions ----


def test_a_session_stays_while_that_costs_little_and_leaves_when_it_costs_much() -> None:
    r = router()
    report(r, *"abcd")
    first = choose(r, blocks=1, name="one", session="s")
    for turn in range(3):
        choice = choose(r, blocks=1, name=f"turn {turn}", session="s", request_id=str(turn))
        assert (choice.engine, choice.reason) == (first.engine, "session")
        report(r, first.engine, running=1, queued_tokens=20, received=(str(turn),))
    report(r, first.engine, queued_tokens=5000, now=0.1)
    moved = choose(r, blocks=1, name="elsewhere", session="s", now=0.1)
    assert moved.engine != first.engine
    report(r, first.engine, now=0.2)
    assert choose(r, blocks=1, name="stays there", session="s", now=0.2).engine == moved.engine


# ---- other policies ----


def test_round_robin_takes_turns_and_passes_over_whoever_cannot() -> None:
    r = router(policy="round_robin")
    report(r, *"abc")
    assert [choose(r).engine for _ in range(4)] == ["a", "b", "c", "a"]
    report(r, "b", accepts=False)
    assert [choose(r).engine for _ in range(3)] == ["c", "a", "c"]


def test_least_loaded_takes_the_fewest_requests_whatever_is_cached() -> None:
    r = router(policy="least_loaded")
    report(r, "a", running=3)
    report(r, "b", running=1)
    went = [choose_with(r, {"a": (16, 16, 16)}).engine for _ in range(6)]
    assert Counter(went) == {"a": 2, "b": 4}


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="'fastest'"):
        router(policy="fastest")


# ---- what always holds ----


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 40), st.sampled_from(["cache_aware", "least_loaded", "round_robin"]))
def test_equal_engines_share_equal_requests_evenly(engines: int, blocks: int, policy: str) -> None:
    r = router(policy=policy)
    names = [f"e{n}" for n in range(engines)]
    report(r, *names)
    went = Counter(choose(r, blocks=blocks, name=f"p{n}").engine for n in range(10 * engines))
    assert max(went.values()) - min(went[name] for name in names) <= 2


class RouterMachine(RuleBasedStateMachine):
    """Engines come, go, hang, are lost and change roles; requests are routed, withdrawn, confirmed, or never heard of
    again."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.router = router(engine_queue=4, forget_s=50.0, engine_timeout_s=20.0, peer_loads=True, local_tokens=100)
        self.now = 1e9
        self.heard: dict[str, float] = {}
        self.lost: set[str] = set()
        self.asleep: set[str] = set()
        self.under_way: dict[str, tuple[str, float]] = {}
        self.epochs = dict.fromkeys(self.NAMES, 1)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 30.0, 3600.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.router.watch(self.now)

    @rule(name=st.sampled_from(NAMES), accepts=st.booleans(), restarted=st.booleans(), hears=st.booleans())
    def reports(self, name: str, accepts: bool, restarted: bool, hears: bool) -> None:
        self.epochs[name] += restarted
        arrived = [each for each, (engine, _) in self.under_way.items() if engine == name and hears]
        received = tuple(each.removesuffix("/prefill") for each in arrived)
        report(self.router, name, now=self.now, epoch=self.epochs[name], received=received, accepts=accepts)
        for each in arrived if not restarted else [e for e, (engine, _) in self.under_way.items() if engine == name]:
            del self.under_way[each]
        self.heard[name] = self.now
        self.lost.discard(name)
        (self.asleep.discard if accepts else self.asleep.add)(name)

    @rule(roles=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["mixed", "prefill", "decode"])))
    def roles_change(self, roles: dict[str, EngineRole]) -> None:
        self.router.table.set_roles(roles)

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.heard)))
        self.router.mark_lost(f"tcp://{name}", self.now)
        self.lost.add(name)
        self.now += 2 * IN_FLIGHT_S  # the next status counts

    @rule(blocks=st.integers(1, 20), index=st.none() | st.sampled_from(["a", "b", "c"]))
    def is_routed(self, blocks: int, index: str | None) -> None:
        asked = request(blocks, name=str(next(_numbers)))
        matches = {index: (blocks, blocks, blocks)} if index else None
        choice = self.router.select_and_reserve(asked, matches, self.now)
        if choice is not None:
            assert self.now - self.heard[choice.engine] <= STATUS_TIMEOUT_S, "a silent engine was chosen"
            assert choice.engine not in self.lost, "a lost engine was chosen"
            assert choice.engine not in self.asleep, "an engine that takes nothing was chosen"
            self.under_way[asked.request_id] = choice.engine, self.now
        if choice is not None and choice.hint is not None:
            hint = choice.hint
            assert hint.engine != choice.engine
            assert hint.epoch == self.epochs[hint.engine]
            assert hint.tokens < asked.num_tokens
            assert self.now - self.heard[hint.engine] <= STATUS_TIMEOUT_S, "a silent engine is to be asked"
            assert hint.engine not in self.lost | self.asleep, "an engine that is lost or takes nothing is to be asked"
            if hint.prefills:
                self.under_way[prefill_of(asked.request_id)] = hint.engine, self.now

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def is_withdrawn(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.under_way)))
        request_id = request_id.removesuffix("/prefill")
        self.router.release(request_id)
        self.under_way.pop(request_id, None)
        self.under_way.pop(prefill_of(request_id), None)

    @invariant()
    def reservations_are_those_of_requests_under_way(self) -> None:
        self.router.watch(self.now)
        table = self.router.table
        self.under_way = {
            each: (engine, at)
            for each, (engine, at) in self.under_way.items()
            if at + RESERVATION_S > self.now and engine in table.rows
        }
        by_engine = Counter(engine for engine, _ in self.under_way.values())
        for name, row in table.rows.items():
            assert table.reserved[row] == by_engine[name], f"{name} has {table.reserved[row]} reservations"
        assert table.num_reserved == len(self.under_way)


RouterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestRouterMachine = RouterMachine.TestCase


# ---- the benchmark's model ----


def test_the_simulated_cluster_s_steps_take_as_long_as_the_simulated_gpu_says() -> None:
    import numpy as np
    from capacity import LLAMA

    model = model_config(LLAMA)
    chunks, decoding = [(0, 300), (4096, 1500)], [100, 2000, 30_000]
    starts = np.array([start for start, _ in chunks] + decoding)
    counts = np.array([count for _, count in chunks] + [1] * len(decoding))
    assert StepTime(A800, model).seconds(chunks, len(decoding), sum(decoding), 4) == pytest.approx(
        SimulatedGpu(A800, model).step_seconds(starts, counts, 4)
    )
