"""Who has API keys: what may come by each, and as whose."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from headwise.errors import NotAllowedError
from headwise.runtime.protocol.messages import (
    GetStats,
    Operate,
    Reroute,
    Roll,
    Route,
    Scale,
    Submit,
    UpdateWeights,
    failure,
)
from headwise.runtime.protocol.request import GenerateRequest
from headwise.runtime.protocol.wire import register
from headwise.sockets.listener import Listener

ANY_PRIORITY = -(2**31)


@register
@dataclass(frozen=True)
class Tenant:
    """Who has a key and is no operator.

    name:     by which its requests are known, whoever sends them by whichever of its keys
    priority: the most urgent one that they have, of which lower ones go first
    share:    parts that they have together where they wait, beside others' one
    """

    name: str
    priority: int = ANY_PRIORITY
    share: int = 1

    def at_most(self, priority: int) -> int:
        """The priority of a request that asks for this one."""
        return max(priority, self.priority)

    def own(self, request: GenerateRequest) -> GenerateRequest:
        """A request that comes by its key."""
        return replace(request, tenant=self.name, priority=self.at_most(request.priority))


@register
@dataclass(frozen=True)
class Users:
    """by_key: whose each key is, None: an operator's. Keys are the public ones of connections, or over HTTP the API
    keys; the deployment's own is none of them
    """

    by_key: dict[str, Tenant | None] = field(default_factory=dict, repr=False)

    @cached_property
    def version(self) -> str:
        """Tells these users from others."""
        return hashlib.sha256(repr(sorted(self.by_key.items())).encode()).hexdigest()[:16]

    def share_of(self, tenant: str) -> float:
        """See `Tenant`; 1 of who is none of them."""
        return self._shares.get(tenant, 1)

    @cached_property
    def _shares(self) -> dict[str, int]:
        return {tenant.name: tenant.share for tenant in self.by_key.values() if tenant is not None}

    def as_sent(self, message: Any, key: str) -> Any:
        """A client's message as it counts where it comes by this key: a tenant's are the tenant's, and what is for
        operators becomes the answer to it, a `Failed`."""
        tenant = self.by_key.get(key)
        if tenant is None:
            return message
        if isinstance(message, GetStats):
            return replace(message, tenant=tenant.name)
        if isinstance(message, Route):
            return replace(message, tenant=tenant.name, priority=tenant.at_most(message.priority))
        if isinstance(message, Submit | Reroute):
            return replace(message, request=tenant.own(message.request))
        if isinstance(message, Operate | Roll | Scale | UpdateWeights):
            why = f"this API key is tenant {tenant.name}'s, and {type(message).__name__} is for those of operators"
            return failure(NotAllowedError(why), message.key)
        return message


NO_USERS = Users()


@register
@dataclass(frozen=True)
class KnownUsers:
    """The scheduler tells an engine, or an encoder, that has others: clients with these keys may connect from now on,
    and no others."""

    secret: str
    users: Users


class LetIn:
    """Those who may connect to a server, besides the deployment's own.

    listener: the server's
    """

    def __init__(self, listener: Listener, users: Users) -> None:
        self.users = users
        self._listener = listener

    def follow(self, users: Users | None) -> None:
        """It is these from now on; None: as before."""
        if users is not None and users != self.users:
            self.users = users
            self._listener.allow(users.by_key)

    def share_of(self, tenant: str) -> float:
        """See `Users`: of those of now."""
        return self.users.share_of(tenant)

    def as_sent(self, message: Any) -> Any:
        """The message that the listener returned last, as it counts: see `Users`."""
        return self.users.as_sent(message, self._listener.sender_key)
