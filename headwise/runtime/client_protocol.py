"""What clients, the global scheduler and the engines say to each other (encoded by `wire`).

client -> scheduler   Route        -> Ticket | Failed
client -> engine      Submit       -> Outputs ...  | Failed
client -> engine      Abort
client -> either      Ping         -> Pong          every `PING_INTERVAL_S` while something is awaited
client -> scheduler   GetStats     -> Stats
client -> scheduler   GetEngines   -> Engines | Failed
client -> engine      Operate      -> Operated | Failed
engine -> scheduler   EngineStatus                  every `STATUS_INTERVAL_S`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise import errors
from headwise.errors import HeadwiseError
from headwise.runtime.request import GenerateRequest, OutputDelta
from headwise.runtime.wire import register

PING_INTERVAL_S = 1.0
PEER_TIMEOUT_S = 4.0
"""A peer that is asked and says nothing for so long is taken for dead."""
CLIENT_TIMEOUT_S = 10.0
"""A client that says nothing for so long has its requests aborted."""
STATUS_INTERVAL_S = 0.5
MAX_MESSAGE_BYTES = 64 << 20


@register
@dataclass(frozen=True)
class Route:
    """Ask for an engine. Exactly one of the prompt's three forms is given; ``sampling`` is checked by the scheduler.

    key: the client's number of the call, repeated in the answer
    """

    key: int
    text: str | None
    token_ids: NDArray[np.int32] | None
    messages: Any
    sampling: dict[str, Any]
    priority: int
    cache_salt: str


@register
@dataclass(frozen=True)
class Ticket:
    """The engine to go to, and the request to submit there as it stands."""

    key: int
    endpoint: str
    request: GenerateRequest


@register
@dataclass(frozen=True)
class Submit:
    key: int
    request: GenerateRequest


@register
@dataclass(frozen=True)
class Abort:
    request_id: str


@register
@dataclass(frozen=True)
class Outputs:
    """All that one engine step made for one client."""

    deltas: tuple[OutputDelta, ...]


@register
@dataclass(frozen=True)
class Failed:
    """A call (``key``), or a request that was being served (``request_id``), ended with an error.

    key 0 with an empty request_id: what the peer sent was not a message.
    """

    key: int
    request_id: str
    error: str
    message: str


@register
@dataclass(frozen=True)
class Ping:
    """A sign of life, naming the requests whose output is awaited: the engine fails those that it does not serve."""

    request_ids: tuple[str, ...] = ()


@register
@dataclass(frozen=True)
class Pong:
    pass


@register
@dataclass(frozen=True)
class GetStats:
    key: int


@register
@dataclass(frozen=True)
class Stats:
    key: int
    stats: dict[str, Any]


@register
@dataclass(frozen=True)
class GetEngines:
    key: int


@register
@dataclass(frozen=True)
class Engines:
    """Every engine of the deployment: its endpoint by its name."""

    key: int
    endpoints: dict[str, str]


@register
@dataclass(frozen=True)
class Operate:
    """Have an engine ``sleep``, ``wake`` or ``reset_cache`` of a tier; answered when that is done."""

    key: int
    action: str
    tier: str


@register
@dataclass(frozen=True)
class Operated:
    """It is done. blocks: how many blocks a reset has forgotten"""

    key: int
    blocks: int


@register
@dataclass(frozen=True)
class EngineStatus:
    """An engine is there and serves at ``endpoint``.

    secret: of the deployment; a status with another one is ignored
    load:   requests running and waiting
    """

    secret: str
    engine: str
    endpoint: str
    load: int
    stats: dict[str, Any]


_ERRORS = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, HeadwiseError)
}


def failure(error: HeadwiseError, key: int = 0, request_id: str = "") -> Failed:
    """The message for an error."""
    return Failed(key, request_id, type(error).__name__, str(error))


def error_of(failed: Failed) -> HeadwiseError:
    """The error of a message, of the class that was raised on the other side where this side knows it."""
    return _ERRORS.get(failed.error, HeadwiseError)(failed.message)
