"""What the attention store does with messages and as time passes. Sockets and threads belong to the server."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from headwise.liveness_clock import LivenessClock
from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.messages import (
    Accepted,
    Emptied,
    Farewell,
    Flush,
    GetIndexStats,
    Gone,
    Heartbeat,
    IndexStats,
    Matches,
    Message,
    NodeMessage,
    Outdated,
    Query,
    Rejected,
    Snapshot,
    SnapshotRequest,
)
from headwise.storage.index.wire import MAX_FRAMES, ProtocolError, decode, encode

log = logging.getLogger(__name__)

ASK_INTERVAL_S = 0.5
"""A node that sends no snapshot is asked again after so long."""
COOL_S = 60.0
COOLING = 0.5 ** (1 / 10)
"""What was asked for ten minutes ago counts half as much as what is asked for now. Applied every `COOL_S`."""
LOG_INTERVAL_S = 10.0
"""At most one log line per interval for each kind of bad message."""

Identity = bytes
"""The sender or receiver of a message: ZeroMQ's name for a connection."""


class MessageHandler:
    """Handles and answers the peers' messages, asks nodes for snapshots, and drops silent nodes.

    send: sends bytes to a peer; False if they cannot be sent. Must not wait.
    """

    def __init__(
        self,
        store: AttentionStore,
        send: Callable[[Identity, bytes], bool],
        clock: Callable[[], float],
        *,
        namespace: str = "",
        node_timeout_s: float,
        max_message_bytes: int,
    ) -> None:
        self.store = store
        self._send_bytes = send
        self._clock = LivenessClock(clock)
        self._namespace = namespace
        self._node_timeout_s = node_timeout_s
        self._max_message_bytes = max_message_bytes
        self._peers: dict[str, Identity] = {}
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._rejected: Counter[str] = Counter()
        self._log_at: dict[str, float] = {}
        self._queries = 0
        self._cool_at = self._clock() + COOL_S
        self._volumes: dict[str, str] = {}  # each node's storage, as it was logged

    def take(self, identity: Identity, frames: Sequence[bytes]) -> None:
        """Handle a peer's frames, one message each. A bad message is counted, answered with `Rejected`, and dropped."""
        size = sum(map(len, frames))
        if size > self._max_message_bytes or not 0 < len(frames) <= MAX_FRAMES:
            reason = f"{len(frames)} frames with {size} bytes; allowed are 1 to {MAX_FRAMES} with at most "
            self._reject(identity, ProtocolError(f"{reason}{self._max_message_bytes} bytes", "oversized"))
            return
        for frame in frames:
            try:
                self._take(identity, decode(frame, self._namespace))
            except ProtocolError as error:
                self._reject(identity, error)

    def tick(self) -> None:
        """Do what is due; call it ten times a second or more often."""
        now = self._clock()
        if now >= self._cool_at:
            self._cool_at = now + COOL_S
            self.store.cool(COOLING)
        for node in [node for node, heard in self._heard.items() if now - heard > self._node_timeout_s]:
            if self.store.drop(node):
                log.warning("node %s said nothing for %g s: dropped from the index", node, self._node_timeout_s)
            self._forget(node)
        for node in self.store.wanting():
            if now - self._asked.get(node, now - ASK_INTERVAL_S) >= ASK_INTERVAL_S:
                self._asked[node] = now
                self._send(self._peers[node], SnapshotRequest(node))

    def stats(self) -> dict[str, Any]:
        """See `AttentionStore.stats`; and ``silent_s`` of each node, the number of queries, and of bad messages
        (``rejected``) by kind.
        """
        stats, now = self.store.stats(), self._clock()
        for name, node in stats["nodes"].items():
            node["silent_s"] = now - self._heard[name]
        return {**stats, "queries": self._queries, "rejected": dict(self._rejected)}

    def count(self, kind: str, text: str) -> None:
        """Count a bad message of this kind. Many of them make few log lines."""
        self._rejected[kind] += 1
        now = self._clock()
        if now >= self._log_at.get(kind, now):
            self._log_at[kind] = now + LOG_INTERVAL_S
            log.warning("kept out of the attention store (%s, %d so far): %s", kind, self._rejected[kind], text)

    def _take(self, identity: Identity, message: Message) -> None:
        if isinstance(message, Flush | Snapshot | Heartbeat):
            self._take_node_message(identity, message)
        elif isinstance(message, Query):
            self._queries += 1
            self._send(identity, Matches(message.key, self.store.match(message.block_hashes)))
        elif isinstance(message, GetIndexStats):
            self._send(identity, IndexStats(message.key, self.stats()))
        elif isinstance(message, Gone | Emptied):
            self.store.apply(message)
        elif isinstance(message, Farewell):
            self.store.apply(message)
            is_replaced = self.store.has(message.node)  # by a later epoch of that name
            if not is_replaced:
                self._forget(message.node)
            self._send(identity, Outdated(message.node, self.store.epoch(message.node), is_replaced))
        elif isinstance(message, Rejected):
            self.count("unexpected", f"a peer rejected what it was sent: {message.reason}")
        else:
            raise ProtocolError(f"{type(message).__name__} goes from the store, not to it", "unexpected")

    def _take_node_message(self, identity: Identity, message: NodeMessage) -> None:
        known = self.store.epoch(message.node)
        if self.store.apply(message):
            self._peers[message.node] = identity
            self._heard[message.node] = self._clock()
            if known != message.epoch:
                self._send(identity, Accepted(message.node, message.epoch))
            if isinstance(message, Heartbeat) and self._volumes.get(message.node, "") != message.volume:
                self._note_volume(message.node, message.volume)
        elif isinstance(message, Heartbeat):
            self._send(identity, Outdated(message.node, known, is_replaced=self.store.has(message.node)))

    def _forget(self, node: str) -> None:
        for known in (self._peers, self._heard, self._asked, self._volumes):
            known.pop(node, None)

    def _note_volume(self, node: str, volume: str) -> None:
        """A node has a new storage: log a warning if other nodes have a different one."""
        before, self._volumes[node] = self._volumes.get(node, ""), volume
        if before:
            now = "another directory" if volume else "not there"
            log.warning("the storage of node %s is %s now: is it mounted?", node, now)
        others = sorted(other for other, its in self._volumes.items() if its and its != volume)
        if volume and others:
            log.warning(
                "node %s has another storage than %s: what one stores is of use to the other only if both are given a "
                "directory that they share",
                node,
                ", ".join(others),
            )

    def _reject(self, identity: Identity, error: ProtocolError) -> None:
        self.count(error.kind, str(error))
        self._send(identity, Rejected(str(error)))

    def _send(self, identity: Identity, message: Message) -> None:
        if not self._send_bytes(identity, encode(message, self._namespace)):
            self.count("unanswered", f"a {type(message).__name__} could not be sent")
