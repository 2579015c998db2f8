"""A client that reaches nothing but the scheduler's port, with real servers in this process."""

from __future__ import annotations

import itertools
import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.scripted import ScriptedCore
from support.passing_on import PortForward
from support.waiting import eventually

from headwise.errors import ConfigError, EngineDiedError
from headwise.runtime.client import connections, ways
from headwise.runtime.client.client import Client
from headwise.runtime.config.model_card import Naming
from headwise.runtime.engine.reports import Reporting
from headwise.runtime.engine.server import EngineServer
from headwise.runtime.frontend.scheduler_server import SchedulerServer
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams
from headwise.sockets.endpoint import Endpoint
from headwise.sockets.listener import _shut_down

SECRET = "of-this-deployment"
NOWHERE = "127.0.0.99"
"""Nothing listens at this address of the loopback interface."""
SILENT = "192.0.2.1"
"""Reserved for documentation: it belongs to no machine."""


class Preprocessor:
    naming = Naming("scripted")
    _numbers = itertools.count(1)  # of all schedulers: no two requests have one id

    def prepare(self, *, sampling: dict[str, Any], **_: Any) -> GenerateRequest:
        params = SamplingParams.from_wire(sampling)
        return GenerateRequest(f"r{next(self._numbers)}", np.array([1, 2, 3], np.int32), params)

    def hashes(self, request: GenerateRequest) -> list[bytes]:
        return []


class Place:
    """A deployment whose engines listen at 127.0.0.2 and say that they are elsewhere, and a port that leads to its
    scheduler."""

    def __init__(self) -> None:
        self._to_end: list[Callable[[], Any]] = []
        self.scheduler = self._start_scheduler(0)
        self.port = self.scheduler.port
        self.forward = PortForward("127.0.0.1", self.port)
        self._to_end.append(self.forward.close)

    def _start_scheduler(self, port: int) -> SchedulerServer:
        scheduler = SchedulerServer(Preprocessor(), "127.0.0.1", port, secret=SECRET, model="scripted")
        scheduler.start()
        return scheduler

    def restart_scheduler(self) -> None:
        """As when its process dies: nobody is told, connections end."""
        self.scheduler._listener.send = lambda identity, data: True
        self.scheduler.stop()
        self.scheduler = self._start_scheduler(self.port)

    def move_scheduler(self, engine: EngineServer) -> str:
        """To another address, which is returned, in an orderly way: the relay that there was goes on."""
        former, self.scheduler = self.scheduler, self._start_scheduler(0)
        former.leave()
        former.hang_up()
        engine.follow(f"tcp://127.0.0.1:{self.scheduler.port}", "")
        self._to_end.append(former.stop)
        return f"127.0.0.1:{self.scheduler.port}"

    def engine(self, core: ScriptedCore, advertised: str, name: str = "engine-0") -> EngineServer:
        reporting = Reporting(f"tcp://127.0.0.1:{self.port}", SECRET, name, advertised)
        server = EngineServer("tcp://127.0.0.2:*", reporting=reporting)
        server.attach(core)
        server.start()
        self._to_end.append(server.stop)
        eventually(lambda: self.scheduler._router.num_engines)
        return server

    def client(self, relay: Any = "auto") -> Client:
        client = Client(self.forward.address, relay=relay)
        self._to_end.insert(0, client.close)
        return client

    @property
    def counts(self) -> dict[str, int]:
        return self.scheduler._proxy.relay.counts

    def close(self) -> None:
        for end in self._to_end:
            end()
        self.scheduler.stop()


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is noticed is not noticed by silence."""
    monkeypatch.setattr(connections, "PEER_TIMEOUT_S", 1000.0)


def numbers(count: int) -> str:
    return "".join(f"{n} " for n in range(count))


def slow_core(pace_s: float = 0.005) -> ScriptedCore:
    core = ScriptedCore()
    core.pace_s = pace_s
    return core


# ---- the way there ----


def test_a_client_that_reaches_only_the_schedulers_port_is_served(
    place: Place, patient: None, caplog: pytest.LogCaptureFixture
) -> None:
    place.engine(ScriptedCore(), NOWHERE)
    client = place.client()
    with caplog.at_level(logging.WARNING, "headwise.runtime.client.ways"):
        streams = [client.stream("abc", max_tokens=50) for _ in range(20)]
        assert [stream.read().text for stream in streams] == [numbers(50)] * 20
        assert client.generate("abc", max_tokens=3).text == numbers(3)
    assert [record.message for record in caplog.records] == [
        f"engines are reached through the scheduler at {place.forward.address}, for "
        f"{client._io._connections.engines.popitem()[0]} cannot be reached from here: all tokens pass its node"
    ]
    assert place.counts == {"relayed": 1, "refused": 0, "unreachable": 0}


def test_an_engine_that_does_not_answer_directly_is_asked_through_the_relay_and_its_host_is_remembered(
    place: Place, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "UNREACHED_S", 0.1)
    place.engine(ScriptedCore(), SILENT)
    client = place.client()
    assert client.generate("abc", max_tokens=3).text == numbers(3)
    monkeypatch.setattr(ways, "UNREACHED_S", 1000.0)
    place.forward.cut()
    assert client.generate("abc", max_tokens=3).text == numbers(3)
    assert place.counts["relayed"] == 2


def test_an_engine_whose_host_takes_connections_and_does_not_speak_is_reached_through_the_relay(
    place: Place, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "UNREACHED_S", 0.1)
    with socket.socket() as taken:
        engine = place.engine(ScriptedCore(), NOWHERE)
        taken.bind((NOWHERE, int(engine.endpoint.rpartition(":")[2])))
        taken.listen()
        assert place.client().generate("abc", max_tokens=3).text == numbers(3)


def test_an_engine_that_can_be_reached_is_not_reached_through_the_relay_unless_that_is_asked_for(place: Place) -> None:
    place.engine(ScriptedCore(), "")
    assert place.client().generate("abc", max_tokens=3).text == numbers(3)
    assert place.client("never").generate("abc", max_tokens=3).text == numbers(3)
    assert place.counts["relayed"] == 0
    assert place.client("always").generate("abc", max_tokens=3).text == numbers(3)
    assert place.counts["relayed"] == 1


def test_an_engine_that_is_busy_is_not_led_through_the_relay(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections while it computes, and is only slow to answer."""
    core = ScriptedCore()
    engine = place.engine(core, "")
    busy = threading.Event()
    engine.call(lambda: busy.wait() and None)
    monkeypatch.setattr(connections, "PING_INTERVAL_S", 0.05)
    client = place.client()
    stream = client.stream("abc", max_tokens=3)
    eventually(lambda: any(peer.is_made for peer in client._io._connections.engines.values()))
    monkeypatch.setattr(ways, "UNREACHED_S", 0.0)
    (peer,) = client._io._connections.engines.values()
    for _ in range(3):
        last = peer.pinged
        eventually(lambda: peer.pinged > last)  # noqa: B023
    busy.set()
    assert stream.read().text == numbers(3)
    assert place.counts["relayed"] == 0


def test_never_fails_with_the_address_and_auto_says_what_was_tried(
    place: Place, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.engine(ScriptedCore(), NOWHERE)
    with pytest.raises(EngineDiedError, match=rf"tcp://{NOWHERE}:\d+ cannot be reached from here, or is gone"):
        place.client("never").generate("abc", max_tokens=3)
    assert place.counts["relayed"] == 0
    place.scheduler._proxy.relay._addresses.clear()
    monkeypatch.setattr(place.scheduler._proxy.relay, "allow", lambda endpoint, address: None)
    with pytest.raises(EngineDiedError, match=r"from here directly or through the scheduler's port \(not allowed\)"):
        place.client().generate("abc", max_tokens=3)


@pytest.mark.parametrize("relay", ["auto", "always"])
def test_a_client_that_cannot_make_its_own_socket_says_so(
    place: Place, patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relay: str
) -> None:
    place.engine(ScriptedCore(), NOWHERE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(EngineDiedError, match=r"through the scheduler's port \(.*No such file or directory"):
        place.client(relay).generate("abc", max_tokens=3)


def test_a_temporary_directory_with_a_long_name_does_not_keep_a_client_from_its_socket(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.engine(ScriptedCore(), NOWHERE)
    (tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 25)))
    assert place.client().generate("abc", max_tokens=3).text == numbers(3)


def test_a_relay_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="relay must be one of auto, always, never, got 'yes'"):
        Client("127.0.0.1:1", relay="yes")


def test_operations_go_through_the_relay_too(place: Place) -> None:
    core = ScriptedCore()
    place.engine(core, NOWHERE)
    client = place.client()
    thread = threading.Thread(target=lambda: core.finish(7))
    thread.start()
    assert client.reset_cache("device") == {"engine-0": 7}
    thread.join()


def test_a_large_request_and_its_answer_go_through_in_whole(place: Place) -> None:
    place.engine(ScriptedCore(), NOWHERE)
    assert place.client().generate(list(range(1_000_000)), max_tokens=3).text == numbers(3)


def test_the_way_to_an_engine_that_left_is_closed_and_a_new_one_is_opened(place: Place) -> None:
    first = place.engine(ScriptedCore(), NOWHERE)
    relay = place.scheduler._proxy.relay
    assert set(relay._addresses.values()) == {Endpoint.parse(first.endpoint)}
    first.stop()
    eventually(lambda: not relay._addresses)
    second = place.engine(ScriptedCore(), NOWHERE)
    eventually(lambda: set(relay._addresses.values()) == {Endpoint.parse(second.endpoint)})
    assert place.client().generate("abc", max_tokens=3).text == numbers(3)


# ---- what is lost on the way ----


def test_a_relayed_engine_that_dies_is_noticed_by_its_connection(place: Place, patient: None) -> None:
    first, second = slow_core(), slow_core()
    engine = place.engine(first, NOWHERE)
    stream = place.client().stream("abc", max_tokens=100)
    said = next(stream).text
    place.engine(second, NOWHERE, "engine-1")
    eventually(lambda: place.scheduler._router.num_engines == 2)
    engine.call(lambda: [_shut_down(each) for each in engine._listener._connections.values()] and None)
    assert said + "".join(delta.text for delta in stream) == numbers(100)
    assert second.steps


@pytest.mark.parametrize("times", [1, 6])
def test_streams_go_on_however_often_the_way_is_cut(place: Place, patient: None, times: int) -> None:
    """More often than engines may be lost: nothing says that a request has killed one."""
    core = slow_core()
    place.engine(core, NOWHERE)
    client = place.client()
    streams = [client.stream("abc", max_tokens=100 * times) for _ in range(3)]
    said = ["" for _ in streams]
    for _ in range(times):
        said = [
            text + "".join(next(stream).text for _ in range(20)) for text, stream in zip(said, streams, strict=True)
        ]
        place.forward.cut()
    for text, stream in zip(said, streams, strict=True):
        assert text + "".join(delta.text for delta in stream) == numbers(100 * times)


def test_relayed_streams_go_on_when_the_scheduler_is_started_again(place: Place, patient: None) -> None:
    core = slow_core()
    place.engine(core, NOWHERE)
    stream = place.client().stream("abc", max_tokens=300)
    said = "".join(next(stream).text for _ in range(20))
    for _ in range(2):
        place.restart_scheduler()
        said += "".join(next(stream).text for _ in range(20))
    assert said + "".join(delta.text for delta in stream) == numbers(300)
    assert place.counts["relayed"] == 1  # of the last scheduler


def test_relayed_streams_go_on_through_a_scheduler_that_has_moved_also_once_the_client_asks_the_next_one(
    place: Place, patient: None
) -> None:
    core = slow_core()
    engine, client, former = place.engine(core, NOWHERE), place.client("always"), place.scheduler
    stream = client.stream("abc", max_tokens=120)
    said = "".join(next(stream).text for _ in range(20))
    address = place.move_scheduler(engine)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", former.port))
    said += "".join(next(stream).text for _ in range(20))
    client.follow(address)
    assert client.generate("abc", max_tokens=3).text == numbers(3)
    assert not former.is_quiet
    assert said + "".join(delta.text for delta in stream) == numbers(120)
    assert core.aborted == [], "and no request was sent anew"
    client.close()
    eventually(lambda: former.is_quiet)


def test_relayed_streams_that_a_scheduler_that_has_moved_cuts_go_on_through_the_next_one_and_no_engine_counts_as_lost(
    place: Place, patient: None
) -> None:
    core = slow_core()
    engine, client, former = place.engine(core, NOWHERE), place.client("always"), place.scheduler
    stream = client.stream("abc", max_tokens=120)
    said = "".join(next(stream).text for _ in range(20))
    client.follow(place.move_scheduler(engine))
    assert client.stats()["scheduler"]["rerouted"] == 0
    core.gate.clear()  # else it might say all while the former one still has its last words
    former.stop()
    core.gate.set()
    assert said + "".join(delta.text for delta in stream) == numbers(120)
    assert client.stats()["scheduler"]["relay"]["relayed"] == 1
    assert client.stats()["scheduler"]["rerouted"] == 0, "the engine it had been at was not named as lost"


def test_a_client_that_was_closed_leaves_no_thread_and_no_file(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    core = slow_core()
    place.engine(core, NOWHERE)
    client = place.client()
    stream = client.stream("abc", max_tokens=10**6)
    next(stream)
    assert list(tmp_path.iterdir()) == []  # whoever could connect there would have to do so before the client
    client.close()
    eventually(lambda: bool(core.aborted))
    assert "headwise-forwarder" not in {thread.name for thread in threading.enumerate()}
