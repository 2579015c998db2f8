"""The attention store: absolute statements converge to the truth, whatever happens to the messages on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.storage import attention_store
from headwise.storage.attention_store import AttentionStore
from headwise.storage.base import TIERS, Flush, Heartbeat, Message, Snapshot, SnapshotRequest, Statement
from headwise.storage.flusher import Flusher, Ledger
from headwise.storage.protocol import ProtocolError, decode, encode
from headwise.storage.store_server import StoreServer


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


PATH = [block(i + 1) for i in range(8)]


@dataclass(frozen=True)
class Update:
    tier: str
    start_block: int
    block_hashes: tuple[bytes, ...]
    resident: bool


def holds(first: int, last: int, tier: str = "device", resident: bool = True) -> Update:
    return Update(tier, first, tuple(PATH[first:last]), resident)


def agree(store: AttentionStore, ledger: Ledger) -> bool:
    return all(store.resident(ledger.node, tier) == ledger.blocks[tier] for tier in TIERS)


# ---- what is held ----


def test_match_gives_the_leading_blocks_of_every_node() -> None:
    store, a, b = AttentionStore(), Ledger("a", 1), Ledger("b", 1)
    store.apply(a.flush(holds(0, 5)))
    store.apply(b.flush(holds(0, 2)))
    store.apply(b.flush(holds(3, 8)))
    found = store.match(PATH)
    assert {node: tiers["device"] for node, tiers in found.items()} == {"a": 5, "b": 2}
    assert store.match([block(99)]) == {}
    assert store.match([]) == {}


def test_slower_tiers_go_on_where_faster_ones_end() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    for update in (holds(0, 3), holds(2, 6, "host"), holds(7, 8, "storage")):
        store.apply(node.flush(update))
    assert store.match(PATH) == {"a": {"device": 3, "host": 6, "storage": 6}}


def test_a_removed_middle_block_hides_what_is_behind_it_only_until_it_is_back() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    store.apply(node.flush(holds(0, 8)))
    store.apply(node.flush(holds(3, 4, resident=False)))
    assert store.match(PATH)["a"]["device"] == 3
    store.apply(node.flush(holds(3, 4)))
    assert store.match(PATH)["a"]["device"] == 8


def test_a_block_whose_parents_were_never_named_counts_once_they_are() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    store.apply(node.flush(holds(2, 5)))
    assert store.match(PATH) == {}
    store.apply(node.flush(holds(0, 2)))
    assert store.match(PATH)["a"]["device"] == 5


def test_a_higher_epoch_drops_what_the_old_one_said_at_once() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    for _ in range(5):
        store.apply(node.flush(holds(0, 8)))
    late = node.flush(holds(0, 8))
    node.restart(2)
    store.apply(node.heartbeat())
    assert store.match(PATH) == {}
    store.apply(late)
    assert store.match(PATH) == {}
    store.apply(node.flush(holds(0, 3)))
    assert store.match(PATH)["a"]["device"] == 3
    assert store.wanting() == []


def test_a_dropped_node_leaves_nothing_behind_and_its_bit_is_reused() -> None:
    store = AttentionStore()
    for name in ("a", "b"):
        store.apply(Ledger(name, 1).flush(holds(0, 4)))
    store.drop("a")
    store.apply(Ledger("c", 1).flush(holds(0, 2)))
    store.check_integrity()
    assert {node: tiers["device"] for node, tiers in store.match(PATH).items()} == {"b": 4, "c": 2}
    for name in ("b", "c"):
        store.drop(name)
    assert store.stats()["distinct_blocks"] == 0


# ---- what goes wrong ----


def test_a_gap_asks_for_a_snapshot_and_the_late_flush_closes_it() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    first, second = node.flush(holds(0, 4)), node.flush(holds(2, 4, resident=False))
    store.apply(second)
    assert store.wanting() == ["a"]
    store.apply(first)
    assert store.wanting() == []
    assert agree(store, node)


def test_a_lost_last_flush_is_noticed_by_the_heartbeat() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    store.apply(node.flush(holds(0, 2)))
    node.flush(holds(2, 4))
    store.apply(node.heartbeat())
    assert store.wanting() == ["a"]
    store.apply(node.snapshot())
    assert store.wanting() == []
    assert agree(store, node)


def test_a_digest_that_differs_asks_for_a_snapshot() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    store.apply(replace(node.flush(holds(0, 4)), block_hashes=tuple(PATH[:3])))
    store.apply(node.heartbeat())
    assert store.wanting() == ["a"]
    store.apply(node.snapshot())
    assert agree(store, node)
    store.apply(node.heartbeat())
    assert store.wanting() == []


def test_an_old_snapshot_does_not_undo_later_flushes() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    store.apply(node.flush(holds(0, 4)))
    old = node.snapshot()
    store.apply(node.flush(holds(2, 4, resident=False)))
    store.apply(old)
    assert agree(store, node)


def test_flushes_kept_during_a_gap_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_store, "MAX_AHEAD", 2)
    store, node = AttentionStore(), Ledger("a", 1)
    node.flush(holds(0, 1))
    for depth in range(1, 6):
        store.apply(node.flush(holds(depth, depth + 1)))
    store.apply(node.snapshot())
    assert store.wanting() == []
    assert agree(store, node)


UPDATES = st.builds(
    lambda tier, first, count, resident: holds(first, first + count, tier, resident),
    st.sampled_from(TIERS),
    st.integers(0, 7),
    st.integers(1, 4),
    st.booleans(),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("ab"), UPDATES),
        st.tuples(st.sampled_from("ab"), st.sampled_from(["heartbeat", "snapshot", "restart", "forget"])),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, data=st.data())
def test_lost_doubled_and_reordered_messages_converge_to_the_truth(steps: list[tuple[str, object]], data) -> None:  # type: ignore[no-untyped-def]
    store, nodes, sent = AttentionStore(), {name: Ledger(name, 1) for name in "ab"}, []
    for name, what in steps:
        node = nodes[name]
        if isinstance(what, Update):
            sent.append(node.flush(what))
        elif what == "restart":
            node.restart(node.epoch + 1)
            sent.append(node.heartbeat())
        elif what == "forget":
            sent.append("forget")  # the store restarts here
        else:
            sent.append(getattr(node, what)())
    order = data.draw(st.lists(st.sampled_from(range(len(sent))), max_size=60)) if sent else []
    for index in order:
        if sent[index] == "forget":
            store = AttentionStore()
        else:
            store.apply(sent[index])
        store.check_integrity()

    for node in nodes.values():  # at rest: one heartbeat arrives, and one snapshot if it is asked for
        store.apply(node.heartbeat())
    for name in store.wanting():
        store.apply(nodes[name].snapshot())
    store.check_integrity()
    assert store.wanting() == []
    assert all(agree(store, node) for node in nodes.values())


# ---- bytes ----

MESSAGES: list[Message] = [
    Flush("n/1", 2**60, 3, "host", 5, (block(1), block(2)), False),
    Snapshot("n", 1, -1, {}),
    Snapshot("n", 1, 7, {"device": frozenset({block(1), block(9)}), "storage": frozenset()}),
    Heartbeat("n", 1, 4, {"device": 2**127 + 1}),
    SnapshotRequest("n"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Flush("", 1, 0, "device", 0, (), True), "node must be a name"),
        (Flush("n", 1, -1, "device", 0, (), True), "at least 0, got -1"),
        (Flush("n", 1, 0, "disk", 0, (), True), "tier must be one of device, host, storage, got 'disk'"),
        (Flush("n", 1, 0, "device", 0, (b"short",), True), "16-byte hashes"),
        (Flush("n", 1, 0, "device", 0, (), 1), "resident must be true or false"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_field_is_named(message: Message, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(encode(message))


@given(st.binary(max_size=200))
def test_random_bytes_raise_one_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


# ---- sockets ----


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("tcp://127.0.0.1:*", node_timeout_s=30.0)
    server.start()
    yield server
    server.stop()


def eventually(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not come true within 10 s"
        meanwhile()
        time.sleep(0.01)


def device_blocks(server: StoreServer) -> int:
    return server.match(PATH).get("n", {}).get("device", 0)


def test_flushes_reach_the_store(server: StoreServer) -> None:
    flusher = Flusher("n", 1, server.endpoint)
    flusher.flush([holds(0, 3), holds(3, 6)])
    eventually(lambda: device_blocks(server) == 6, flusher.service)
    flusher.restart(2)
    eventually(lambda: device_blocks(server) == 0, flusher.service)
    flusher.close()


def test_malformed_messages_are_counted_and_change_nothing(server: StoreServer) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.endpoint)
        for frames in ([b"\xff"], [b""], [b"a", b"b"], [encode(SnapshotRequest("n"))]):
            socket.send_multipart(frames)
        eventually(lambda: server.stats()["malformed"] == 4)
    flusher = Flusher("n", 1, server.endpoint)
    flusher.flush([holds(0, 3)])
    eventually(lambda: device_blocks(server) == 3, flusher.service)
    flusher.close()


def test_a_store_that_restarts_elsewhere_learns_all_again(server: StoreServer) -> None:
    flusher = Flusher("n", 1, server.endpoint)
    flusher.flush([holds(0, 5)])
    eventually(lambda: device_blocks(server) == 5, flusher.service)
    again = StoreServer("tcp://127.0.0.1:*")
    again.start()
    flusher.reconnect(again.endpoint)
    eventually(lambda: device_blocks(again) == 5, flusher.service)
    again.stop()
    flusher.close()


def test_what_was_said_while_the_store_was_unreachable_is_made_good(server: StoreServer) -> None:
    flusher = Flusher("n", 1, "tcp://127.0.0.1:9")  # the discard port: nobody there
    for _ in range(3000):  # more than the socket's queue holds
        flusher.flush([holds(0, 4), holds(2, 4, resident=False)])
    flusher.flush([holds(2, 8)])
    flusher.reconnect(server.endpoint)
    eventually(lambda: device_blocks(server) == 8, flusher.service)
    flusher.close()


def test_a_silent_node_is_dropped() -> None:
    server = StoreServer("tcp://127.0.0.1:*", node_timeout_s=0.3)
    server.start()
    flusher = Flusher("n", 1, server.endpoint)
    flusher.flush([holds(0, 3)])
    eventually(lambda: device_blocks(server) == 3)
    eventually(lambda: server.stats()["nodes"] == {})
    flusher.close()
    server.stop()


def test_statement_is_what_a_ledger_makes() -> None:
    made: list[Statement] = [(ledger := Ledger("n", 4)).flush(holds(0, 2)), ledger.snapshot(), ledger.heartbeat()]
    assert [(s.node, s.epoch, s.seq) for s in made] == [("n", 4, 0)] * 3
