"""A node that leaves takes its device and host along; what it stored where others reach it stays known."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.index.truth import Update, block
from support.waiting import PATIENCE_S, eventually

from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.flusher import Flusher
from headwise.storage.index.message_handler import MessageHandler
from headwise.storage.index.messages import Emptied, Farewell, Flush, Heartbeat, Message, Outdated
from headwise.storage.index.prefix_index import MAX_HEIRS, PrefixIndex
from headwise.storage.index.store_server import StoreServer
from headwise.storage.index.wire import decode, encode

PATH = [block(number) for number in range(1, 9)]
RUN = b"".join(PATH)


def index_of(*volumes: str, tier: str = "storage") -> PrefixIndex:
    """Nodes a, b, ... of these volumes; the first has the path on a tier."""
    index = PrefixIndex()
    for name, volume in zip("abcdef", volumes, strict=False):
        index.set_volume(name, volume)
    index.apply("a", tier, RUN, True)
    return index


def leave(index: PrefixIndex, node: str) -> None:
    index.bequeath(node)
    index.drop(node)
    index.check_integrity()


def test_what_it_stored_serves_the_other_nodes_of_its_volume_and_those_that_come() -> None:
    index = index_of("files", "files", "other")
    leave(index, "a")
    assert index.match(RUN) == {"b": (0, 0, 8)}
    leave(index, "b")
    assert index.match(RUN) == {}
    assert len(index) == 8
    index.set_volume("d", "files")
    assert index.match(RUN) == {"d": (0, 0, 8)}
    index.check_integrity()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_it_had_in_memory_is_gone(tier: str) -> None:
    index = index_of("files", "files", tier=tier)
    leave(index, "a")
    assert index.match(RUN) == {}
    assert not len(index)


def test_what_it_stored_where_nobody_else_reaches_is_gone() -> None:
    index = index_of("", "")
    leave(index, "a")
    assert not len(index)


def test_a_node_that_is_dropped_without_a_word_leaves_nothing() -> None:
    index = index_of("files", "files")
    index.drop("a")
    assert index.match(RUN) == {}


def test_what_another_node_finds_missing_is_there_for_nobody() -> None:
    index = index_of("files", "files")
    leave(index, "a")
    half = RUN[: len(RUN) // 2]
    index.apply("b", "storage", half, True)
    index.apply("b", "storage", half, False)
    index.check_integrity()
    assert index.match(RUN) == {}
    assert len(index) == 4


def test_two_that_leave_bequeath_what_either_had_and_where_either_could_resume() -> None:
    index = index_of("files", "files", "files")
    index.apply("b", "storage", RUN, True, b"\1" * 4 + b"\0" * 4)
    leave(index, "b")
    assert index.match(RUN) == {"a": (0, 0, 8), "c": (0, 0, 8)}
    index.apply("a", "storage", RUN[-16:], False)
    leave(index, "a")
    assert index.match(RUN) == {"c": (0, 0, 7)}


def test_what_was_bequeathed_is_no_node_s_alone_if_two_can_read_it_and_may_be_forgotten() -> None:
    index = index_of("files", "files")
    index.max_blocks = 8
    leave(index, "a")
    index.apply("b", "device", RUN, True)
    assert index.worth() == {"b": len(PATH)}, "it may lie on a disk that goes with b"
    index.set_volume("c", "files")
    assert index.worth() == {"b": 0.0, "c": 0.0}
    index.drop("c")
    index.apply("b", "device", RUN, False)
    index.apply("b", "device", b"".join(block(n) for n in range(100, 106)), True)
    index.check_integrity()
    assert index.match(RUN) == {"b": (0, 0, 2)}


def test_volumes_that_nobody_comes_back_to_are_forgotten() -> None:
    index = PrefixIndex()
    for number in range(MAX_HEIRS + 5):
        index.set_volume("n", f"v{number}")
        index.apply("n", "storage", block(number), True)
        leave(index, "n")
    assert len(index) == MAX_HEIRS


def test_a_farewell_voids_its_epoch_and_not_a_later_one() -> None:
    store = AttentionStore()
    store.apply(Heartbeat("a", 5, -1, (0,) * 6, "files"))
    store.apply(Heartbeat("b", 1, -1, (0,) * 6, "files"))
    store.apply(Flush("a", 5, 0, "storage", 0, RUN, True))
    store.apply(Farewell("a", 4))
    assert store.has("a")
    store.apply(Farewell("a", 5))
    store.apply(Farewell("a", 5))
    assert not store.has("a")
    assert store.match(RUN) == {"b": (0, 0, 8)}
    assert not store.apply(Flush("a", 5, 1, "device", 0, RUN, True)), "it comes late"
    assert store.apply(Flush("a", 6, 0, "device", 0, RUN, True))
    store.check_integrity()


def test_a_farewell_that_comes_after_its_successor_disturbs_nobody() -> None:
    sent: list[Message] = []

    def send(identity: bytes, data: bytes) -> bool:
        sent.append(decode(data))
        return True

    now = [1000.0]
    handler = MessageHandler(AttentionStore(), send, lambda: now[0], node_timeout_s=10.0, max_message_bytes=1 << 20)
    for epoch in (1, 2):
        handler.take(b"peer", [encode(Flush("n", epoch, 0, "device", 0, RUN, True))])
    handler.take(b"late", [encode(Farewell("n", 1))])
    assert sent[-1] == Outdated("n", 2, is_replaced=True)
    assert handler.stats()["nodes"]["n"]["silent_s"] == 0.0
    assert handler.store.match(RUN) == {"n": (8, 8, 8)}
    handler.take(b"peer", [encode(Farewell("n", 2))])
    assert sent[-1] == Outdated("n", 2, is_replaced=False)
    handler.tick()
    assert handler.stats()["nodes"] == {}


def test_a_flusher_waits_until_its_farewell_was_heard_and_no_longer() -> None:
    server = StoreServer("tcp://127.0.0.1:*", "model")
    server.start()
    with closing(Flusher("n", 1, server.endpoint, "model")) as flusher:
        flusher.flush([Update("device", 0, tuple(PATH), True)])

        def is_known() -> bool:
            flusher.service()
            return server.match(PATH) == {"n": (8, 8, 8)}

        eventually(is_known)
        assert flusher.leave(timeout_s=60.0)
        assert server.match(PATH) == {}
        assert server.stats()["nodes"] == {}
        server.stop()
        assert not flusher.leave(timeout_s=0.1)


def test_a_storage_that_was_emptied_has_nothing_of_nodes_that_left_either() -> None:
    store = AttentionStore()
    for node, volume in (("a", "files"), ("b", "files"), ("c", "others"), ("d", "others")):
        store.apply(Heartbeat(node, 1, -1, (0,) * 6, volume))
    for node in ("a", "c"):
        store.apply(Flush(node, 1, 0, "storage", 0, RUN, True))
        store.apply(Farewell(node, 1))
    assert store.match(RUN) == {"b": (0, 0, 8), "d": (0, 0, 8)}
    store.apply(Emptied("b", 0))
    store.apply(Emptied("unknown", 1))
    assert store.match(RUN) == {"b": (0, 0, 8), "d": (0, 0, 8)}, "an epoch that is over, and nobody"
    store.apply(Emptied("b", 1))
    store.apply(Emptied("b", 1))
    assert store.match(RUN) == {"d": (0, 0, 8)}
    store.check_integrity()


def test_a_flusher_tells_that_its_storage_was_emptied() -> None:
    server = StoreServer("tcp://127.0.0.1:*", "model")
    server.start()
    flushers = [Flusher(name, 1, server.endpoint, "model", volume=lambda: "files") for name in ("a", "b")]
    first, second = flushers
    try:
        first.flush([Update("storage", 0, tuple(PATH), True)])

        def serve() -> bool:
            for flusher in flushers:
                flusher.service()
            return server.match(PATH) == {"a": (0, 0, 8), "b": (0, 0, 8)}

        eventually(serve)
        assert first.leave(PATIENCE_S)
        assert server.match(PATH) == {"b": (0, 0, 8)}
        second.emptied()
        eventually(lambda: server.match(PATH) == {})
    finally:
        for flusher in flushers:
            flusher.close()
        server.stop()
