"""Who is connected to an engine, and whose requests are whose."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class _Client:
    """A connection: when it last spoke, and the requests it has here."""

    heard: float
    requests: set[str] = field(default_factory=set)


class Clients:
    """Clients by the identity of their connection, each known from its first message until it is dropped."""

    def __init__(self) -> None:
        self._clients: dict[bytes, _Client] = {}
        self._owners: dict[str, tuple[bytes, str]] = {}
        self._senders: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def request_ids(self) -> list[str]:
        """Of all requests that are served, in the order in which they came."""
        return list(self._owners)

    @property
    def num_requests(self) -> int:
        return len(self._owners)

    def heard(self, identity: bytes, now: float) -> None:
        """It has said something."""
        self._clients.setdefault(identity, _Client(now)).heard = now

    def owner_of(self, request_id: str) -> bytes | None:
        """Who a request is served for; None: it is not served."""
        owner = self._owners.get(request_id)
        return None if owner is None else owner[0]

    def num_of(self, identity: bytes, tenant: str) -> int:
        """Requests of this tenant, by whichever of its connections they came; of nobody's, those of this client."""
        return self._senders[tenant or identity.hex()]

    def begin(self, request_id: str, identity: bytes, tenant: str = "") -> None:
        """A request that nobody has is served for this client, which was heard. tenant: whose it is; empty: nobody's"""
        sender = tenant or identity.hex()
        self._owners[request_id] = identity, sender
        self._senders[sender] += 1
        self._clients[identity].requests.add(request_id)

    def end(self, request_id: str) -> bytes | None:
        """A request is served no more; whose it was, None if it was nobody's."""
        owner = self._owners.pop(request_id, None)
        if owner is None:
            return None
        identity, sender = owner
        self._senders[sender] -= 1
        if not self._senders[sender]:
            del self._senders[sender]
        if (client := self._clients.get(identity)) is not None:
            client.requests.discard(request_id)
        return identity

    def drop(self, identity: bytes) -> list[str]:
        """Forget a client; its requests, each of which is still to be ended."""
        client = self._clients.pop(identity, None)
        return [] if client is None else list(client.requests)

    def silent_since(self, moment: float) -> list[bytes]:
        """Clients that have said nothing since before ``moment``."""
        return [identity for identity, client in self._clients.items() if client.heard < moment]
