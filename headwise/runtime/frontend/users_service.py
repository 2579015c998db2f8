"""Who may connect to a deployment: says so to engines and encoders, and finds out when the file of keys has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headwise.errors import ConfigError
from headwise.runtime.frontend.client_socket import Send
from headwise.runtime.protocol.users import KnownUsers, LetIn, Users

log = logging.getLogger(__name__)

UsersSource = Callable[[], Users | None]
"""Who may connect from now on; None: who may by now. Never waits. Raises `ConfigError` where nobody can say."""


class UsersService:
    """Used by the scheduler's thread.

    let_in:   who may connect to the scheduler
    secret:   of the deployment
    source:   tells of others; None: they stay
    is_told:  whether engines and encoders are told of them before there are others: not where these may know better,
              nor where all may connect, who need no ``source``
    note:     called with what went wrong, in words
    """

    def __init__(
        self,
        let_in: LetIn,
        secret: str,
        source: UsersSource | None,
        is_told: bool,
        send: Send,
        note: Callable[[str], None],
    ) -> None:
        self._let_in, self._secret, self._source, self._is_told = let_in, secret, source, is_told
        self._send, self._note = send, note

    def heard(self, identity: bytes, version: str) -> None:
        """An engine or an encoder reports who may connect there: tell it of others, if there are."""
        if self._is_told and version != self._let_in.users.version:
            self._send(identity, KnownUsers(self._secret, self._let_in.users))

    def watch(self) -> None:
        """Look whether there are others. Call it a few times a second."""
        if self._source is None:
            return
        try:
            users = self._source()
        except ConfigError as error:
            self._note(f"API keys stay as they were: {error}")
            log.warning("API keys stay as they were: %s", error)
            return
        if users is not None and users != self._let_in.users:
            log.info("there are %d API keys now; there were %d", len(users.by_key), len(self._let_in.users.by_key))
        self._let_in.follow(users)
        self._is_told |= users is not None
