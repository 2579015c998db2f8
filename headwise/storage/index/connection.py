"""A client's connection to the attention store: a DEALER socket that never waits and buffers nothing while offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ClientKeys, secure_client
from headwise.sockets.pieces import split
from headwise.storage.index.messages import Message
from headwise.storage.index.wire import MAX_MESSAGE_BYTES, PIECE_BYTES, ProtocolError, decode, encode

ALIVE_MS = 500
LOST_MS = 1500
"""A connection without any sign of the other side for so long is opened again."""


class Connection:
    """Sends to the store and receives from it. Owned by one thread.

    While the store is away, messages are dropped, not kept: they would be out of date when it is back.

    send_queue: messages that may wait to be sent; further ones are dropped
    dropped:    how many messages were dropped
    """

    def __init__(self, endpoint: str, namespace: str, keys: ClientKeys | None, send_queue: int) -> None:
        import zmq

        self.endpoint = endpoint
        self.dropped = 0
        self._namespace = namespace
        self._context = open_context()
        self.socket = self._context.socket(zmq.DEALER)
        secure_client(self.socket, keys)
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
        """Send all, as one message if they are short; False: dropped, because the queue was full or the store away."""
        import zmq

        frames = [encode(message, self._namespace) for message in messages]
        try:
            if sum(map(len, frames)) <= PIECE_BYTES:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
            else:
                for piece in (piece for frame in frames for piece in split(frame, PIECE_BYTES)):
                    self.socket.send(piece, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += len(messages)
            return False
        return True

    def receive(self) -> Iterator[Message]:
        """The messages that have arrived; malformed ones are left out."""
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
