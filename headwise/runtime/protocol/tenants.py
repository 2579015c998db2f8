"""Who has an API key, and is no operator: what may come by it, and as whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import NotAllowedError
from headwise.runtime.protocol.messages import (
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

ANY_PRIORITY = -(2**31)


@dataclass(frozen=True)
class Tenant:
    """name:     by which its requests are known, whoever sends them by whichever of its keys
    priority: the most urgent one that they have, of which lower ones go first
    """

    name: str
    priority: int = ANY_PRIORITY

    def at_most(self, priority: int) -> int:
        """The priority of a request that asks for this one."""
        return max(priority, self.priority)

    def own(self, request: GenerateRequest) -> GenerateRequest:
        """A request that comes by its key."""
        return replace(request, tenant=self.name, priority=self.at_most(request.priority))


Tenants = Mapping[str, Tenant]
"""By their keys: of connections the public ones, over HTTP the API keys. Others are operators', or the deployment's."""
NO_TENANTS: Tenants = {}


def as_sent(message: Any, tenant: Tenant | None) -> Any:
    """A client's message as it counts where it comes by a tenant's key; what is for operators becomes the answer to it,
    a `Failed`. None: it comes by no tenant's key, and counts as it is."""
    if tenant is None:
        return message
    if isinstance(message, Route):
        return replace(message, tenant=tenant.name, priority=tenant.at_most(message.priority))
    if isinstance(message, Submit | Reroute):
        return replace(message, request=tenant.own(message.request))
    if isinstance(message, Operate | Roll | Scale | UpdateWeights):
        why = f"this API key is tenant {tenant.name}'s, and {type(message).__name__} is for those of operators"
        return failure(NotAllowedError(why), message.key)
    return message
