"""What the scheduler does so that all engines have the weights that a client asks for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headwise.errors import HeadwiseError, OverloadedError
from headwise.runtime.config.model_card import Naming
from headwise.runtime.frontend.fleet_view import FleetView
from headwise.runtime.frontend.routing import Router, RouterOptions
from headwise.runtime.frontend.scaling import Exchange, FleetState
from headwise.runtime.frontend.scaling.base import ScalingPolicy
from headwise.runtime.frontend.scaling.exchange import Wish, Wishes
from headwise.runtime.frontend.scaling.replica_set import ReplicaSet
from headwise.runtime.frontend.weights_service import MAX_ASKERS, NOBODY_S, WeightsService
from headwise.runtime.protocol.messages import (
    EngineLoad,
    EngineStatus,
    Failed,
    UpdateWeights,
    WantedWeights,
    WeightsUpdated,
    error_of,
)
from headwise.runtime.protocol.weights import FIRST, MOST_TEXT, AdapterChanges, Weights

SECRET = "of-this-deployment"
ONE, TWO = Weights("one", "/shared/one"), Weights("two", "/shared/two")
TIMEOUT_S = 30.0


class Scheduler:
    """A scheduler's part of it; ``owner`` is the part of the owner, which calls when it is told to."""

    def __init__(self, owner: Wishes | None = None) -> None:
        self.now = 100.0
        self.exchange, self.router = Exchange(), Router(RouterOptions())
        self.hashing = SimpleNamespace(naming=Naming("base"))
        self.sent: list[tuple[bytes, Any]] = []
        self.owner = owner or Wishes(ReplicaSet(ScalingPolicy(1, 4), 2))
        fleet = FleetView(self.exchange, 2, f"scheduler {id(self)}", True, lambda: self.now, self._send)
        parts = self.router, fleet, self.hashing, lambda: self.now, self._send, TIMEOUT_S
        self.service = WeightsService(SECRET, *parts, configured="first=/first,other=/other")

    def _send(self, identity: bytes, message: Any) -> None:
        self.sent.append((identity, message))

    def ask(self, weights: Weights, who: bytes = b"client", key: int = 1, keeps_running: bool = False) -> None:
        self.service.update(who, UpdateWeights(key, weights, keeps_running))

    def change(self, version: str, who: bytes = b"client", drop: tuple[str, ...] = (), **add: str) -> None:
        changes = AdapterChanges(tuple(add.items()), drop)
        self.service.update(who, UpdateWeights(1, Weights(version), changes=changes))

    def report(self, engine: str, weights: Weights = FIRST, **more: Any) -> None:
        """An engine says how it is, and everybody is told what is due."""
        status = EngineStatus(SECRET, engine, f"tcp://{engine}", 0, {}, work=EngineLoad(), weights=weights, **more)
        self.router.update(self.service.heard(engine.encode(), status), self.now)
        self.service.answer(self.now)

    def owner_calls(self, **more: Any) -> None:
        for _ in range(2):
            state = FleetState(2, "of tests", expected=2, wish=self.owner.last, weights=self.owner.weights, **more)
            news = self.exchange.swap(state)
            if news.wish is not None:
                self.owner.take(news.wish)
        self.service.answer(self.now)

    def told(self, who: str) -> list[Any]:
        """What somebody was sent since the last look."""
        found = [message for identity, message in self.sent if identity == who.encode()]
        self.sent = [each for each in self.sent if each[0] != who.encode()]
        return found

    def error(self) -> HeadwiseError:
        (failed,) = self.told("client")
        assert isinstance(failed, Failed)
        return error_of(failed)

    def room(self) -> dict[str, bool]:
        """Who gets requests."""
        return {name: bool(self.router.table.room[row] > 0) for name, row in self.router.table.rows.items()}


@pytest.fixture
def scheduler() -> Scheduler:
    """With two engines, whose owner has called."""
    made = Scheduler()
    made.owner_calls()
    for engine in ("a", "b"):
        made.report(engine, identity="base")
        assert made.told(engine) == []
    return made


def test_engines_are_told_at_once_and_the_client_when_all_have_them_and_the_owner_knows(scheduler: Scheduler) -> None:
    scheduler.ask(ONE, keeps_running=True)
    for engine in ("a", "b"):
        assert scheduler.told(engine) == [WantedWeights(SECRET, ONE, True)]
    scheduler.report("a", identity="base")
    assert scheduler.told("a") == [WantedWeights(SECRET, ONE, True)], "it may have missed it"
    scheduler.report("a", ONE, identity="of one")
    assert scheduler.told("a") == []
    assert scheduler.hashing.naming == Naming("of one")
    scheduler.report("b", identity="base")
    assert scheduler.room() == {"a": True, "b": False}, "who has old ones gets nothing once another one has them"
    scheduler.report("b", ONE, identity="of one")
    assert scheduler.room() == {"a": True, "b": True}
    assert scheduler.told("client") == [], "were this process to end, the owner would start engines with old ones"
    scheduler.owner_calls()
    assert scheduler.owner.weights == ONE
    assert scheduler.told("client") == [WeightsUpdated(1, ("a", "b"))]
    assert scheduler.service.stats() == {"version": "one", "model": "/shared/one", "adapters": [], "asked": ""}


def test_adapters_come_to_those_of_the_configuration_and_then_to_those_that_there_are(scheduler: Scheduler) -> None:
    steps = [
        ({"version": "one", "sql": "/sql"}, "first=/first,other=/other,sql=/sql"),
        ({"version": "two", "drop": ("sql",), "other": "/new"}, "first=/first,other=/new"),
    ]
    for change, adapters in steps:
        weights = Weights(change["version"], adapters=adapters)
        for _ in range(2):  # it may not know whether it was heard
            scheduler.change(**change)
        assert scheduler.told("a") == [WantedWeights(SECRET, weights)]
        for engine in ("a", "b"):
            scheduler.report(engine, weights)
        scheduler.owner_calls()
        assert scheduler.told("client") == [WeightsUpdated(1, ("a", "b"))]
        scheduler.change(**change)
        scheduler.owner_calls()
        assert scheduler.told("client") == [WeightsUpdated(1, ("a", "b"))], "although what was to go is gone by now"
        scheduler.told("a")


def test_changes_that_cannot_be_made_are_the_caller_s_error(scheduler: Scheduler) -> None:
    scheduler.change("one", drop=("nobody",))
    assert "there is no adapter 'nobody' that could go; there are: first, other" in str(scheduler.error())
    scheduler.change("one", **{f"x{number}": "/x" for number in range(200)})
    assert "200 adapters come or go; at most 128 do at once" in str(scheduler.error())
    scheduler.change("one", long="/" * MOST_TEXT["adapters"])
    assert "adapters of weights has" in str(scheduler.error())
    scheduler.change("one", sql="/sql")
    scheduler.change("two", b"other", chat="/chat")
    (failed,) = scheduler.told("other")
    assert isinstance(error_of(failed), OverloadedError)


def test_who_asks_for_the_same_waits_for_the_same_and_who_asks_again_only_once(scheduler: Scheduler) -> None:
    for who in (b"client", b"client", b"other"):
        scheduler.ask(ONE, who)
    for engine in ("a", "b"):
        scheduler.report(engine, ONE)
    scheduler.owner_calls()
    assert scheduler.told("client") == scheduler.told("other") == [WeightsUpdated(1, ("a", "b"))]
    scheduler.ask(ONE)
    scheduler.service.answer(scheduler.now)
    assert scheduler.told("client") == [WeightsUpdated(1, ("a", "b"))], "they have them"
    assert scheduler.told("a") == [WantedWeights(SECRET, ONE)] * 2


def test_others_may_not_be_asked_for_meanwhile_nor_ever_by_the_same_name(scheduler: Scheduler) -> None:
    scheduler.ask(ONE, b"other")
    scheduler.ask(TWO)
    assert "about to have weights 'one'" in str(scheduler.error())
    for engine in ("a", "b"):
        scheduler.report(engine, ONE)
    scheduler.owner_calls()
    scheduler.ask(Weights("one", "/shared/two"))
    assert "version 'one' names other weights" in str(scheduler.error())


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (Weights("", "/a"), "version of weights must be printable"),
        (Weights("a\nb", "/a"), "version of weights must be printable"),
        (Weights("a", "x" * (MOST_TEXT["model"] + 1)), f"model of weights has {MOST_TEXT['model'] + 1} characters"),
        (Weights("x" * (MOST_TEXT["version"] + 1), "/a"), f"version of weights has {MOST_TEXT['version'] + 1} char"),
        (Weights("a", "", "x" * (MOST_TEXT["adapters"] + 1)), "adapters of weights has"),
    ],
)
def test_what_names_no_weights_is_told(scheduler: Scheduler, weights: Weights, says: str) -> None:
    scheduler.ask(weights)
    assert says in str(scheduler.error())
    scheduler.report("a")
    assert scheduler.told("a") == []


def test_weights_that_all_refuse_are_forgotten(scheduler: Scheduler) -> None:
    scheduler.ask(ONE)
    scheduler.report("a", refused=ONE, refusal="it is empty")
    assert scheduler.told("client") == []
    scheduler.report("b", refused=ONE, refusal="it is empty")
    assert str(scheduler.error()).startswith("a, b cannot have these weights: it is empty; nothing has changed: mend ")
    scheduler.sent.clear()
    for engine in ("a", "b"):
        scheduler.report(engine, refused=ONE, refusal="it is empty")
    assert scheduler.room() == {"a": True, "b": True}
    assert not scheduler.sent
    scheduler.owner_calls()
    assert scheduler.owner.weights == FIRST


def test_who_alone_refuses_gets_no_requests_until_it_has_others(scheduler: Scheduler) -> None:
    scheduler.ask(ONE)
    scheduler.report("a", ONE, identity="of one")
    scheduler.report("b", refused=ONE, refusal="no such directory " * 100)
    error = str(scheduler.error())
    assert error.startswith("b cannot have these weights: no such directory")
    assert "a has them" in error
    assert len(error) < 700
    scheduler.told("b")
    scheduler.report("b", refused=ONE, refusal="no such directory")
    assert scheduler.told("b") == [], "it need not be told of them again"
    assert scheduler.room() == {"a": True, "b": False}
    scheduler.ask(TWO)
    for engine in ("a", "b"):
        scheduler.report(engine, TWO)
    scheduler.owner_calls()
    assert scheduler.room() == {"a": True, "b": True}
    assert scheduler.told("client") == [WeightsUpdated(1, ("a", "b"))]


def test_an_engine_that_comes_late_gets_them_before_any_request(scheduler: Scheduler) -> None:
    scheduler.ask(ONE)
    for engine in ("a", "b"):
        scheduler.report(engine, ONE)
    scheduler.owner_calls()
    scheduler.report("c")
    assert scheduler.told("c") == [WantedWeights(SECRET, ONE)]
    assert scheduler.room()["c"] is False
    scheduler.report("c", ONE)
    assert scheduler.room()["c"] is True


def test_an_engine_that_hangs_is_not_waited_for_for_ever(scheduler: Scheduler) -> None:
    scheduler.ask(ONE)
    for _ in range(int(TIMEOUT_S) + 2):
        scheduler.now += 1.0
        scheduler.report("a", ONE)
        scheduler.report("b")
    assert "b has not had the weights for 30 s" in str(scheduler.error())


def test_engines_that_are_silent_or_leaving_are_not_waited_for(scheduler: Scheduler) -> None:
    scheduler.ask(ONE)
    scheduler.report("b", is_leaving=True)
    scheduler.now += 10.0
    scheduler.report("a", ONE)
    scheduler.owner_calls()
    assert scheduler.told("client") == [WeightsUpdated(1, ("a",))]


def test_without_engines_the_next_one_is_started_with_them_if_one_is_started_for_requests() -> None:
    scheduler = Scheduler()
    scheduler.owner_calls()
    scheduler.ask(ONE)
    scheduler.owner_calls()
    assert scheduler.owner.weights == FIRST, "engines are there, or start"
    state = FleetState(0, "none is needed", is_on_demand=True, wish=scheduler.owner.last, weights=FIRST)
    scheduler.exchange.swap(state)
    scheduler.service.answer(scheduler.now)
    scheduler.owner_calls()
    assert scheduler.owner.weights == ONE
    assert scheduler.told("client") == [WeightsUpdated(1, ())]


def test_where_no_engine_comes_the_next_ones_start_with_them() -> None:
    """Those before may be why none comes."""
    scheduler = Scheduler()
    scheduler.owner_calls()
    scheduler.ask(ONE)
    scheduler.now += NOBODY_S - 1
    scheduler.owner_calls()
    assert scheduler.told("client") == []
    scheduler.now += 2
    scheduler.service.answer(scheduler.now)
    scheduler.owner_calls()
    assert scheduler.owner.weights == ONE
    assert scheduler.told("client") == [WeightsUpdated(1, ())]


def test_what_is_left_out_stays(scheduler: Scheduler) -> None:
    """A model, or adapters."""
    for asked, wanted in (
        (Weights("one", "/shared/one"), Weights("one", "/shared/one")),
        (Weights("two", "", "sql=/a"), Weights("two", "/shared/one", "sql=/a")),
        (Weights("three", "/shared/two"), Weights("three", "/shared/two", "sql=/a")),
        (Weights("four", "", ""), Weights("four", "/shared/two", "")),
    ):
        scheduler.ask(asked)
        for engine in ("a", "b"):
            assert scheduler.told(engine) == [WantedWeights(SECRET, wanted)]
            scheduler.report(engine, wanted, identity="any", adapters=(("sql", asked.version),))
        assert scheduler.hashing.naming == Naming("any", (("sql", asked.version),))
        scheduler.ask(asked)
        scheduler.owner_calls()
        assert scheduler.told("client") == [WeightsUpdated(1, ("a", "b"))]
        scheduler.sent.clear()


def test_what_is_asked_of_a_scheduler_that_knows_nothing_yet_waits_until_it_does() -> None:
    scheduler = Scheduler()
    scheduler.report("a")
    scheduler.ask(Weights("one", "", "sql=/a"))
    scheduler.ask(Weights("gone", "/b"), b"another")
    assert not scheduler.sent
    scheduler.service.forget(frozenset([b"another"]))
    scheduler.owner_calls()
    assert scheduler.told("a") == [WantedWeights(SECRET, Weights("one", "", "sql=/a"))]


def test_a_next_scheduler_knows_them_from_the_owner(scheduler: Scheduler) -> None:
    scheduler.ask(ONE)
    scheduler.report("a", ONE)
    scheduler.owner_calls()
    following = Scheduler(scheduler.owner)
    following.report("b", identity="base")
    assert following.told("b") == [], "the owner has not called yet"
    following.owner_calls()
    following.report("b", identity="base")
    assert following.told("b") == [WantedWeights(SECRET, ONE)]
    assert following.hashing.naming == Naming("base")
    following.report("a", ONE, identity="of one")
    assert following.hashing.naming == Naming("of one")
    following.ask(ONE)  # the client asks it again
    following.report("b", ONE, identity="of one")
    assert following.told("client") == [WeightsUpdated(1, ("a", "b"))]


def test_a_next_owner_knows_them_from_the_scheduler_and_both_from_the_engines(scheduler: Scheduler) -> None:
    scheduler.ask(ONE)
    scheduler.report("a", ONE)
    scheduler.owner_calls()
    scheduler.owner = Wishes(ReplicaSet(ScalingPolicy(1, 4), 2))
    scheduler.owner.resume(None)
    scheduler.owner_calls()
    assert scheduler.owner.weights == ONE
    owner = Wishes(ReplicaSet(ScalingPolicy(1, 4), 2))
    owner.resume(None)
    both = Scheduler(owner)
    both.owner_calls()
    both.report("a", ONE)
    both.report("b", ONE)
    both.owner_calls()
    assert owner.weights == ONE
    assert both.room() == {"a": True, "b": True}
    assert not both.sent


def test_a_wish_that_another_owner_took_brings_them() -> None:
    owner = Wishes(ReplicaSet(ScalingPolicy(1, 4), 2))
    owner.resume(replace(Wish("w", sets_number=False), weights=ONE))
    assert owner.weights == ONE


def test_engines_of_which_the_same_weights_are_others_are_told_of(scheduler: Scheduler) -> None:
    scheduler.ask(ONE)
    scheduler.report("a", ONE, identity="of one")
    scheduler.report("b", ONE, identity="of another")
    assert scheduler.hashing.naming == Naming("of one")
    assert "b has other weights than other engines" in scheduler.router.faults()[-1][1]


def test_clients_that_are_gone_are_not_told_and_so_many_may_wait(scheduler: Scheduler) -> None:
    for number in range(MAX_ASKERS + 1):
        scheduler.ask(ONE, b"client" if number == MAX_ASKERS else b"c%d" % number, number)
    assert "clients wait for weights" in str(scheduler.error())
    scheduler.service.forget(frozenset(b"c%d" % number for number in range(1, MAX_ASKERS)))
    for engine in ("a", "b"):
        scheduler.report(engine, ONE)
    scheduler.owner_calls()
    assert [message for who, message in scheduler.sent if who.startswith(b"c")] == [WeightsUpdated(0, ("a", "b"))]
