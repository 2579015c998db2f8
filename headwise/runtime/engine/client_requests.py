"""What clients have at an engine: takes their requests to its core, and brings them what becomes of these."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from headwise.errors import (
    EmbedsLackingError,
    EngineDiedError,
    EngineLeavingError,
    HeadwiseError,
    InvalidRequestError,
    OverloadedError,
    RequestAbortedError,
)
from headwise.runtime.engine.arriving_embeds import ArrivingEmbeds
from headwise.runtime.engine.base import Core
from headwise.runtime.engine.clients import Clients
from headwise.runtime.engine.reports import EngineReports
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import (
    MAX_PING_REQUESTS,
    EmbedsPart,
    EmbedsTaken,
    EmbedsWanted,
    Outputs,
    Ping,
    Pong,
    Submit,
    failure,
)
from headwise.runtime.protocol.request import FinishReason, OutputDelta
from headwise.runtime.protocol.request_checks import check_request

log = logging.getLogger(__name__)

STALLED_S = 30.0
"""A request of whose embeddings nothing comes for so long is not waited for."""

_NO_WORKERS = EngineDiedError("the engine has no workers at the moment: they are being started")
_LEAVING = EngineLeavingError("the engine is leaving: another one serves the request")
_NOT_SERVED = RequestAbortedError(
    "the engine does not serve this request any more: the connection was lost, or its output was not read in time"
)
_LACKING = EmbedsLackingError("what the engine had cached of the prompt is gone: all of its embeddings are needed")
_STALLED = RequestAbortedError(f"nothing of the request's embeddings came for {STALLED_S:g} s")


class ClientRequests:
    """Used by the server's thread. It never waits: what a client does not read in time is dropped with its requests.

    send:       to a connection, without waiting; False if it is gone, or does not read
    reports:    tell the scheduler what has come; None: there is none
    most_of_one, timeout_s: see `EngineServer`
    core:       that serves them; None: it has no workers at the moment
    is_leaving: no new ones are taken
    """

    def __init__(
        self,
        send: Callable[[bytes, bytes], bool],
        clock: Callable[[], float],
        reports: EngineReports | None,
        *,
        instance: str,
        most_of_one: int,
        timeout_s: float,
    ) -> None:
        self._send_bytes, self._clock, self._reports = send, clock, reports
        self._instance, self._most_of_one, self._timeout_s = instance, most_of_one, timeout_s
        self.core: Core | None = None
        self.is_leaving = False
        self._clients = Clients()

    # ---- who there is ----

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def __len__(self) -> int:
        """Requests that are served, or are on their way with their embeddings."""
        return self._clients.num_requests

    @property
    def ids(self) -> list[str]:
        """Of all of them, in the order in which they came."""
        return self._clients.request_ids

    def heard(self, identity: bytes) -> None:
        """A client has said something."""
        self._clients.heard(identity, self._clock())

    def drop(self, identity: bytes, why: str) -> None:
        """Forget a client, and abort what it has."""
        request_ids = self._clients.drop(identity)
        if request_ids:
            log.warning("client %s %s: aborting its %d requests", identity.hex(), why, len(request_ids))
        for request_id in request_ids:
            self._abort(request_id)

    def drop_silent(self) -> None:
        """Those who have not said for long that they are there."""
        for identity in self._clients.silent_since(self._clock() - self._timeout_s):
            self.drop(identity, f"said nothing for {self._timeout_s:g} s")

    # ---- what clients say ----

    def submit(self, identity: bytes, message: Submit) -> None:
        request = message.request
        try:
            check_request(request)
            if request.embeds:
                raise InvalidRequestError("embeddings do not come with their request: they follow it in parts")
            if self._reports is not None:
                self._reports.received(request.request_id)
            if self._clients.owner_of(request.request_id) is not None:
                raise InvalidRequestError(f"request id {request.request_id!r} is taken; ids must differ")
            if self._clients.num_of(identity, request.tenant) >= self._most_of_one:
                raise OverloadedError(
                    f"{self._most_of_one} requests of this client are at this engine already: ask the scheduler where "
                    "there is room"
                )
            if message.embeds:
                self._submit_with_embeds(identity, message)
            else:
                self._accepting().add(request)
        except HeadwiseError as error:
            self.tell(identity, failure(error, message.key, request.request_id))
            return
        self._clients.begin(request.request_id, identity, request.tenant)

    def _submit_with_embeds(self, identity: bytes, message: Submit) -> None:
        """Ask for those embeddings that the cache does not make unnecessary."""
        request, core = message.request, self._accepting()
        cached = 0 if message.needs_all else core.cached_tokens(request)
        first = next((at for at, each in enumerate(message.embeds) if each.end > cached), len(message.embeds))
        left_out, wanted = message.embeds[:first], message.embeds[first:]
        lacks = max((each.end for each in left_out), default=0)
        if not wanted:
            core.add(request, lacks=lacks)
            return
        core.check(request, wanted, lacks)
        self._embeds.begin(replace(message, embeds=wanted), self._clock(), lacks)
        self.tell(identity, EmbedsWanted(request.request_id, wanted[0].start))

    def take_embeds(self, identity: bytes, part: EmbedsPart) -> None:
        """The next part of a request's embeddings; with the last one the request begins."""
        self.tell(identity, EmbedsTaken(part.request_id))
        if self._clients.owner_of(part.request_id) != identity:
            return
        key = self._embeds.key_of(part.request_id)
        try:
            lacks = self._embeds.lacks_of(part.request_id)
            request = self._embeds.take(part, self._clock())
            if request is not None:
                self._accepting().add(request, knows_embeds=True, lacks=lacks)
        except HeadwiseError as error:
            self.end(part.request_id, error, key)

    def abort(self, identity: bytes, request_id: str) -> None:
        """A client wants its request no more."""
        if self._clients.owner_of(request_id) == identity:
            self._abort(request_id)

    def ping(self, identity: bytes, message: Ping) -> None:
        """A client asks whether the engine is there, and whether it serves these requests still."""
        if len(message.request_ids) > MAX_PING_REQUESTS:
            raise wire.WireError(
                f"a ping names {len(message.request_ids)} requests; at most {MAX_PING_REQUESTS} are allowed"
            )
        self.tell(identity, Pong(self._instance))
        for request_id in message.request_ids:
            if self._clients.owner_of(request_id) != identity:
                self.tell(identity, failure(_NOT_SERVED, request_id=request_id))

    # ---- what clients are told ----

    def tell(self, identity: bytes, message: Any) -> None:
        """Send without waiting; a client that is gone or does not read is dropped. Its connection tells it so."""
        if not self._send_bytes(identity, wire.encode(message)):
            self.drop(identity, "is gone, or does not read its messages")

    def deliver(self, deltas: Iterable[OutputDelta]) -> None:
        """What the core has computed: one message for each client."""
        by_client: defaultdict[bytes, list[OutputDelta]] = defaultdict(list)
        for delta in deltas:
            owner = self._clients.owner_of(delta.request_id)
            if owner is not None:
                by_client[owner].append(delta)
            if delta.finish_reason is not None:
                self._clients.end(delta.request_id)
            if delta.finish_reason is FinishReason.ERROR and self._reports is not None:
                self._reports.fault(f"request {delta.request_id} failed: {delta.error}")
        for identity, its in by_client.items():
            self.tell(identity, Outputs(tuple(its)))

    def end(self, request_id: str, error: HeadwiseError, key: int = 0) -> None:
        """key: of the `Submit`, where the request has not begun"""
        self._embeds.drop(request_id)
        identity = self._clients.end(request_id)
        if identity is not None:
            self.tell(identity, failure(error, key, request_id))

    def end_lacking(self) -> None:
        """Have clients submit again what needs embeddings that were left out."""
        self._end_in_core(() if self.core is None else self.core.take_lacking(), _LACKING)

    def end_stalled(self) -> None:
        """Those of whose embeddings nothing has come for long."""
        for request_id in self._of_clients(self._embeds.stalled_since(self._clock() - STALLED_S)):
            self.end(request_id, _STALLED)

    def send_away(self, request_ids: Iterable[str]) -> None:
        """Other engines serve these."""
        self._end_in_core(request_ids, _LEAVING)

    def send_away_not_begun(self) -> None:
        """Those of which nothing was computed."""
        self.send_away(self._of_clients(self._embeds.request_ids))
        if self.core is not None:
            self.send_away(self.core.not_begun())

    def _end_in_core(self, request_ids: Iterable[str], error: HeadwiseError) -> None:
        for request_id in request_ids:
            self.end(request_id, error)
            if self.core is not None:
                self.core.abort(request_id)

    # ---- the core ----

    def _accepting(self) -> Core:
        """The core, if it takes requests."""
        if self.is_leaving:
            raise _LEAVING
        if self.core is None:
            raise _NO_WORKERS
        return self.core

    @property
    def _embeds(self) -> ArrivingEmbeds:
        """Those that are to come: they go with the core."""
        return ArrivingEmbeds() if self.core is None else self.core.arriving

    def _of_clients(self, request_ids: Iterable[str]) -> list[str]:
        """Of these requests, those that clients have: others are prompts that engines have computed here."""
        return [request_id for request_id in request_ids if self._clients.owner_of(request_id) is not None]

    def _abort(self, request_id: str) -> None:
        self._clients.end(request_id)
        self._embeds.drop(request_id)
        if self.core is not None:
            self.core.abort(request_id)
