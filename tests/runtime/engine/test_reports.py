"""What an engine hears of the other engines in answer to its reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from support.waiting import eventually

from headwise.runtime.engine.reports import EngineReports, Reporting
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import STATUS_INTERVAL_S, Directory, EngineStatus, Pong
from headwise.runtime.protocol.scheduler_answers import MAX_ANSWER_BYTES

SECRET = "of-this-deployment"
KNOWN = Directory(SECRET, "v1", {"a": (1, "tcp://10.0.0.1:5", 1), "b": (2, "tcp://10.0.0.2:5", 3)})


class Scheduler:
    """Takes one engine's reports, each when it is asked to, and answers what it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        reporting = Reporting(f"tcp://127.0.0.1:{port}", SECRET, "a")
        self.reports = EngineReports(self.context, reporting, lambda: self.now)

    def status(self) -> EngineStatus:
        """The engine's next report."""
        self.now += STATUS_INTERVAL_S

        def reported() -> bool:
            self.reports.service(lambda who, *_: EngineStatus(who.secret, who.engine, "tcp://a", 0, {}))
            self.now += STATUS_INTERVAL_S / 10
            return self.socket.poll(0) > 0

        eventually(reported)
        while self.socket.poll(0):
            self.identity, data = self.socket.recv_multipart()
        status: EngineStatus = wire.decode(data, EngineStatus)
        return status

    def answer(self, *frames: bytes) -> None:
        self.socket.send_multipart((self.identity, *frames))

    def knows(self, version: str) -> bool:
        return self.status().directory == version


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.context.destroy(linger=0)


def test_an_engine_says_which_directory_it_has_and_keeps_the_last(scheduler: Scheduler) -> None:
    assert scheduler.status().directory == ""
    scheduler.answer(wire.encode(KNOWN))
    eventually(lambda: scheduler.knows("v1"))
    assert scheduler.reports.directory.engines == KNOWN.engines
    scheduler.answer(wire.encode(Directory(SECRET, "v2", {})))
    eventually(lambda: scheduler.knows("v2"))
    assert scheduler.reports.directory.engines == {}


BAD: dict[str, Any] = {
    "of a stranger": [wire.encode(Directory("another", "x", {}))],
    "something else": [wire.encode(Pong("x"))],
    "no message": [b"\xff"],
    "too long": [wire.encode(Directory(SECRET, "x" * MAX_ANSWER_BYTES, {}))],
    "many frames": [b""] * 40,
    "wrong types": [wire.encode(KNOWN).replace(b"tcp://10.0.0.1:5", b"\xc0" * 16)],
}


@pytest.mark.parametrize("frames", BAD.values(), ids=list(BAD))
def test_what_is_no_directory_of_the_deployment_changes_nothing(scheduler: Scheduler, frames: list[bytes]) -> None:
    scheduler.status()
    scheduler.answer(wire.encode(KNOWN))
    eventually(lambda: scheduler.knows("v1"))
    scheduler.answer(*frames)
    scheduler.status()
    scheduler.answer(wire.encode(Directory(SECRET, "v2", {"a": (1, "tcp://c", 1)})))
    eventually(lambda: scheduler.knows("v2"))
