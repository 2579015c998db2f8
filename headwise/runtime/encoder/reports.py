"""What an encoder tells the scheduler of itself, twice a second: that it is there, and where; and what it hears."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headwise.runtime.protocol import wire
from headwise.runtime.protocol.encoder_messages import EncoderStatus
from headwise.runtime.protocol.messages import STATUS_INTERVAL_S
from headwise.runtime.protocol.scheduler_answers import answers
from headwise.runtime.protocol.users import KnownUsers, Users
from headwise.sockets.curve import ClientKeys, secure_client

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

_RETRY_S = 0.05
"""While the scheduler is away: it is told of the encoder as soon as it is back."""
_MAX_UNREAD = 4


@dataclass(frozen=True)
class Reporting:
    """Where and as whom an encoder reports: the scheduler's endpoint, the deployment's secret, the encoder's name.

    advertise_host: host that clients are told instead of the one it listens at; empty: that one
    keys: with which it connects; None: in the clear
    """

    endpoint: str
    secret: str = field(repr=False)
    name: str
    advertise_host: str = ""
    keys: ClientKeys | None = None

    def advertised(self, address: str) -> str:
        return f"tcp://{self.advertise_host}:{address.rpartition(':')[2]}" if self.advertise_host else address


class EncoderReports:
    """Sends a status when it is due, and hears what the scheduler answers. Never blocks.

    users: that may connect, as the scheduler told last; None: it has told of none
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], reporting: Reporting, clock: Callable[[], float]
    ) -> None:
        self.reporting = reporting
        self._context, self._clock = context, clock
        self.users: Users | None = None
        self._due, self._is_away = clock(), False
        self._socket = self._connected()

    def follow(self, endpoint: str) -> None:
        """Report to the scheduler there from now on."""
        self._socket.close(linger=0)
        self.reporting = replace(self.reporting, endpoint=endpoint)
        self._socket = self._connected()
        self._due = self._clock()

    def service(self, status: Callable[[Reporting], EncoderStatus]) -> None:
        import zmq

        now = self._clock()
        if now < self._due:
            return
        for heard in answers(self._socket, self.reporting.secret, KnownUsers):
            self.users = heard.users
        try:
            self._socket.send(wire.encode(status(self.reporting)), zmq.NOBLOCK)
            self._due, self._is_away = now + STATUS_INTERVAL_S, False
        except zmq.Again:
            self._due = now + _RETRY_S
            if not self._is_away:
                log.warning("the scheduler at %s takes no reports", self.reporting.endpoint)
            self._is_away = True

    def _connected(self) -> zmq.Socket[bytes]:
        import zmq

        socket = self._context.socket(zmq.DEALER)
        secure_client(socket, self.reporting.keys)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues up for a scheduler that is away
        socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
        socket.connect(self.reporting.endpoint)
        return socket
