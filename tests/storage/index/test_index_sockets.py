"""The attention store's server, the engine's flusher and the scheduler's client, over real sockets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import msgpack
import pytest
import zmq
from support.index.truth import Update, block
from support.waiting import PATIENCE_S

from headwise.liveness_clock import LONGEST_S
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, new_secret, public_key
from headwise.storage.index.connection import Connection
from headwise.storage.index.flusher import Flusher
from headwise.storage.index.messages import (
    Flush,
    GetIndexStats,
    Gone,
    Heartbeat,
    IndexStats,
    Matches,
    Message,
    Query,
    Rejected,
    SnapshotRequest,
)
from headwise.storage.index.store_client import GONE_INTERVAL_S, GONE_REPEATS, StoreClient
from headwise.storage.index.store_server import StoreServer
from headwise.storage.index.wire import MAX_FRAMES, VERSION, decode, encode

PATH = [block(number) for number in range(1, 9)]
MODEL = "model x"


def holds(first: int, last: int, resident: bool = True) -> Update:
    return Update("device", first, tuple(PATH[first:last]), resident)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("tcp://127.0.0.1:*", MODEL, node_timeout_s=30.0, max_message_bytes=1 << 20)
    server.start()
    yield server
    server.stop()


def eventually(condition: Callable[[], object], meanwhile: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {PATIENCE_S} s"
        meanwhile()
        time.sleep(0.005)


def test_a_store_that_has_moved_learns_all_that_its_nodes_hold(server: StoreServer) -> None:
    with closing(Flusher("n", 1, "tcp://127.0.0.1:9", MODEL)) as flusher:  # where it was, nothing listens any more
        flusher.flush([holds(0, 3)])
        flusher.follow(server.endpoint)
        flusher.flush([holds(3, 6)])
        eventually(lambda: server.match(PATH) == {"n": (6, 6, 6)}, flusher.service)


def test_flushes_reach_the_store_and_queries_are_answered(server: StoreServer) -> None:
    with (
        closing(Flusher("n", 1, server.endpoint, MODEL)) as flusher,
        closing(StoreClient(server.endpoint, MODEL)) as me,
    ):
        flusher.flush([holds(0, 3), holds(3, 6)])
        eventually(lambda: server.match(PATH) == {"n": (6, 6, 6)}, flusher.service)
        eventually(lambda: me.query(1, PATH))
        assert me.query(2, b"".join(PATH[:2]))
        assert me.ask_stats(3)
        answers: list[Matches | IndexStats] = []
        eventually(lambda: len(answers) == 3, lambda: answers.extend(me.poll()))
        assert answers[:2] == [Matches(1, {"n": (6, 6, 6)}), Matches(2, {"n": (2, 2, 2)})]
        assert isinstance(answers[2], IndexStats)
        assert answers[2].stats["nodes"]["n"]["blocks"]["device"] == 6
        assert answers[2].stats["queries"] == 2
        flusher.restart(2)
        eventually(lambda: server.match(PATH) == {}, flusher.service)


def test_one_steps_updates_travel_as_one_message() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with closing(Flusher("n", 1, f"tcp://127.0.0.1:{port}")) as flusher:
            eventually(lambda: router.poll(0), flusher.service)
            router.recv_multipart()  # the first heartbeat
            flusher.flush([holds(depth, depth + 1) for depth in range(8)])
            assert router.poll(1000 * PATIENCE_S)
            frames = router.recv_multipart()[1:]
    assert [decode(frame).seq for frame in frames] == list(range(8))
    assert len(frames) <= MAX_FRAMES


def test_a_store_that_is_away_costs_nothing_and_gets_no_old_questions() -> None:
    server = StoreServer("tcp://127.0.0.1:*")
    endpoint = server.endpoint
    server.stop()
    with closing(StoreClient(endpoint)) as me:
        assert [me.query(key, PATH) for key in range(3000)] == [False] * 3000
        assert me.poll() == []
        server = StoreServer(endpoint)
        server.start()
        eventually(lambda: me.query(9, PATH))
        answers: list[Matches | IndexStats] = []
        eventually(lambda: answers, lambda: answers.extend(me.poll()))
        assert answers == [Matches(9, {})]
        server.stop()


def test_gone_is_said_again_to_a_store_that_was_away() -> None:
    now = [1e9]
    server = StoreServer("tcp://127.0.0.1:*")
    endpoint = server.endpoint
    server.stop()
    with closing(StoreClient(endpoint, clock=lambda: now[0])) as me, closing(Flusher("n", 7, endpoint)) as flusher:
        me.gone("n", 7)
        server = StoreServer(endpoint)
        server.start()
        flusher.flush([holds(0, 3)])
        eventually(lambda: server.match(PATH), flusher.service)
        eventually(lambda: me.query(1, PATH))
        for _ in range(GONE_REPEATS):
            now[0] += GONE_INTERVAL_S
            me.poll()
        eventually(lambda: server.match(PATH) == {})
        flusher.restart(8)
        flusher.flush([holds(0, 2)])
        eventually(lambda: server.match(PATH) == {"n": (2, 2, 2)}, flusher.service)
    server.stop()


def test_a_store_that_fails_starts_anew_and_is_told_all_again(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Flusher("n", 1, server.endpoint, MODEL)) as flusher:
        flusher.flush([holds(0, 4)])
        eventually(lambda: server.match(PATH) == {"n": (4, 4, 4)}, flusher.service)

        def fail(message: Message) -> bool:
            raise RuntimeError("a fault of its own")

        monkeypatch.setattr(server._handler.store, "apply", fail)  # of this store: the one that follows is whole
        flusher.flush([holds(4, 8)])
        eventually(lambda: server.match(PATH) == {"n": (8, 8, 8)}, flusher.service)


def test_a_silent_node_is_dropped_and_comes_back_with_its_next_word() -> None:
    now = [1e9]
    server = StoreServer("tcp://127.0.0.1:*", node_timeout_s=10.0, clock=lambda: now[0])
    server.start()
    with closing(Flusher("n", 1, server.endpoint)) as flusher:
        flusher.flush([holds(0, 3)])
        eventually(lambda: server.match(PATH), flusher.service)
        for _ in range(21):
            now[0] += LONGEST_S
            server.stats()
        eventually(lambda: server.stats()["nodes"] == {})
        eventually(lambda: server.match(PATH) == {"n": (3, 3, 3)}, flusher.service)
    server.stop()


# ---- clocks that are set back ----


def test_a_node_that_was_taken_for_gone_and_is_not_comes_back(server: StoreServer) -> None:
    with (
        closing(Flusher("n", 10, server.endpoint, MODEL)) as node,
        closing(StoreClient(server.endpoint, MODEL)) as client,
    ):
        node.flush([holds(0, 5)])
        eventually(lambda: node._is_accepted, node.service)
        client.gone("n", 10)
        eventually(lambda: server.match(PATH) == {}, client.poll)
        eventually(lambda: server.match(PATH) == {"n": (5, 5, 5)}, node.service)
        assert node.epoch == 11


@pytest.mark.parametrize("is_said_to_be_gone", [False, True])
def test_a_node_that_is_started_again_with_a_lower_epoch_is_heard(
    server: StoreServer, is_said_to_be_gone: bool
) -> None:
    with closing(Flusher("n", 1000, server.endpoint, MODEL)) as before:
        before.flush([holds(0, 5)])
        eventually(lambda: server.match(PATH) == {"n": (5, 5, 5)}, before.service)
    if is_said_to_be_gone:
        with closing(StoreClient(server.endpoint, MODEL)) as client:
            client.gone("n", 1000)
            eventually(lambda: server.match(PATH) == {}, client.poll)
    with closing(Flusher("n", 10, server.endpoint, MODEL)) as after:
        after.flush([holds(0, 3)])
        eventually(lambda: server.match(PATH) == {"n": (3, 3, 3)}, after.service)
        after.flush([holds(3, 4)])
        eventually(lambda: server.match(PATH) == {"n": (4, 4, 4)}, after.service)
        assert after.epoch == 1001
        after.restart(1002)
        after.flush([holds(0, 1)])
        eventually(lambda: server.match(PATH) == {"n": (1, 1, 1)}, after.service)


def test_a_node_that_was_replaced_does_not_push_its_successor_out(server: StoreServer) -> None:
    with (
        closing(Flusher("n", 10, server.endpoint, MODEL)) as old,
        closing(Flusher("n", 20, server.endpoint, MODEL)) as new,
    ):
        old.flush([holds(0, 5)])
        eventually(lambda: server.match(PATH) == {"n": (5, 5, 5)}, old.service)
        eventually(lambda: old._is_accepted, old.service)
        new.flush([holds(0, 3)])
        eventually(lambda: server.match(PATH) == {"n": (3, 3, 3)}, new.service)
        warned = old._warn_at
        eventually(lambda: old._warn_at > warned, old.service)  # it was told of its successor
        assert (old.epoch, new.epoch) == (10, 20)
        assert server.match(PATH) == {"n": (3, 3, 3)}


# ---- bad messages ----

GOOD = Flush("n", 1, 0, "device", 0, b"".join(PATH), True)
BAD: list[tuple[str, str, list[bytes]]] = [
    ("not msgpack", "malformed", [b"\xc1\xff"]),
    ("nothing", "malformed", [b""]),
    ("another shape", "malformed", [msgpack.packb({"kind": "Flush"})]),
    ("an unknown kind", "malformed", [msgpack.packb([VERSION, "Flash", MODEL])]),
    ("a missing field", "malformed", [msgpack.packb([VERSION, "Flush", MODEL, "n", 1])]),
    ("a wrong type", "malformed", [encode(replace(GOOD, epoch="1"), MODEL)]),
    ("half a hash", "malformed", [encode(replace(GOOD, block_hashes=b"12345678"), MODEL)]),
    ("too few flags", "malformed", [encode(replace(GOOD, resumable=b"\1"), MODEL)]),
    ("cut off", "malformed", [encode(GOOD, MODEL)[:-5]]),
    ("the version before", "version", [msgpack.packb([1, "Flush", "n", 1, 0, "device", 0, b"", True])]),
    ("another model's", "namespace", [encode(GOOD, "model y")]),
    ("too large", "oversized", [bytes((1 << 20) + 1)]),
    ("too many frames", "oversized", [encode(GOOD, MODEL)] * (MAX_FRAMES + 1)),
    ("what only the store says", "unexpected", [encode(SnapshotRequest("n"), MODEL)]),
]


@pytest.mark.parametrize(("kind", "frames"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_messages_are_counted_by_kind_answered_and_dropped(
    server: StoreServer, kind: str, frames: list[bytes]
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.endpoint)
        socket.send_multipart(frames)
        assert socket.poll(1000 * PATIENCE_S)
        answer = decode(socket.recv(), MODEL)
        assert isinstance(answer, Rejected)
        assert answer.reason
        socket.send(encode(Query(1, b"".join(PATH)), MODEL))
        assert socket.poll(1000 * PATIENCE_S)
        assert decode(socket.recv(), MODEL) == Matches(1, {})
    assert server.stats()["rejected"] == {kind: 1}


def test_a_rejection_is_not_answered_by_a_rejection(server: StoreServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.endpoint)
        socket.send(encode(Rejected("no"), MODEL))
        socket.send(encode(GetIndexStats(1), MODEL))
        assert socket.poll(1000 * PATIENCE_S)
        assert isinstance(decode(socket.recv(), MODEL), IndexStats)
    assert server.stats()["rejected"] == {"unexpected": 1}


def test_a_flood_of_bad_messages_is_counted_and_does_not_flood_the_log(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.endpoint)
        for _ in range(800):
            socket.send(b"\xc1")
        eventually(lambda: server.stats()["rejected"].get("malformed") == 800)
    assert len([record for record in caplog.records if "malformed" in record.getMessage()]) == 1


def test_a_flusher_that_is_rejected_says_so_once(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    def said_by_flusher() -> str:
        return "\n".join(record.getMessage() for record in caplog.records if record.name.endswith("flusher"))

    with caplog.at_level(logging.WARNING), closing(Flusher("n", 1, server.endpoint, "model y")) as flusher:
        for _ in range(3):
            flusher.flush([holds(0, 1), holds(0, 1, resident=False)])
        eventually(lambda: server.stats()["rejected"].get("namespace", 0) >= 2, flusher.service)
        eventually(lambda: "of the same deployment" in said_by_flusher(), flusher.service)
        flusher.flush([holds(0, 1)])
        eventually(lambda: server.stats()["rejected"]["namespace"] >= 3, flusher.service)
    assert len([record for record in caplog.records if record.name.endswith("flusher")]) == 1


# ---- keys ----


def test_with_keys_the_deployment_talks_and_strangers_get_nothing_in_and_nothing_out() -> None:
    secret, keys = new_secret(), ServerKeys(new_secret(), frozenset((client_key("ours"),)))
    server = StoreServer("tcp://127.0.0.1:*", keys=keys)
    server.start()
    ours = ClientKeys(public_key(keys.secret), "ours")
    with closing(Flusher("n", 1, server.endpoint, keys=ours)) as flusher:
        flusher.flush([holds(0, 5)])
        eventually(lambda: server.match(PATH) == {"n": (5, 5, 5)}, flusher.service)
        strangers = {
            "no keys": None,
            "keys of another deployment": ClientKeys(public_key(secret), "theirs"),
            "keys of its own and the right server": replace(ours, token="theirs"),
        }
        for its_keys in strangers.values():
            before = server.stats()["rejected"].get("stranger", 0)
            with closing(Connection(server.endpoint, "", its_keys, 10)) as connection:
                said: list[Message] = [Flush("x", 1, 0, "device", 0, b"".join(PATH), True), Gone("n", 1), Query(1, b"")]
                eventually(
                    lambda before=before: server.stats()["rejected"].get("stranger", 0) > before,
                    lambda connection=connection, said=said: connection.send(said),
                )
                assert list(connection.receive()) == []
        assert server.match(PATH) == {"n": (5, 5, 5)}
        assert server.stats()["queries"] == 0
    server.stop()


def test_a_client_with_keys_does_not_talk_to_a_server_without(server: StoreServer) -> None:
    with closing(Connection(server.endpoint, MODEL, ClientKeys(public_key(new_secret()), "ours"), 10)) as connection:
        eventually(lambda: server.stats()["rejected"].get("stranger"))
        assert not connection.send([Heartbeat("n", 1, -1, (0,) * 6)])
    assert server.stats()["nodes"] == {}
