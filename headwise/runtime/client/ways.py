"""How a client reaches engines: directly, or through the relay at the scheduler's address."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, get_args

from headwise.errors import ConfigError
from headwise.runtime.client.forwarder import Forwarder
from headwise.runtime.client.peers import Peer
from headwise.sockets.curve import ClientKeys

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

RelayMode = Literal["auto", "always", "never"]
"""``auto``: engines that cannot be reached directly are reached through the relay."""

UNREACHED_S = 1.0
"""An engine to which no connection could be made for so long is tried through the relay. That does not depend on how
busy the engine is: its connections are made by a thread of their own."""


class Ways:
    """Makes the connections to engines, and remembers which hosts are reached through the relay only.

    A host is remembered until the relay does not reach it any more.
    """

    def __init__(self, scheduler: str, relay: RelayMode, keys: ClientKeys | None = None) -> None:
        if relay not in get_args(RelayMode):
            raise ConfigError(f"relay must be one of {', '.join(get_args(RelayMode))}, got {relay!r:.80}")
        self._scheduler = scheduler
        self._relay = relay
        self._keys = keys
        self._forwarder: Forwarder | None = None
        self._former: list[Forwarder] = []  # by way of schedulers that have moved
        self._relayed_hosts: set[str] = set()
        self._has_told = False

    def open(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Peer:
        """A connection to the engine at ``endpoint``."""
        if self._relay == "always" or _host(endpoint) in self._relayed_hosts:
            peer = Peer(context, endpoint, self._keys, address=self._relayed(endpoint))
            peer.relay = self._scheduler
            return peer
        return Peer(context, endpoint, self._keys, is_trial=self._relay == "auto")

    def follow(self, scheduler: str) -> None:
        """The scheduler is there now, and the relay with it. What goes through the one before may go on."""
        self._scheduler = scheduler
        if self._forwarder is not None:
            self._former.append(self._forwarder)
            self._forwarder = None

    def detour(self, peer: Peer) -> bool:
        """Lead a connection that could not be made through the relay. False: it was made, or led there, before."""
        if not peer.is_trial:
            return False
        peer.go_by(self._relayed(peer.endpoint))
        peer.relay = self._scheduler
        return True

    def is_by_former(self, peer: Peer) -> bool:
        """Whether a connection leads through the relay of a scheduler that has moved."""
        return peer.is_relayed and peer.relay != self._scheduler

    def is_overdue(self, peer: Peer, now: float) -> bool:
        """Whether a direct connection should have been made by now, and may be led through the relay."""
        return peer.is_trial and now - peer.heard > UNREACHED_S

    def note_made(self, peer: Peer) -> None:
        """A connection was made: the next ones to this host go the same way."""
        if not peer.is_relayed:
            return
        self._relayed_hosts.add(_host(peer.endpoint))
        if not self._has_told:
            self._has_told = True
            log.log(
                logging.INFO if self._relay == "always" else logging.WARNING,
                "engines are reached through the scheduler at %s, %s: all tokens pass its node",
                self._scheduler,
                "as asked for" if self._relay == "always" else f"for {peer.endpoint} cannot be reached from here",
            )

    def note_failed(self, peer: Peer) -> None:
        """A connection is given up. If it was never made, the next one to this host may go another way."""
        if not peer.is_made:
            self._relayed_hosts.discard(_host(peer.endpoint))

    def tried(self, peer: Peer) -> str:
        """How this engine was tried to be reached, for an error message."""
        if not peer.is_relayed or self._forwarder is None:
            return ""
        how = "through the scheduler's port" if self._relay == "always" else "directly or through the scheduler's port"
        failure = self._forwarder.failure(peer.endpoint)
        return f" {how} ({failure})" if failure else f" {how}"

    def close(self) -> None:
        for forwarder in (*self._former, self._forwarder):
            if forwarder is not None:
                forwarder.close()

    def _relayed(self, endpoint: str) -> str:
        if self._forwarder is None:
            self._forwarder = Forwarder(self._scheduler)
        return self._forwarder.open(endpoint)


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
