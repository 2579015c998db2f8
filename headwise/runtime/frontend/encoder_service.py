"""Tells clients where encoders of images are, which report to the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwise.errors import HeadwiseError
from headwise.runtime.frontend.client_socket import Send
from headwise.runtime.frontend.encoders import KnownEncoders
from headwise.runtime.frontend.relay import Relay
from headwise.runtime.frontend.users_service import UsersService
from headwise.runtime.protocol.encoder_messages import Encoders, EncoderStatus, GetEncoders
from headwise.runtime.protocol.messages import failure


class EncoderService:
    """Used by the scheduler's thread.

    strangers: reports of others than this deployment's encoders
    secret:    of the deployment
    refusal:   why images are refused; empty: they are not
    relay:     leads clients to encoders that report
    users:     that they let connect
    """

    def __init__(
        self,
        secret: str,
        refusal: str,
        relay: Relay,
        clock: Callable[[], float],
        send: Send,
        users: UsersService,
    ) -> None:
        self.strangers = 0
        self._secret = secret
        self._known = KnownEncoders(refusal)
        self._relay, self._clock, self._send, self._users = relay, clock, send, users

    def take(self, identity: bytes, status: EncoderStatus) -> None:
        if status.secret != self._secret:
            self.strangers += 1
            return
        self._known.update(identity, status, self._clock())
        self._users.heard(identity, status.users)
        self._relay.allow(status.endpoint, status.address)
        self.answer(self._clock())

    def find(self, identity: bytes, get: GetEncoders) -> None:
        """A client asks where they are."""
        self._known.ask(identity, get.key, self._clock())
        self.answer(self._clock())

    def answer(self, now: float) -> None:
        """Tell clients what is known by now."""
        for identity, key, found in self._known.answers(now):
            self._send(identity, failure(found, key) if isinstance(found, HeadwiseError) else Encoders(key, found))

    def forget(self, ended: frozenset[bytes]) -> None:
        """Connections have ended."""
        for endpoint in self._known.forget(ended):
            self._relay.forbid(endpoint)

    def stats(self, now: float) -> dict[str, dict[str, Any]]:
        """By name."""
        return self._known.stats(now)
