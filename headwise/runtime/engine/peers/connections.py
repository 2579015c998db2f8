"""The engine's connections to other engines' ports: one to each that is asked, closed when it is idle or gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headwise.runtime.engine.peers.base import Answer, Ask, LeaseAnswer
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.lease_messages import Leased, LeaseEnded, LeaseWants, Taken
from headwise.runtime.protocol.messages import MAX_MESSAGE_BYTES, Directory
from headwise.sockets.pieces import PIECE_BYTES, split

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""A connection over which nothing was asked for so long is closed."""
MAX_CONNECTIONS = 256
"""Most connections; the one that was idle for longest is closed for another."""
MAX_UNSENT = 64 + MAX_MESSAGE_BYTES // PIECE_BYTES
"""Messages, or pieces of one, that wait for an engine that does not take them: the longest one fits. Further ones are
lost, and said again if they matter."""
MAX_ANSWERS = 256
"""Most answers taken in at once."""


@dataclass
class _Connection:
    socket: zmq.Socket[bytes]
    address: str
    used: float


class PeerConnections:
    """The `Peers` of an engine in a deployment. Used by the server's thread alone.

    directory: the engines that there are, as the scheduler has told
    engine:    this one's name
    answer:    sends an answer to who has asked
    prepare:   sets further options of a socket before it is connected
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        engine: str,
        secret: str,
        *,
        directory: Callable[[], Directory],
        answer: Callable[[bytes, Answer], None],
        clock: Callable[[], float],
        prepare: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
    ) -> None:
        self._context, self._engine, self._secret = context, engine, secret
        self._directory, self._answer, self._clock, self._prepare = directory, answer, clock, prepare
        self._connections: dict[str, _Connection] = {}  # by name
        self._of_leases: list[LeaseAnswer] = []
        self._of_offers: list[Taken] = []

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What becomes readable when there is an answer."""
        return [connection.socket for connection in self._connections.values()]

    def knows(self, engine: str, epoch: int) -> bool:
        return self.epoch_of(engine) == epoch

    def epoch_of(self, engine: str) -> int | None:
        known = self._directory().engines.get(engine)
        return None if known is None or engine == self._engine else known[0]

    def tp_size(self, engine: str) -> int:
        return self._directory().engines[engine][2]

    def send(self, engine: str, message: Ask) -> None:
        import zmq

        connection = self._connected(engine)
        if connection is None:
            return
        connection.used = self._clock()
        try:
            for piece in split(wire.encode(replace(message, secret=self._secret))):
                connection.socket.send(piece, zmq.NOBLOCK)
        except zmq.Again:
            log.debug("%s takes no messages", engine)

    def answer(self, reader: bytes, message: Answer) -> None:
        self._answer(reader, message)

    def receive(self) -> list[LeaseAnswer]:
        self._read()
        answers, self._of_leases = self._of_leases, []
        return answers

    def taken(self) -> list[Taken]:
        self._read()
        answers, self._of_offers = self._of_offers, []
        return answers

    def _read(self) -> None:
        """Take in what has come, for whoever asks next."""
        import zmq

        for engine, connection in self._connections.items():
            for _ in range(MAX_ANSWERS):
                try:
                    frames = connection.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    answer = wire.decode(frames[0], Leased, LeaseEnded, LeaseWants, Taken)
                except wire.WireError as error:
                    log.warning("%s at %s answers what is none: %s", engine, connection.address, error)
                    continue
                if isinstance(answer, Taken):
                    self._of_offers.append(answer)
                else:
                    self._of_leases.append(answer)

    def service(self) -> None:
        """Close what is not needed any more."""
        now = self._clock()
        for engine, connection in list(self._connections.items()):
            if now - connection.used > IDLE_S:
                self._close(engine)

    def _connected(self, engine: str) -> _Connection | None:
        """The connection to an engine, made where there is none; None: the engine is no more."""
        import zmq

        known = self._directory().engines.get(engine)
        connection = self._connections.get(engine)
        if connection is not None and (known is None or connection.address != known[1]):
            self._close(engine)
            connection = None
        if connection is not None or known is None:
            return connection
        if len(self._connections) >= MAX_CONNECTIONS:
            self._close(min(self._connections, key=lambda name: self._connections[name].used))
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        socket.setsockopt(zmq.RCVHWM, MAX_ANSWERS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._prepare(socket)
        try:
            socket.connect(known[1])
        except zmq.ZMQError as error:
            log.warning("%s cannot be reached at %r: %s", engine, known[1], error)
            socket.close(linger=0)
            return None
        self._connections[engine] = _Connection(socket, known[1], self._clock())
        return self._connections[engine]

    def _close(self, engine: str) -> None:
        self._connections.pop(engine).socket.close(linger=0)
