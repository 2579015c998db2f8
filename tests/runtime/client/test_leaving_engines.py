"""Engines that leave on purpose: their requests go on elsewhere, and clients notice nothing. Over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.waiting import PATIENCE_S, eventually

from headwise.errors import EngineDiedError
from headwise.runtime.client.client import Client
from headwise.runtime.client.served_calls import MAX_REROUTES

LONG_S = 1000.0


class Leaving:
    """A deployment of this process, and a client; ``left`` are the numbers of the engines that are done."""

    def __init__(self) -> None:
        self.deployment = Deployment()
        self.cores: list[ScriptedCore] = []
        self.left: list[int] = []
        self.pool = ThreadPoolExecutor()
        self.add()
        self.client = Client(self.deployment.address)

    def add(self, *, is_held_back: bool = False) -> ScriptedCore:
        core = ScriptedCore()
        if is_held_back:
            core.gate.clear()
        self.deployment.add_engine(core)
        self.cores.append(core)
        return core

    def leave(self, number: int, timeout_s: float = LONG_S, hashes: list[bytes] | None = None) -> None:
        server = self.deployment.servers[number]
        server.leave(timeout_s, hashes, lambda: self.left.append(number), {"engine-7": 3}, 5)

    def generate(self, max_tokens: int = 3) -> Future[str]:
        return self.pool.submit(lambda: self.client.generate("a", max_tokens=max_tokens).text)

    def close(self) -> None:
        for core in self.cores:
            core.gate.set()
        self.client.close()
        self.deployment.close()
        self.pool.shutdown()


@pytest.fixture
def leaving() -> Iterator[Leaving]:
    leaving = Leaving()
    yield leaving
    leaving.close()


def test_an_engine_that_leaves_ends_what_it_has_begun_and_sends_the_rest_away(leaving: Leaving) -> None:
    first = leaving.cores[0]
    first.gate.clear()
    begun, waits = leaving.generate(), leaving.generate()
    eventually(lambda: len(first.live) == 2)
    first.waiting.add(list(first.live)[1])
    leaving.leave(0)
    eventually(lambda: len(first.live) == 1)
    second = leaving.add()
    eventually(lambda: begun.done() or waits.done())
    assert leaving.left == []
    first.gate.set()
    assert [begun.result(PATIENCE_S), waits.result(PATIENCE_S)] == ["0 1 2 "] * 2
    eventually(lambda: leaving.left == [0])
    assert second.steps == 3, "one request"


def test_what_still_runs_after_the_timeout_goes_on_elsewhere_behind_its_tokens(leaving: Leaving) -> None:
    first = leaving.cores[0]
    stream = leaving.client.stream("a", max_tokens=6)
    first.pace_s = 0.05
    texts = [next(stream).text]
    leaving.leave(0, timeout_s=0.0)
    eventually(lambda: leaving.left == [0])
    leaving.add()
    texts += [delta.text for delta in stream]
    assert "".join(texts) == "0 1 2 3 4 5 "
    assert leaving.client.stats()["faults"] == []


def test_a_request_may_be_sent_away_as_often_as_engines_leave(leaving: Leaving) -> None:
    leaving.cores[0].gate.clear()
    answer = leaving.generate()
    for number in range(MAX_REROUTES + 3):
        core = leaving.cores[number]
        eventually(lambda core=core: len(core.live) == 1)
        leaving.leave(number, timeout_s=0.0)
        leaving.add(is_held_back=True)
    leaving.cores[-1].gate.set()
    assert answer.result(PATIENCE_S) == "0 1 2 "


def test_requests_wait_for_another_engine_while_the_only_one_leaves(leaving: Leaving) -> None:
    core = leaving.cores[0]
    core.is_handing_over = True
    leaving.leave(0, hashes=[b"x" * 16])
    eventually(lambda: leaving.client.stats()["engines"]["engine-0"]["is_leaving"])
    answer = leaving.generate()
    eventually(lambda: core.handed_over == [b"x" * 16])  # the scheduler heard of it before
    assert (core.takers.engine, core.takers.evict, core.storable) == ("engine-0", {"engine-7": 3}, 5)
    assert leaving.left == [], "it has not put all into storage yet"
    assert not core.live
    leaving.add()
    assert answer.result(PATIENCE_S) == "0 1 2 "
    core.is_handing_over = False
    eventually(lambda: leaving.left == [0])


def test_storage_that_takes_too_long_keeps_no_engine_beyond_its_time(leaving: Leaving) -> None:
    leaving.cores[0].is_handing_over = True
    leaving.leave(0, timeout_s=0.2)
    eventually(lambda: leaving.left == [0])


def test_an_engine_leaves_once_however_often_it_is_told_and_though_its_workers_are_lost(leaving: Leaving) -> None:
    core = leaving.cores[0]
    core.gate.clear()
    answer = leaving.generate()
    eventually(lambda: len(core.live) == 1)
    for _ in range(3):
        leaving.leave(0)
    core.dies = EngineDiedError("a worker is lost")
    eventually(lambda: leaving.left == [0])
    leaving.add()
    assert answer.result(PATIENCE_S) == "0 1 2 "
    done = threading.Event()
    leaving.deployment.servers[0].call(done.set)
    assert done.wait(PATIENCE_S)
    assert leaving.left == [0]
