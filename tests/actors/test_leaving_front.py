"""What an HTTP server's and a scheduler's actors do when their role has gone to another node."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.waiting import PATIENCE_S, eventually

from headwise import EngineConfig
from headwise.actors import ending, http_server
from headwise.actors.front import Front, Keys
from headwise.actors.http_server import HttpServerActor
from headwise.actors.scheduler import GlobalScheduler

THERE = Front("10.0.0.3", 8700, "tcp://10.0.0.3:8701", "namespace")
CONFIG = EngineConfig(host="0.0.0.0", http=8000)


class Client:
    def __init__(self) -> None:
        self.followed: list[str] = []
        self.reasons: list[str] = []

    def follow(self, address: str) -> None:
        self.followed.append(address)

    def close(self, reason: str = "") -> None:
        self.reasons.append(reason)


class Server:
    """Its connections end by themselves, or do not.

    done: what was called, in this order
    """

    num_connections = 3

    def __init__(self, *, ends: bool) -> None:
        self.is_quiet = ends
        self.done: list[str] = []

    def leave(self, timeout_s: float = 0.0) -> bool:
        self.done.append("leave")
        return self.is_quiet

    def hang_up(self) -> None:
        self.done.append("hang_up")

    def stop(self) -> None:
        self.done.append("stop")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """In how many seconds the actor's process was to end."""
    told: list[float] = []
    monkeypatch.setattr(ending, "end_this_actor", told.append)
    return told


def wait_for(actor: Any) -> None:
    waiting = threading.Thread(target=actor.ended)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


@pytest.mark.parametrize("is_in_time", [True, False])
def test_an_http_server_ends_with_its_answers_or_tells_them_that_its_node_goes(
    ends: list[float], is_in_time: bool
) -> None:
    actor = class_of(HttpServerActor)(CONFIG, "http-0", "tcp://127.0.0.1:8700", None)
    actor._server, actor._client = server, client = Server(ends=is_in_time), Client()
    assert not actor.about().is_leaving
    actor.leave(60.0)
    wait_for(actor)
    assert actor.about().is_leaving, "an owner that finds it does not take it for the one that serves"
    assert server.done == ["leave", "stop"]
    assert len(client.reasons) == (0 if is_in_time else 1)
    assert all("ask again" in reason for reason in client.reasons)
    eventually(lambda: len(ends) == 2)
    assert 60.0 < ends[0] < 70.0, "whatever hangs"
    assert ends[1] == ending.LAST_WORDS_S, "also without an owner"


def test_an_http_server_that_leaves_asks_the_next_scheduler(ends: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    actor = class_of(HttpServerActor)(CONFIG, "http-0", "tcp://127.0.0.1:8700", None)
    actor._client, actor._server = client, _ = Client(), Server(ends=True)
    monkeypatch.setattr(http_server, "node_address", lambda: "10.0.0.2")
    actor.leave(60.0, front=THERE)
    wait_for(actor)
    assert client.followed == ["tcp://10.0.0.3:8700"]
    assert actor.about().front == THERE, "an owner that finds nobody else learns it here"


def test_an_http_server_that_came_before_its_scheduler_was_the_one_asks_it_on_its_own_node_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = class_of(HttpServerActor)(CONFIG, "http-0", "tcp://10.0.0.2:8700", None)
    actor._client = client = Client()
    monkeypatch.setattr(http_server, "node_address", lambda: "10.0.0.3")
    actor.follow(THERE)
    assert client.followed == ["tcp://127.0.0.1:8700"], "as one that is started again there"


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_scheduler_serves_nobody_from_then_on_and_ends_with_what_it_relays(
    ends: list[float], is_in_time: bool
) -> None:
    actor = class_of(GlobalScheduler)(CONFIG, Keys("secret"), 8700, "tcp://10.0.0.2:8701")
    actor._server = server = Server(ends=is_in_time)
    actor.leave(60.0 if is_in_time else 0.0, front=THERE)
    wait_for(actor)
    assert server.done == ["leave", "hang_up", "stop"]
    eventually(lambda: len(ends) == 2)
    assert ends[1] == ending.LAST_WORDS_S
    about = actor.about()
    assert (about.is_leaving, about.front) == (True, THERE)
    assert actor.client_address() == "tcp://10.0.0.3:8700", "who finds it by its name is told where to go"


def class_of(actor_class: Any) -> Any:
    return actor_class.__ray_metadata__.modified_class
