"""The attention store behind a ZeroMQ socket: one thread that takes statements in, asks for snapshots and answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headwise.storage.attention_store import AttentionStore
from headwise.storage.connection import ALIVE_MS, LOST_MS
from headwise.storage.curve import CurveKeys, Doorkeeper, secure_server
from headwise.storage.prefix_index import MAX_BLOCKS
from headwise.storage.protocol import MAX_MESSAGE_BYTES
from headwise.storage.store_desk import Identity, StoreDesk
from headwise.storage.zmq_context import close_context, open_context

log = logging.getLogger(__name__)

_POLL_MS = 100
_BATCH = 256
"""Messages taken in before other things get their turn."""


class StoreServer:
    """Serves an `AttentionStore` at ``endpoint`` (the one bound, where port 0 or ``*`` was asked for).

    A node that says nothing for ``node_timeout_s`` is dropped; if it only was slow, its next heartbeat brings it
    back by a snapshot. What is malformed, too large, of another version or namespace, or sent by somebody without
    the deployment's keys, is counted by kind, answered with the reason (strangers get none) and dropped.

    ``turns`` counts up for as long as the server's thread gets on.

    Raises `zmq.ZMQError` if the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        namespace: str = "",
        max_blocks: int = MAX_BLOCKS,
        curve: CurveKeys | None = None,
        node_timeout_s: float = 10.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._empty_store = partial(AttentionStore, max_blocks)
        self._desk = StoreDesk(
            self._empty_store(),
            self._send,
            clock,
            namespace=namespace,
            node_timeout_s=node_timeout_s,
            max_message_bytes=max_message_bytes,
        )
        self.turns = 0
        self._lock = threading.Lock()
        self._open(endpoint, curve, max_message_bytes)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-store", daemon=True)

    def _open(self, endpoint: str, curve: CurveKeys | None, max_message_bytes: int) -> None:
        import zmq

        self._context = open_context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, 2 * max_message_bytes),  # up to there, the sender gets an answer
            (zmq.HEARTBEAT_IVL, ALIVE_MS),
            (zmq.HEARTBEAT_TIMEOUT, LOST_MS),
        ):
            self._socket.setsockopt(option, value)
        self._doorkeeper = Doorkeeper(self._context, curve) if curve else None
        if curve is not None:
            secure_server(self._socket, curve)
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._failed_handshakes = self._socket.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._close()
            raise
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._close()

    def match(self, block_hashes: bytes | Sequence[bytes]) -> dict[str, tuple[int, int, int]]:
        """See `PrefixIndex.match`; callable from any thread."""
        with self._lock:
            return self._desk.store.match(block_hashes)

    def stats(self) -> dict[str, Any]:
        """See `StoreDesk.stats`; callable from any thread."""
        with self._lock:
            return self._desk.stats()

    @property
    def applied(self) -> int:
        """See `AttentionStore.applied`."""
        return self._desk.store.applied

    # ---- the loop ----

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._failed_handshakes, zmq.POLLIN)
        if self._doorkeeper is not None:
            poller.register(self._doorkeeper.socket, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(_POLL_MS))
            try:
                if self._socket in ready:
                    self._take_messages()
                if self._doorkeeper is not None:
                    self._doorkeeper.answer()
                if self._failed_handshakes in ready:
                    self._count_strangers()
                with self._lock:
                    self._desk.turn()
            except Exception:
                log.exception("the attention store failed and starts anew, empty: the engines tell it all again")
                with self._lock:
                    self._desk.store = self._empty_store()
            self.turns += 1

    def _take_messages(self) -> None:
        import zmq

        receive, no_wait = self._socket.recv, int(zmq.NOBLOCK)
        for _ in range(_BATCH):
            try:
                identity = receive(no_wait)
            except zmq.Again:
                return
            # As `recv_multipart`, in half its time: asking a frame whether it is the last is faster than the socket.
            frames, more = [], True
            while more:
                frame = receive(no_wait, copy=False)
                frames.append(frame.bytes)
                more = frame.more
            with self._lock:
                self._desk.take(identity, frames)

    def _count_strangers(self) -> None:
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        while self._failed_handshakes.poll(0, zmq.POLLIN):
            recv_monitor_message(self._failed_handshakes)
            with self._lock:
                self._desk.count("stranger", "a peer that lacks the deployment's keys, or speaks something else")

    def _send(self, identity: Identity, data: bytes) -> bool:
        import zmq

        try:
            self._socket.send_multipart((identity, data), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _close(self) -> None:
        self._socket.disable_monitor()
        close_context(self._context)
