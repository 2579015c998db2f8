"""A peer's connection to the attention store: one DEALER socket that never waits and keeps nothing for later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwise.sockets.context import close_context, open_context
from headwise.storage.index.encryption import CurveKeys, secure_client
from headwise.storage.index.messages import Message
from headwise.storage.index.wire import MAX_MESSAGE_BYTES, ProtocolError, decode, encode

ALIVE_MS = 500
LOST_MS = 1500
"""A connection over which the other side's machine answers nothing for so long is opened anew."""


class Connection:
    """Sends to the store and receives from it. Owned by one thread.

    While the store is away, messages are dropped, not kept: when it is back it has to be told what is true then.

    send_queue: messages that may wait to be sent; beyond, they are dropped
    dropped:    messages that were
    """

    def __init__(self, endpoint: str, namespace: str, curve: CurveKeys | None, send_queue: int) -> None:
        import zmq

        self.endpoint = endpoint
        self.dropped = 0
        self._namespace = namespace
        self._context = open_context()
        self.socket = self._context.socket(zmq.DEALER)
        if curve is not None:
            secure_client(self.socket, curve)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, send_queue),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.IMMEDIATE, 1),
            (zmq.HEARTBEAT_IVL, ALIVE_MS),
            (zmq.HEARTBEAT_TIMEOUT, LOST_MS),
            (zmq.CONNECT_TIMEOUT, LOST_MS),
        ):
            self.socket.setsockopt(option, value)
        self.socket.connect(endpoint)

    def send(self, messages: Sequence[Message]) -> bool:
        """Send all in one go; False: dropped, for lack of room or of a store."""
        import zmq

        try:
            self.socket.send_multipart([encode(message, self._namespace) for message in messages], zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += len(messages)
            return False
        return True

    def receive(self) -> Iterator[Message]:
        """What has arrived; malformed messages are left out."""
        import zmq

        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for frame in frames:
                try:
                    yield decode(frame, self._namespace)
                except ProtocolError:
                    continue

    def close(self) -> None:
        close_context(self._context)
