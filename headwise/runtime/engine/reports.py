"""What an engine tells the scheduler of itself, twice a second and at once when it lost its workers, and what it hears
of the other engines, and of weights that it is to have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import STATUS_INTERVAL_S, Directory, EngineStatus, WantedWeights
from headwise.runtime.protocol.scheduler_answers import answers
from headwise.runtime.protocol.users import KnownUsers, Users
from headwise.sockets.curve import ClientKeys, secure_client
from headwise.sockets.pieces import split

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

RETRY_S = 0.05
"""While the scheduler is away: it is told of the engine as soon as it is back."""
HEAR_S = 0.05
"""How often it is looked for what the scheduler says: not between all steps."""
MAX_FAULTS = 16
"""In one status; the first ones."""
MAX_RECEIVED = 65_536
"""Requests named in one status; those beyond are counted as on their way until their reservations end."""
_MAX_UNREAD = 4


@dataclass(frozen=True)
class Reporting:
    """Where and as whom an engine reports: the scheduler's endpoint, the deployment's secret, the engine's name.

    advertise_host: host that clients are told instead of the one the engine listens at; empty: that one
    keys: with which it connects; None: in the clear
    tp_size: its tensor-parallel ranks
    """

    endpoint: str
    secret: str = field(repr=False)
    engine: str
    advertise_host: str = ""
    keys: ClientKeys | None = None
    tp_size: int = 1

    def advertised(self, address: str) -> str:
        """The endpoint for clients of an engine that listens at ``address``."""
        return f"tcp://{self.advertise_host}:{address.rpartition(':')[2]}" if self.advertise_host else address


class EngineReports:
    """Gathers what a status tells of the time since the last one, and sends it when it is due. Never blocks.

    directory: the other engines and this one, as the scheduler told last; it outlives the scheduler
    wanted:    weights that the engine is to have, as the scheduler told last; None: it has told of none
    users:     that may connect, likewise
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], reporting: Reporting, clock: Callable[[], float]):
        self.reporting = reporting
        self._clock = clock
        self._context = context
        self._socket = self._connected()
        self._due = self._hear_at = clock()
        self.directory = Directory("", "", {})
        self.wanted: WantedWeights | None = None
        self.users: Users | None = None
        self._received: list[str] = []
        self._faults: list[str] = []
        self._is_away = False

    def _connected(self) -> zmq.Socket[bytes]:
        import zmq

        socket = self._context.socket(zmq.DEALER)
        secure_client(socket, self.reporting.keys)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues up for a scheduler that is away
        socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
        socket.connect(self.reporting.endpoint)
        return socket

    def follow(self, endpoint: str) -> None:
        """Report to the scheduler there from now on."""
        self._socket.close(linger=0)
        self.reporting = replace(self.reporting, endpoint=endpoint)
        self._socket = self._connected()
        self.hurry()

    def received(self, request_id: str) -> None:
        if len(self._received) < MAX_RECEIVED:
            self._received.append(request_id)

    def fault(self, text: str) -> None:
        """Something went wrong: tell of it at once."""
        if len(self._faults) < MAX_FAULTS:
            self._faults.append(text)
        self.hurry()

    def hurry(self) -> None:
        """The next status is due now."""
        self._due = self._clock()

    def service(self, status: Callable[[Reporting, tuple[str, ...], tuple[str, ...]], EngineStatus]) -> None:
        """Send a status if one is due; ``status`` makes it, of what was received and of the faults."""
        import zmq

        now = self._clock()
        if now >= self._hear_at:
            self._hear_at = now + HEAR_S
            self._hear()
        if now < self._due:
            return
        message = status(self.reporting, tuple(self._received), tuple(self._faults))
        message = replace(message, directory=self.directory.version)
        try:
            for piece in split(wire.encode(message)):
                self._socket.send(piece, zmq.NOBLOCK)
        except zmq.Again:
            self._due = now + RETRY_S
            if not self._is_away:
                log.warning("the scheduler at %s takes no reports", self.reporting.endpoint)
            self._is_away = True
            return
        self._due = now + STATUS_INTERVAL_S
        self._is_away = False
        self._received.clear()
        self._faults.clear()

    def _hear(self) -> None:
        """Take in what the scheduler has answered."""
        for heard in answers(self._socket, self.reporting.secret, Directory, KnownUsers, WantedWeights):
            if isinstance(heard, Directory):
                self.directory = heard
            elif isinstance(heard, KnownUsers):
                self.users = heard.users
            else:
                self.wanted = heard
