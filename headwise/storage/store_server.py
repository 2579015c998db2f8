"""The attention store behind a ZeroMQ socket: one thread that takes statements in and asks for snapshots."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from headwise.storage.attention_store import AttentionStore
from headwise.storage.base import SnapshotRequest
from headwise.storage.protocol import ProtocolError, decode, encode

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 << 20
ASK_INTERVAL_S = 1.0
_POLL_MS = 100


class StoreServer:
    """Serves an `AttentionStore` at ``endpoint`` (the one bound, where port 0 or ``*`` was asked for).

    A node that says nothing for ``node_timeout_s`` is dropped; if it only was slow, its next heartbeat brings it
    back by a snapshot. Malformed messages are counted and dropped.
    """

    def __init__(
        self, endpoint: str, node_timeout_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.bind(endpoint)
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._node_timeout_s = node_timeout_s
        self._clock = clock
        self._store = AttentionStore()
        self._lock = threading.Lock()
        self._peers: dict[str, bytes] = {}
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._malformed = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, dict[str, int]]:
        """See `AttentionStore.match`; callable from any thread."""
        with self._lock:
            return self._store.match(block_hashes)

    def stats(self) -> dict[str, Any]:
        """See `AttentionStore.stats`, and the count of malformed messages; callable from any thread."""
        with self._lock:
            return {**self._store.stats(), "malformed": self._malformed}

    def _run(self) -> None:
        import zmq

        while not self._stopping.is_set():
            if self._socket.poll(_POLL_MS):
                while True:
                    try:
                        frames = self._socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._take(frames)
            self._drop_silent()
            self._ask_for_snapshots()

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message must be one frame, got {len(frames) - 1}")
            statement = decode(frames[1])
            if isinstance(statement, SnapshotRequest):
                raise ProtocolError("only the store asks for snapshots")
        except ProtocolError as error:
            self._malformed += 1
            log.warning("dropped a message to the attention store: %s", error)
            return
        self._peers[statement.node] = frames[0]
        self._heard[statement.node] = self._clock()
        with self._lock:
            self._store.apply(statement)

    def _drop_silent(self) -> None:
        now = self._clock()
        for node in [node for node, heard in self._heard.items() if now - heard > self._node_timeout_s]:
            log.warning("node %s said nothing for %g s: dropped from the index", node, self._node_timeout_s)
            with self._lock:
                self._store.drop(node)
            for known in (self._peers, self._heard, self._asked):
                known.pop(node, None)

    def _ask_for_snapshots(self) -> None:
        import zmq

        now = self._clock()
        for node in self._store.wanting():
            if now - self._asked.get(node, -ASK_INTERVAL_S) < ASK_INTERVAL_S:
                continue
            self._asked[node] = now
            try:
                self._socket.send_multipart((self._peers[node], encode(SnapshotRequest(node))), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.warning("cannot ask node %s for a snapshot: %s", node, error)
