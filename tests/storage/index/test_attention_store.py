"""The attention store: absolute statements converge to the truth, whatever happens to the messages on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.index.truth import Held, Update, block, depths, kept, paths, truth

from headwise.storage.index import attention_store
from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.flusher import Ledger
from headwise.storage.index.messages import Gone, NodeMessage
from headwise.storage.index.wire import decode, encode

PATHS = paths(3, 8)
PATH = PATHS[0]


def holds(first: int, last: int, tier: str = "device", resident: bool = True, resumable: bytes = b"") -> Update:
    return Update(tier, first, tuple(PATH[first:last]), resident, resumable)


def tell(store: AttentionStore, node: Ledger, *updates: Update) -> None:
    for update in updates:
        for flush in node.flush(update):
            store.apply(flush)


def said(node: Ledger, update: Update) -> NodeMessage:
    """The one flush of an update, not applied yet."""
    (flush,) = node.flush(update)
    return flush


def agree(store: AttentionStore, node: Ledger) -> bool:
    return kept(store, [node.node]) == truth([node])


# ---- what is held ----


def test_match_gives_the_leading_blocks_of_every_node() -> None:
    store, a, b = AttentionStore(), Ledger("a", 1), Ledger("b", 1)
    tell(store, a, holds(0, 5))
    tell(store, b, holds(0, 2), holds(3, 8))
    assert store.match(PATH) == {"a": (5, 5, 5), "b": (2, 2, 2)}
    assert store.match([block(99)]) == {}
    assert store.match([]) == {}


def test_slower_tiers_go_on_where_faster_ones_end() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    tell(store, node, holds(0, 3), holds(2, 6, "host"), holds(7, 8, "storage"))
    assert store.match(PATH) == {"a": (3, 6, 6)}


def test_a_higher_epoch_drops_what_the_old_one_said_at_once() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    tell(store, node, *[holds(depth, depth + 1) for depth in range(5)])
    late = said(node, holds(5, 8))
    node.restart(2)
    store.apply(node.heartbeat())
    assert store.match(PATH) == {}
    store.apply(late)
    assert store.match(PATH) == {}
    tell(store, node, holds(0, 3))
    assert store.match(PATH) == {"a": (3, 3, 3)}
    assert store.wanting() == []


def test_what_a_node_that_is_gone_said_is_void_and_stays_so() -> None:
    store, node = AttentionStore(), Ledger("a", 5)
    tell(store, node, holds(0, 5))
    late = said(node, holds(5, 8))
    store.apply(Gone("a", 5))
    assert store.match(PATH) == {}
    for message in (late, node.heartbeat(), node.snapshot()):
        store.apply(message)
    assert store.match(PATH) == {}
    assert store.stats()["nodes"] == {}
    node.restart(6)
    tell(store, node, holds(0, 2))
    store.apply(Gone("a", 5))  # late
    assert store.match(PATH) == {"a": (2, 2, 2)}


def test_gone_nodes_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_store, "MAX_GONE", 2)
    store = AttentionStore()
    for name in "abc":
        store.apply(Gone(name, 1))
    for name in "abc":
        store.apply(Ledger(name, 1).heartbeat())
    assert set(store.stats()["nodes"]) == {"a"}


# ---- what the ledger says ----


def test_a_ledger_says_only_what_changes_and_flags_what_it_takes_back() -> None:
    node = Ledger("a", 1)
    first = said(node, holds(0, 4, resumable=b"\0\1\0\1"))
    assert (first.seq, first.block_hashes, first.resumable) == (0, b"".join(PATH[:4]), b"\0\1\0\1")
    assert node.flush(holds(0, 4, resumable=b"\0\1\0\1")) == []
    assert node.flush(holds(5, 8, resident=False)) == []
    grown = said(node, holds(2, 6, resumable=b"\0\1\1\1"))
    assert (grown.start_write_block_idx, grown.block_hashes, grown.resumable) == (4, b"".join(PATH[4:6]), b"")
    gone = said(node, holds(0, 3, resident=False))
    assert (gone.resident, gone.resumable) == (False, b"\0\1\0")


def test_a_change_of_resumability_alone_reaches_the_store() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    tell(store, node, holds(0, 6))
    tell(store, node, holds(3, 6, resumable=b"\0\0\0"))
    assert store.match(PATH) == {"a": (3, 3, 3)}
    store.apply(node.heartbeat())
    assert store.wanting() == []
    assert agree(store, node)


def test_an_update_that_names_a_block_twice_means_its_last_word() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    twice = Update("device", 0, (PATH[0], PATH[1], PATH[0]), True, b"\1\1\0")
    tell(store, node, twice)
    store.apply(node.heartbeat())
    assert store.wanting() == []
    assert agree(store, node)


# ---- what goes wrong ----


def test_a_gap_asks_for_a_snapshot_and_the_late_flush_closes_it() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    first, second = said(node, holds(0, 4)), said(node, holds(2, 4, resident=False))
    store.apply(second)
    assert store.wanting() == ["a"]
    store.apply(first)
    assert store.wanting() == []
    assert agree(store, node)


def test_a_lost_last_flush_is_noticed_by_the_heartbeat() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    tell(store, node, holds(0, 2))
    said(node, holds(2, 4))
    store.apply(node.heartbeat())
    assert store.wanting() == ["a"]
    store.apply(node.snapshot())
    assert store.wanting() == []
    assert agree(store, node)


@pytest.mark.parametrize("change", [{"block_hashes": b"".join(PATH[:3])}, {"resumable": b"\1\1\1\0"}])
def test_a_digest_that_differs_asks_for_a_snapshot(change: dict[str, bytes]) -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    store.apply(replace(said(node, holds(0, 4)), **change))
    store.apply(node.heartbeat())
    assert store.wanting() == ["a"]
    assert store.stats()["nodes"]["a"]["agrees"] is False
    store.apply(node.snapshot())
    assert agree(store, node)
    store.apply(node.heartbeat())
    assert store.wanting() == []
    assert store.stats()["nodes"]["a"]["agrees"] is True


def test_a_heartbeat_says_whose_storage_a_node_shares_until_it_starts_anew() -> None:
    store, (a, b) = AttentionStore(), (Ledger("a", 1), Ledger("b", 1))
    for ledger in (a, b):
        store.apply(ledger.heartbeat("shared"))
    for flush in a.flush(Update("storage", 0, tuple(PATH), True)):
        store.apply(flush)
    everything = {"a": (0, 0, len(PATH)), "b": (0, 0, len(PATH))}
    assert store.match(PATH) == everything
    store.apply(replace(b.snapshot(), seq=5))  # something was missed of it
    assert store.match(PATH) == everything
    b.restart(2)
    store.apply(b.snapshot())
    assert store.match(PATH) == {"a": (0, 0, len(PATH))}
    store.apply(b.heartbeat("shared"))
    assert store.match(PATH) == everything
    store.check_integrity()


def test_a_snapshot_takes_back_what_it_does_not_name() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    tell(store, node, holds(0, 4), holds(0, 6, "host"))
    said(node, holds(1, 3, resident=False))  # is lost
    said(node, holds(0, 6, "host", resident=False))
    store.apply(node.snapshot())
    assert agree(store, node)
    assert store.match(PATH) == {"a": (1, 1, 1)}


def test_an_old_snapshot_does_not_undo_later_flushes() -> None:
    store, node = AttentionStore(), Ledger("a", 1)
    tell(store, node, holds(0, 4))
    old = node.snapshot()
    tell(store, node, holds(2, 4, resident=False))
    store.apply(old)
    assert agree(store, node)


def test_flushes_kept_during_a_gap_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_store, "MAX_AHEAD", 2)
    store, node = AttentionStore(), Ledger("a", 1)
    said(node, holds(0, 1))
    for depth in range(1, 6):
        tell(store, node, holds(depth, depth + 1))
    store.apply(node.snapshot())
    assert store.wanting() == []
    assert agree(store, node)


def test_a_store_that_is_too_small_for_all_still_agrees_with_its_nodes() -> None:
    store, a, b = AttentionStore(max_blocks=6), Ledger("a", 1), Ledger("b", 1)
    tell(store, a, holds(0, 5, resumable=b"\0\1\0\1\0"))
    tell(store, b, Update("host", 0, tuple(map(block, range(900, 904))), True))
    tell(store, a, holds(4, 5, resident=False), holds(2, 4))
    for node in (a, b):
        store.apply(node.heartbeat())
    assert store.wanting() == []
    stats = store.stats()
    assert stats["distinct_blocks"] == 6
    assert stats["forgotten_blocks"] > 0


# ---- any history over a network that loses, doubles, delays and reorders ----

NODES = "ab"


class Network(RuleBasedStateMachine):
    """Nodes, a store, and messages in flight between them, in no order. After every step the store says of each node
    what was true of it after the last flush that the store has applied; at rest that is the truth.
    """

    room = 10_000

    @initialize()
    def start(self) -> None:
        self.store = AttentionStore(self.room)
        self.ledgers = {name: Ledger(name, 1) for name in NODES}
        self.flying: list[bytes] = []
        self.history: dict[tuple[str, int, int], Held] = {}

    def send(self, *statements: NodeMessage) -> None:
        self.flying += map(encode, statements)
        for ledger in self.ledgers.values():
            self.history[ledger.node, ledger.epoch, ledger.seq] = truth([ledger])

    @rule(
        node=st.sampled_from(NODES),
        path=st.sampled_from(PATHS),
        tier=st.sampled_from(("device", "device", "host", "storage")),
        first=st.sampled_from((0, 0, 2, 4, 7)),
        count=st.integers(1, 8),
        resident=st.booleans(),
        flags=st.integers(0, 255),
    )
    def update(
        self, node: str, path: list[bytes], tier: str, first: int, count: int, resident: bool, flags: int
    ) -> None:
        part = tuple(path[first : first + count])
        resumable = bytes(flags >> index & 1 for index in range(len(part)))
        self.send(*self.ledgers[node].flush(Update(tier, first, part, resident, resumable)))

    @rule(node=st.sampled_from(NODES), what=st.sampled_from(["heartbeat", "heartbeat", "snapshot"]))
    def say(self, node: str, what: str) -> None:
        self.send(getattr(self.ledgers[node], what)())

    @rule(node=st.sampled_from(NODES))
    def restart_node(self, node: str) -> None:
        self.ledgers[node].restart(self.ledgers[node].epoch + 1)

    @rule(node=st.sampled_from(NODES))
    def kill_and_restart_node(self, node: str) -> None:
        self.store.apply(Gone(node, self.ledgers[node].epoch))
        self.restart_node(node)

    @rule(node=st.sampled_from(NODES))
    def find_node_silent(self, node: str) -> None:
        self.store.drop(node)

    @rule()
    def restart_store(self) -> None:
        self.store = AttentionStore(self.room)

    @rule()
    def answer_the_store(self) -> None:
        self.send(*(self.ledgers[node].snapshot() for node in self.store.wanting()))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), doubled=st.booleans())
    def deliver(self, data: st.DataObject, doubled: bool) -> None:
        at = data.draw(st.integers(0, len(self.flying) - 1))
        message = decode(self.flying[at] if doubled else self.flying.pop(at))
        self.store.apply(message)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))

    @rule()
    def deliver_all_in_order(self) -> None:
        for data in self.flying:
            self.store.apply(decode(data))
        self.flying.clear()

    @rule()
    def come_to_rest(self) -> None:
        """What is in flight arrives late or never; a heartbeat arrives, and a snapshot where it is asked for."""
        self.flying.clear()
        for _ in range(2):
            for ledger in self.ledgers.values():
                self.store.apply(ledger.heartbeat())
            for node in self.store.wanting():
                self.store.apply(self.ledgers[node].snapshot())
        assert self.store.wanting() == []
        held = kept(self.store, NODES)
        if self.store.stats()["forgotten_blocks"]:
            for node, tiers in truth(self.ledgers.values()).items():
                for tier, blocks in tiers.items():
                    assert held[node][tier].items() <= blocks.items()
        else:
            assert held == truth(self.ledgers.values())

    @invariant()
    def is_sound(self) -> None:
        self.store.check_integrity()
        assert self.store.stats()["distinct_blocks"] <= self.room

    @invariant()
    def says_what_was_true_once(self) -> None:
        for name, node in self.store.stats()["nodes"].items():
            was = self.history.get((name, node["epoch"], node["next_seq"] - 1))
            if was is None:  # between two flushes of one update, or before the first
                continue
            held = kept(self.store, [name])
            if node["forgotten"]:
                for tier, blocks in held[name].items():
                    assert blocks.items() <= was[name][tier].items()
            else:
                assert held == was

    @invariant()
    def matches_what_it_keeps(self) -> None:
        held = kept(self.store, NODES)
        for path in PATHS:
            assert self.store.match(path) == depths(held, path)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.come_to_rest()


class CrowdedNetwork(Network):
    """The same with a store that has room for less than the nodes hold."""

    room = 9


for machine in (Network, CrowdedNetwork):
    machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestNetwork = Network.TestCase
TestCrowdedNetwork = CrowdedNetwork.TestCase
