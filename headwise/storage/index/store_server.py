"""The attention store behind a ZeroMQ socket, served by one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ServerKeys
from headwise.sockets.listener import Listener
from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.connection import ALIVE_MS, LOST_MS
from headwise.storage.index.message_handler import MessageHandler
from headwise.storage.index.prefix_index import MAX_BLOCKS
from headwise.storage.index.wire import MAX_FRAMES, MAX_MESSAGE_BYTES, PIECE_BYTES

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

_POLL_MS = 100
_BATCH = 256
"""Most messages handled before other work is done."""
_SEND_QUEUE = 1000
"""Messages to one peer that may wait."""


class StoreServer:
    """Serves an `AttentionStore` at ``endpoint`` (the one bound, where port 0 or ``*`` was asked for).

    A node that is silent for ``node_timeout_s`` is dropped. If it lives, its next heartbeat leads to a snapshot, which
    brings it back. A message that is malformed, too large, or of another version or namespace is counted by kind,
    answered with the reason and dropped. A peer without the deployment's keys is counted, and gets no answer.

    loop_count: iterations of the thread's loop; a count that stands still shows that the thread hangs

    Raises `zmq.ZMQError` if the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        namespace: str = "",
        max_blocks: int = MAX_BLOCKS,
        keys: ServerKeys | None = None,
        node_timeout_s: float = 10.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._empty_store = partial(AttentionStore, max_blocks)
        self._handler = MessageHandler(
            self._empty_store(),
            lambda identity, data: self._listener.send(identity, data),
            clock,
            namespace=namespace,
            node_timeout_s=node_timeout_s,
            max_message_bytes=max_message_bytes,
        )
        self.loop_count = 0
        self._lock = threading.Lock()
        self._open(endpoint, keys, max_message_bytes)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-store", daemon=True)

    def _open(self, endpoint: str, keys: ServerKeys | None, max_message_bytes: int) -> None:
        import zmq

        self._context = open_context()

        def prepare(socket: zmq.Socket[bytes]) -> None:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.HEARTBEAT_IVL, ALIVE_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LOST_MS)

        try:
            self._listener = Listener(
                self._context,
                endpoint,
                max_message_bytes=2 * max_message_bytes,  # up to there, the sender gets an answer
                max_frame_bytes=2 * PIECE_BYTES,
                max_frames=MAX_FRAMES,
                send_queue=_SEND_QUEUE,
                keys=keys,
                prepare=prepare,
            )
        except zmq.ZMQError:
            close_context(self._context)
            raise
        self.endpoint = self._listener.endpoint
        self._failed_handshakes = 0

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
            return self._handler.store.match(block_hashes)

    def worth(self, without: Collection[str] = ()) -> dict[str, float]:
        """See `PrefixIndex.worth`; callable from any thread."""
        with self._lock:
            return self._handler.store.worth(without)

    def sole_blocks(self, node: str, without: Collection[str], most: int) -> bytes:
        """See `AttentionStore.sole_blocks`; callable from any thread."""
        with self._lock:
            return self._handler.store.sole_blocks(node, without, most)

    def shares_storage(self, node: str, without: Collection[str]) -> bool:
        """See `PrefixIndex.shares_storage`; callable from any thread."""
        with self._lock:
            return self._handler.store.shares_storage(node, without)

    def worth_storing(self, node: str, without: Collection[str]) -> int:
        """See `headwise.storage.index.storable`; callable from any thread."""
        with self._lock:
            return self._handler.store.worth_storing(node, without)

    def allowances(self, node: str, takers: Collection[str], without: Collection[str]) -> dict[str, int]:
        """See `headwise.storage.index.allowances`; callable from any thread."""
        with self._lock:
            return self._handler.store.allowances(node, takers, without)

    def stats(self) -> dict[str, Any]:
        """See `MessageHandler.stats`; callable from any thread."""
        with self._lock:
            return self._handler.stats()

    @property
    def applied(self) -> int:
        """See `AttentionStore.applied`."""
        return self._handler.store.applied

    # ---- the loop ----

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        poller.register(self._listener.monitor, zmq.POLLIN)
        while not self._stopping.is_set():
            poller.poll(_POLL_MS)
            try:
                self._take_messages()
                self._count_failed_handshakes()
                with self._lock:
                    self._handler.tick()
            except Exception:
                log.exception("the attention store failed and starts anew, empty: the engines tell it all again")
                with self._lock:
                    self._handler.store = self._empty_store()
            self.loop_count += 1

    def _take_messages(self) -> None:
        for identity, frames in self._listener.receive(_BATCH):
            with self._lock:
                self._handler.take(identity, frames)
        self._listener.ended()

    def _count_failed_handshakes(self) -> None:
        while self._failed_handshakes < self._listener.failed_handshakes:
            self._failed_handshakes += 1
            with self._lock:
                self._handler.count("stranger", "a peer that lacks the deployment's keys, or speaks something else")

    def _close(self) -> None:
        self._listener.close()
        close_context(self._context)
