"""Leases' messages over real sockets, between two engines' servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from support.engine.scripted import ScriptedCore
from support.waiting import eventually

from headwise.runtime.engine.peers.connections import IDLE_S, PeerConnections
from headwise.runtime.engine.reports import Reporting
from headwise.runtime.engine.server import EngineServer
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.embed_parts import PART_BYTES, parts_of
from headwise.runtime.protocol.lease_messages import AskLease, LeaseEmbeds, LeaseEnded, LeaseWants, Offer, Taken
from headwise.runtime.protocol.messages import Directory, Failed
from headwise.runtime.protocol.prompt_items import PromptEmbeds
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, new_secret, public_key, secure_client

EPOCH, SECRET = 7, "the deployment's"
ASK = AskLease(bytes(16), EPOCH, b"h" * 16, np.ones((1, 1), dtype=np.bool_))


class LendingCore(ScriptedCore):
    def __init__(self, server: EngineServer) -> None:
        super().__init__()
        self._server = server
        self.was_asked: list[Any] = []
        self.was_refused: list[Any] = []

    def asked(self, reader: bytes, message: Any) -> None:
        self.was_asked.append(message)
        answer = Taken(bytes(16), message.epoch, 5, 0, 9, is_over=True)
        if isinstance(message, LeaseEmbeds):
            answer = LeaseWants(message.lease, message.epoch, message.start, len(message.values))
        elif not isinstance(message, Offer):
            answer = LeaseEnded(message.lease, message.epoch, 3, held=True)
        self._server.peers.answer(reader, answer)

    def refuse(self, reader: bytes, message: Any) -> None:
        self.was_refused.append(message)


@pytest.fixture(params=["in the clear", "encrypted"])
def keys(request: pytest.FixtureRequest) -> ServerKeys | None:
    return ServerKeys(new_secret(), frozenset({client_key(SECRET)})) if request.param == "encrypted" else None


@pytest.fixture
def owner(keys: ServerKeys | None) -> Iterator[tuple[EngineServer, LendingCore]]:
    reporting = Reporting("tcp://127.0.0.1:9", SECRET, "owner")
    server = EngineServer("tcp://127.0.0.1:*", reporting=reporting, epoch=EPOCH, keys=keys)
    core = LendingCore(server)
    server.attach(core)
    server.start()
    yield server, core
    server.stop()


def secured(socket: zmq.Socket, keys: ServerKeys | None) -> None:
    secure_client(socket, None if keys is None else ClientKeys(public_key(keys.secret), SECRET))


class Reader:
    """Another engine's connections, with a clock that is set."""

    def __init__(self, context: zmq.Context, address: str, keys: ServerKeys | None) -> None:
        self.now = 0.0
        self.engines = {"owner": (EPOCH, address, 3), "reader": (EPOCH, address, 1)}
        self.connections = PeerConnections(
            context,
            "reader",
            SECRET,
            directory=lambda: Directory("", "", self.engines),
            answer=lambda reader, message: None,
            clock=lambda: self.now,
            prepare=lambda socket: secured(socket, keys),
        )


@pytest.fixture
def reader(owner, keys) -> Iterator[Reader]:
    with zmq.Context() as context:
        reader = Reader(context, owner[0].endpoint, keys)
        yield reader
        context.destroy(linger=0)


def test_what_is_asked_arrives_and_is_answered(owner, reader) -> None:
    reader.connections.send("owner", ASK)
    answers = []
    eventually(lambda: answers.extend(reader.connections.receive()) or answers)
    assert answers == [LeaseEnded(ASK.lease, EPOCH, 3, held=True)]
    assert owner[1].was_asked[0].secret == SECRET


def test_an_offer_arrives_and_its_answer_is_kept_apart_from_those_of_leases(owner, reader) -> None:
    assert reader.connections.epoch_of("owner") == EPOCH
    reader.connections.send("owner", Offer(bytes(16), EPOCH, "reader", 1, (b"h" * 16,) * 2, evict=3))
    reader.connections.send("owner", ASK)
    answers = []
    eventually(lambda: answers.extend(reader.connections.receive()) or answers)
    taken = []
    eventually(lambda: taken.extend(reader.connections.taken()) or taken)
    assert answers == [LeaseEnded(ASK.lease, EPOCH, 3, held=True)]
    assert taken == [Taken(bytes(16), EPOCH, 5, 0, 9, is_over=True)]
    assert owner[1].was_asked[0].secret == SECRET


def test_a_question_about_an_earlier_cache_is_refused(owner, reader) -> None:
    reader.connections.send("owner", replace(ASK, epoch=EPOCH - 1))
    eventually(lambda: owner[1].was_refused)
    assert not owner[1].was_asked


def test_the_largest_part_of_embeddings_arrives_and_an_engine_that_leaves_refuses_it(owner, reader) -> None:
    server, core = owner
    (part,) = parts_of("", [PromptEmbeds(5, np.ones((4, PART_BYTES // 16), np.float32))])
    embeds = LeaseEmbeds(bytes(16), EPOCH, part.start, part.first, part.values)
    reader.connections.send("owner", embeds)
    answers = []
    eventually(lambda: answers.extend(reader.connections.receive()) or answers)
    assert answers == [LeaseWants(bytes(16), EPOCH, 5, 4)]
    np.testing.assert_array_equal(core.was_asked[0].values, part.values)
    server.leave(20.0, [], lambda: None)
    reader.connections.send("owner", embeds)
    eventually(lambda: core.was_refused)
    assert len(core.was_asked) == 1


@pytest.mark.parametrize("secret", ["", "another one's"])
def test_who_does_not_know_the_secret_is_told_nothing(owner, keys, secret: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        secured(socket, keys)
        socket.connect(owner[0].endpoint)
        socket.send(wire.encode(replace(ASK, secret=secret)))
        assert "only engines of this deployment" in wire.decode(socket.recv(), Failed).message
    assert not owner[1].was_asked


def test_only_others_of_the_same_epoch_are_known(reader) -> None:
    assert reader.connections.knows("owner", EPOCH)
    assert not reader.connections.knows("owner", EPOCH + 1)
    assert not reader.connections.knows("reader", EPOCH)
    assert not reader.connections.knows("nobody", EPOCH)
    assert reader.connections.tp_size("owner") == 3
    reader.connections.send("nobody", ASK)
    assert not reader.connections.sockets


def test_connections_that_are_idle_or_lead_elsewhere_are_closed(owner, reader) -> None:
    reader.connections.send("owner", ASK)
    (first,) = reader.connections.sockets
    reader.engines["owner"] = (EPOCH + 1, "tcp://127.0.0.1:9", 3)
    reader.connections.send("owner", ASK)
    (second,) = reader.connections.sockets
    assert first.closed
    reader.now += IDLE_S + 1
    reader.connections.service()
    assert second.closed
    assert not reader.connections.sockets


def test_an_engine_that_takes_nothing_holds_up_nobody(reader) -> None:
    reader.engines["owner"] = (EPOCH, "tcp://127.0.0.1:9", 3)
    for _ in range(1000):
        reader.connections.send("owner", ASK)
    assert reader.connections.receive() == []
