"""A client's connections to the scheduler and the engines: who is asked, who is alive, and what is lost with whom."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headwise.errors import DeploymentError, EngineDiedError, HeadwiseError
from headwise.runtime.client.locator import LOCATE_S, SILENT_S, Locator
from headwise.runtime.client.peers import Call, Peer
from headwise.runtime.client.ways import Ways
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import (
    FIRST_ANSWER_S,
    FORGOTTEN,
    MAX_PING_REQUESTS,
    PEER_TIMEOUT_S,
    PING_INTERVAL_S,
    Ping,
    Pong,
)

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

RECONNECT_S = 60.0
"""Longest wait for a scheduler that has answered before to come back."""
REFUSED_S = 20.0
"""Longest wait for it while nothing listens at its address. The next scheduler listens within a few seconds."""


class Connections:
    """Owned by the I/O thread, but for `new_key` and ``may_move``.

    When a scheduler is lost, the open questions are asked again of the scheduler that is started in its place.

    endpoint: of the scheduler
    may_move: whether the scheduler may
    locator:  finds a scheduler that has moved; None: it does not
    lost:     is given each call of an engine that is given up, and the error; and whether the engine is lost, not only
              the relay to it
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        scheduler: Peer,
        ways: Ways,
        locator: Locator | None,
        clock: Callable[[], float],
        lost: Callable[[Call, HeadwiseError, bool], None],
    ) -> None:
        self.scheduler = scheduler
        self.engines: dict[str, Peer] = {}
        self.endpoint = scheduler.endpoint
        self.may_move = locator is not None
        self._context, self._ways, self._locator = context, ways, locator
        self._clock, self._lost = clock, lost
        self._keys = itertools.count(1)

    @property
    def peers(self) -> list[Peer]:
        return [self.scheduler, *self.engines.values()]

    def engine(self, endpoint: str) -> Peer:
        """The connection to an engine, or to an encoder; opened if there is none."""
        if endpoint not in self.engines:
            self.engines[endpoint] = self._ways.open(self._context, endpoint)
        return self.engines[endpoint]

    # ---- questions ----

    def new_key(self) -> int:
        """Of a question. May be called from any thread."""
        return next(self._keys)

    def ask(self, peer: Peer, what: Call | Callable[[Any], None], question: Callable[[int], Any]) -> int:
        """Ask a peer; ``question`` makes the message for a key, which is returned. ``what`` gets the answer or an
        error."""
        key = self.new_key()
        peer.ask(key, what, wire.encode(question(key)), self._clock())
        return key

    def take_pong(self, peer: Peer, pong: Pong) -> None:
        """Ask again if the scheduler was replaced. A proxy in between may keep the connection, and so hide the loss."""
        is_other = pong.instance == FORGOTTEN or peer.instance not in ("", pong.instance)
        if peer is self.scheduler and is_other:
            peer.ask_again()
        peer.instance = pong.instance

    # ---- a scheduler that moves ----

    def follow(self, endpoint: str) -> None:
        """The scheduler is there now."""
        if endpoint == self.scheduler.endpoint:
            return
        log.warning("the scheduler has moved from %s to %s", self.scheduler.endpoint, endpoint)
        self.endpoint = endpoint
        self._ways.follow(endpoint)
        for peer in [each for each in self.engines.values() if self._ways.is_by_former(each) and not each.awaiting]:
            del self.engines[peer.endpoint]
            peer.close()
        self.scheduler.move(endpoint)
        self.scheduler.ask_again()

    def _look_for_scheduler(self, now: float) -> None:
        """Whoever waits for a scheduler that is away finds out whether it has moved."""
        scheduler = self.scheduler
        if self._locator is None or not scheduler.awaiting or not scheduler.has_answered:
            return
        if scheduler.refused_s(now) > LOCATE_S or now - scheduler.heard > SILENT_S:
            self._locator.look(now)

    # ---- connections that end ----

    def check(self, peer: Peer) -> None:
        """An engine whose connection ends is lost at once. A scheduler comes back, but has forgotten all calls. If
        connections are refused, and no scheduler has answered yet or they have been for `REFUSED_S`, there is none.
        """
        has_ended, is_refused = peer.connection_events(self._clock())
        if peer is not self.scheduler:
            if peer.is_made:
                self._ways.note_made(peer)
            if (has_ended or is_refused) and not self._ways.detour(peer):
                self.fail(peer, self._lost_error(peer, "its connection ended"))
        elif peer.refusal:
            self.fail(peer, DeploymentError(f"the deployment at {peer.endpoint} refuses this client: {peer.refusal}"))
        elif has_ended:
            self._forgive(peer)
            peer.reconnect()
            peer.ask_again()
        elif is_refused and not peer.has_answered:
            self.fail(peer, self._absence_error("no connection could be made"))
        elif is_refused and peer.refused_s(self._clock()) > self._refused_limit_s:
            self.fail(peer, self._absence_error(f"nothing has listened there for {self._refused_limit_s:g} s"))

    @property
    def _refused_limit_s(self) -> float:
        """One that may move takes its time: its node must be known to be dead."""
        return RECONNECT_S if self.may_move else REFUSED_S

    def _forgive(self, scheduler: Peer) -> None:
        """The relay was lost with the scheduler: engines that were lost a moment before, and are reached through it, do
        not count as lost."""
        for call in scheduler.awaiting.values():
            if isinstance(call, Call) and call.is_in_doubt:
                call.engines_lost -= 1
                call.is_in_doubt = False

    def _lost_error(self, peer: Peer, how: str) -> EngineDiedError:
        """The error for a lost engine. If it never answered, it may be unreachable from here."""
        if peer.has_answered:
            return EngineDiedError(f"the engine at {peer.endpoint} is gone: {how}")
        return EngineDiedError(
            f"the engine at {peer.endpoint} cannot be reached from here{self._ways.tried(peer)}, or is gone: clients "
            f"of {self.endpoint} must be able to connect to the engines, too"
        )

    def _absence_error(self, how: str) -> DeploymentError:
        return DeploymentError(
            f"no deployment answers at {self.endpoint} ({how}); check the address, or start one with `headwise serve`"
        )

    # ---- silence ----

    def poll_ms(self) -> int | None:
        """How long to wait for messages until `check_silence`; None: for ever."""
        return int(PING_INTERVAL_S * 250) if any(peer.awaiting for peer in self.peers) else None

    def check_silence(self) -> None:
        """Ping the peers from which something is awaited. One that stays silent for too long counts as dead."""
        now = self._clock()
        self._look_for_scheduler(now)
        for peer in self.peers:
            if not peer.awaiting:
                continue
            if now - peer.heard > self._silence_limit_s(peer):
                self.fail(peer, self._silence_error(peer))
            elif self._ways.is_overdue(peer, now):
                self._ways.detour(peer)
            elif now - peer.pinged >= PING_INTERVAL_S:
                peer.pinged = now
                named = [key for key in peer.awaiting if isinstance(key, str)]
                for first in range(0, max(1, len(named)), MAX_PING_REQUESTS):
                    peer.send(Ping(tuple(named[first : first + MAX_PING_REQUESTS])))

    def _silence_limit_s(self, peer: Peer) -> float:
        if peer is not self.scheduler:
            return PEER_TIMEOUT_S
        return RECONNECT_S if peer.has_answered else FIRST_ANSWER_S

    def _silence_error(self, peer: Peer) -> HeadwiseError:
        waited = f"waited {self._silence_limit_s(peer):g} s"
        if peer is not self.scheduler:
            return self._lost_error(peer, f"it stopped answering ({waited})")
        if peer.has_answered:
            return DeploymentError(f"the deployment at {peer.endpoint} stopped answering ({waited})")
        return self._absence_error(waited)

    # ---- the end of one ----

    def fail(self, peer: Peer, error: HeadwiseError) -> None:
        """Give up a peer: its requests continue on other engines, everything else that it should answer fails.

        An engine's connection is closed; the next ticket for it opens a new one.
        """
        is_engine = self.engines.get(peer.endpoint) is peer
        # Else only the relay is, with the scheduler.
        is_lost = not peer.is_relayed or (self.scheduler.is_made and not self._ways.is_by_former(peer))
        if is_engine:
            del self.engines[peer.endpoint]
            self._ways.note_failed(peer)
        for key, what in list(peer.awaiting.items()):
            if isinstance(what, Call) and is_engine:
                self._lost(what, error, is_lost)
            else:
                peer.answered(key)
                deliver_error(what, error)
        if is_engine:
            peer.close()


def deliver_error(what: Call | Callable[[Any], None], error: HeadwiseError) -> None:
    """Deliver an error to a call, or to the function that waits for an answer."""
    if isinstance(what, Call):
        what.deliver(error)
    else:
        what(error)
