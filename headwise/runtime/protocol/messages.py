"""What clients, the global scheduler and the engines say to each other (encoded by `wire`).

client -> scheduler   Route        -> Waits ... Ticket | Failed
client -> scheduler   Reroute      -> Waits ... Ticket | Failed
client -> scheduler   Withdraw
client -> engine      Submit       -> Outputs ...  | Failed
engine -> client      EmbedsWanted                  for a `Submit` that tells of embeddings: see `embed_parts`
client -> engine      EmbedsPart   -> EmbedsTaken
client -> engine      Abort
client -> either      Ping         -> Pong          every `PING_INTERVAL_S` while something is awaited
client -> scheduler   GetStats     -> Stats
client -> scheduler   FindPrefix   -> PrefixFound | Failed
client -> scheduler   GetEngines   -> Engines | Failed
client -> engine      Operate      -> Operated | Failed
client -> scheduler   Scale        -> Scaled | Failed
client -> scheduler   Roll         -> Scaled | Failed
client -> scheduler   UpdateWeights -> WeightsUpdated | Failed
engine -> scheduler   EngineStatus -> Directory     every `STATUS_INTERVAL_S`; answered if the engine knows another one
                                   -> WantedWeights if it has others
                                   -> KnownUsers    likewise: see `users`

What is said of images is in `encoder_messages`, and what engines say to each other in `lease_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise import errors
from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import HeadwiseError
from headwise.runtime.protocol.images import PromptImage
from headwise.runtime.protocol.prompt_items import EmbedsPlace
from headwise.runtime.protocol.request import GenerateRequest, OutputDelta, Retention
from headwise.runtime.protocol.weights import FIRST, AdapterChanges, Weights
from headwise.runtime.protocol.wire import register

PING_INTERVAL_S = 1.0
PEER_TIMEOUT_S = 4.0
"""An engine that is pinged and stays silent for so long counts as dead."""
FIRST_ANSWER_S = 10.0
"""Longest wait for the first answer of a scheduler: there may be none at the address."""
CLIENT_TIMEOUT_S = 10.0
"""The requests of a client that is silent for so long are aborted."""
STATUS_INTERVAL_S = 0.5
MAX_MESSAGE_BYTES = 16 << 20
"""Four million token ids. A server must keep so much memory for every client, also for untrusted ones."""
MAX_PING_REQUESTS = 100
"""Most requests that one `Ping` names: there may be as many answers to it."""
FORGOTTEN = ""


@register
@dataclass(frozen=True)
class Route:
    """Ask for an engine. Exactly one of the prompt's three forms is given; ``sampling`` is checked by the scheduler.

    key: the client's number of the call, repeated in the answer
    chat: messages, and what comes with them, as `headwise.runtime.loader.chat.plain_chat` returns it
    session: requests of one session go to the same engine while that costs little; empty: no session
    extra_keys: of the prompt's multimodal items. Their embeddings go to the engine, with `Submit`
    adapter: its name; empty: none
    images: of a chat, in their order, as an encoder says them. Their embeddings go to the engine, too
    retention, tenant: see `GenerateRequest`
    """

    key: int
    text: str | None
    token_ids: NDArray[np.int32] | None
    chat: Any
    sampling: dict[str, Any]
    priority: int
    cache_salt: str
    session: str = ""
    extra_keys: tuple[ExtraKey, ...] = ()
    adapter: str = ""
    images: tuple[PromptImage, ...] = ()
    retention: Retention | None = None
    tenant: str = ""


@register
@dataclass(frozen=True)
class Reroute:
    """The engine at ``lost`` does not serve this request any more: ask for another.

    request: with what it has produced so far (`GenerateRequest.output_token_ids`)
    """

    key: int
    request: GenerateRequest
    lost: str


@register
@dataclass(frozen=True)
class Withdraw:
    """The client no longer wants the ticket of this call."""

    key: int


@register
@dataclass(frozen=True)
class Ticket:
    """The chosen engine, and the request to submit there unchanged."""

    key: int
    endpoint: str
    request: GenerateRequest


@register
@dataclass(frozen=True)
class Waits:
    """A call's answer takes long, since no engine serves. reason: in words, for people"""

    key: int
    reason: str


@register
@dataclass(frozen=True)
class Submit:
    """Serve a request.

    embeds:    that follow it, as `EmbedsPart`s, as far as the engine wants them; it has none itself
    needs_all: the engine is to want all of them, whatever it has cached
    """

    key: int
    request: GenerateRequest
    embeds: tuple[EmbedsPlace, ...] = ()
    needs_all: bool = False


@register
@dataclass(frozen=True)
class EmbedsWanted:
    """Of a request's embeddings those from the item at ``start`` on; what is in front of it is cached."""

    request_id: str
    start: int


@register
@dataclass(frozen=True, eq=False)
class EmbedsPart:
    """The next rows of a request's embeddings, in the order of `Submit.embeds`.

    start:  of the item whose the first ones are
    first:  of its rows the number of the first one
    values: ``[rows, width]``, behind the item's own those of items that follow; numbers as
            `headwise.runtime.protocol.prompt_items.PromptEmbeds` has them
    """

    request_id: str
    start: int
    first: int
    values: NDArray[np.float32] | NDArray[np.uint16]


@register
@dataclass(frozen=True)
class EmbedsTaken:
    """A part has been taken in, or thrown away, where the request is not served any more."""

    request_id: str


@register
@dataclass(frozen=True)
class Abort:
    request_id: str


@register
@dataclass(frozen=True)
class Outputs:
    """All output of one engine step for one client."""

    deltas: tuple[OutputDelta, ...]


@register
@dataclass(frozen=True)
class Failed:
    """A call (``key``), or a request that was being served (``request_id``), ended with an error.

    key 0 with an empty request_id: the peer sent a malformed message, or the sender is stopping.
    """

    key: int
    request_id: str
    error: str
    message: str


@register
@dataclass(frozen=True)
class Ping:
    """A sign of life. It names the requests whose output is awaited, at most `MAX_PING_REQUESTS`. The engine answers
    with `Failed` for those that it does not serve.
    """

    request_ids: tuple[str, ...] = ()


@register
@dataclass(frozen=True)
class Pong:
    """instance: differs between a scheduler (or engine) and the one started in its place. `FORGOTTEN`: the client was
    silent for too long, and its open questions were dropped.
    """

    instance: str = ""


@register
@dataclass(frozen=True)
class GetStats:
    """tenant: that is told of itself, and of no other tenant; empty: of all"""

    key: int
    tenant: str = ""


@register
@dataclass(frozen=True)
class Stats:
    key: int
    stats: dict[str, Any]


@register
@dataclass(frozen=True)
class FindPrefix:
    """Ask who holds how much of a prompt. Exactly one of its three forms is given; ``images`` as of `Route`."""

    key: int
    text: str | None
    token_ids: NDArray[np.int32] | None
    chat: Any
    cache_salt: str
    extra_keys: tuple[ExtraKey, ...] = ()
    adapter: str = ""
    images: tuple[PromptImage, ...] = ()


@register
@dataclass(frozen=True)
class PrefixFound:
    """tokens: of the prompt
    engines: by name and tier, how many of them the tier could serve, together with faster tiers
    """

    key: int
    tokens: int
    engines: dict[str, dict[str, int]]


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
    """The operation is done. blocks: how many blocks a reset forgot"""

    key: int
    blocks: int


@register
@dataclass(frozen=True)
class Scale:
    """There are to be so many engines; None: as many as the load needs. Answered when that is decided, not when they
    serve. The number is absolute: to ask twice is to ask once.

    split: so many of them for prompts only, so many to decode only; None: as it is
    """

    key: int
    replicas: int | None
    split: tuple[int, int] | None = None


@register
@dataclass(frozen=True)
class Roll:
    """All engines are to be replaced, one after the other. Answered when that has begun."""

    key: int


@register
@dataclass(frozen=True)
class UpdateWeights:
    """All engines are to have these weights. Answered when all that there are have them: to ask twice is to ask once.
    What is left out, a model or adapters, stays.

    keeps_running: what runs goes on behind what the weights before have computed of it; else it is computed anew
    changes:       to the adapters; None: none
    """

    key: int
    weights: Weights
    keeps_running: bool = False
    changes: AdapterChanges | None = None


@register
@dataclass(frozen=True)
class WeightsUpdated:
    """engines: their names; those that come later will have the weights, too"""

    key: int
    engines: tuple[str, ...]


@register
@dataclass(frozen=True)
class Scaled:
    """decision: in words"""

    key: int
    decision: str


@register
@dataclass(frozen=True)
class WaitingPrompts:
    """Of the prompts that wait at an engine, what tells whether another one would go before most of them.

    priority: of the middle one in their order
    turn:     its: tokens until it is through, as `PromptTurns` has it; 0 where they go in the order in which they came
    beside:   by `owner_digest` how many wait for their turn alone, and the tokens that they lack; those that have most
    """

    priority: int
    turn: float
    beside: tuple[tuple[str, int, int], ...] = ()


@register
@dataclass(frozen=True)
class EngineLoad:
    """An engine's load and measured throughput, from which routing estimates costs. 0 seconds means not measured yet.

    waiting, running: requests
    held_back:        of those that wait, those that wait for blocks from elsewhere, or that what runs computes, and
                      not for room
    queued_tokens:    tokens of waiting and running requests' prompts that are not computed yet
    used_blocks, total_blocks: of the device's pool: held by running requests, and all
    prefill_token_s:  seconds to compute a token of a prompt
    decode_step_s:    seconds of a step that only decodes
    host_token_s, storage_token_s, peer_token_s: seconds to bring a token's cache from the host, and from storage or
                      another engine to the host
    accepts:          False while it sleeps or is leaving: it gets no requests
    device_resets:    how often it has forgotten what its device had cached, because it was told to, or to sleep
    prompts:          those that wait; None: none does
    """

    waiting: int = 0
    running: int = 0
    queued_tokens: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0
    host_token_s: float = 0.0
    storage_token_s: float = 0.0
    peer_token_s: float = 0.0
    accepts: bool = True
    held_back: int = 0
    device_resets: int = 0
    prompts: WaitingPrompts | None = None


@register
@dataclass(frozen=True)
class EngineStatus:
    """An engine is there and serves at ``endpoint``, as clients are told.

    secret:   of the deployment; a status with another one is ignored
    load:     requests running and waiting, and held until there are workers
    epoch:    of its cache. In a new epoch, none of the earlier blocks are there
    received: ids of the requests that arrived since the last status: from now on ``work`` has them
    faults:   what went wrong since the last status, in words
    is_leaving: it takes no new requests, and ends for good once it has none
    address:  where it is reached within the deployment, if that is not ``endpoint``
    directory: the version of the last `Directory` that it got; empty: none yet
    tp_size:  its tensor-parallel ranks
    weights:  that it serves by
    identity: what its blocks' hashes start from; empty: that is not known
    adapters: by name a hash of all that each is
    refused:  those that it was told to have last and cannot; None: there are none
    refusal:  why
    users:    version of those that it lets connect
    """

    secret: str
    engine: str
    endpoint: str
    load: int
    stats: dict[str, Any]
    epoch: int = 0
    work: EngineLoad = EngineLoad()
    received: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    is_leaving: bool = False
    address: str = ""
    directory: str = ""
    tp_size: int = 1
    weights: Weights = FIRST
    identity: str = ""
    adapters: tuple[tuple[str, str], ...] = ()
    refused: Weights | None = None
    refusal: str = ""
    users: str = ""


@register
@dataclass(frozen=True)
class Directory:
    """All engines of the deployment, for those that fetch blocks from each other: the answer to a status that names
    another version. It replaces the one before.

    secret:  of the deployment; a directory with another one is ignored
    version: says the same of the same engines, whichever scheduler sends it
    engines: by name the epoch of its cache, the address where it is reached within the deployment, and its ranks
    """

    secret: str
    version: str
    engines: dict[str, tuple[int, str, int]]


@register
@dataclass(frozen=True)
class WantedWeights:
    """Weights that all engines are to have: the answer to a status that names others, until they are had or refused.

    secret:        of the deployment; a message with another one is ignored
    keeps_running: see `UpdateWeights`
    """

    secret: str
    weights: Weights
    keeps_running: bool = False


_ERRORS = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, HeadwiseError)
}


def failure(error: HeadwiseError, key: int = 0, request_id: str = "") -> Failed:
    """The message for an error."""
    return Failed(key, request_id, type(error).__name__, str(error))


def error_of(failed: Failed) -> HeadwiseError:
    """The error in a message: of the class that was raised on the other side, if this side knows the class."""
    return _ERRORS.get(failed.error, HeadwiseError)(failed.message)
