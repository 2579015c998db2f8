"""What engines report to the scheduler, twice a second each."""

from __future__ import annotations

from collections.abc import Callable

from headwise.runtime.frontend.directory import DirectoryService
from headwise.runtime.frontend.relay import Relay
from headwise.runtime.frontend.routing import Router
from headwise.runtime.frontend.users_service import UsersService
from headwise.runtime.frontend.weights_service import WeightsService
from headwise.runtime.protocol.messages import EngineStatus


class EngineReports:
    """Used by the scheduler's thread.

    strangers: reports of others than this deployment's engines
    secret:    of the deployment
    relay:     leads clients to engines that report
    reply:     sends an encoded message to a peer
    weights:   that they are to have
    users:     that they let connect
    """

    def __init__(
        self,
        secret: str,
        router: Router,
        relay: Relay,
        clock: Callable[[], float],
        reply: Callable[[bytes, bytes], bool],
        weights: WeightsService,
        users: UsersService,
    ) -> None:
        self.strangers = 0
        self._secret = secret
        self._router, self._relay, self._clock, self._reply = router, relay, clock, reply
        self._weights, self._users = weights, users
        self._directory = DirectoryService(secret) if router.options.peer_loads else None
        self._reporters: dict[str, bytes] = {}  # by an engine's endpoint, whose connection its statuses come over

    def take(self, identity: bytes, status: EngineStatus) -> None:
        if status.secret != self._secret:
            self.strangers += 1
            return
        self._router.update(self._weights.heard(identity, status), self._clock())
        self._users.heard(identity, status.users)
        self._reporters[status.endpoint] = identity
        self._relay.allow(status.endpoint, status.address or status.endpoint)
        if self._directory is not None:
            news = self._directory.answer(self._router.table, status)
            if news is not None:
                self._reply(identity, news)

    def forget(self, ended: frozenset[bytes]) -> None:
        """Connections have ended, and with them the engines that reported over them."""
        for endpoint in [endpoint for endpoint, identity in self._reporters.items() if identity in ended]:
            del self._reporters[endpoint]
            self._relay.forbid(endpoint)
            self._router.disconnected(endpoint, self._clock())
