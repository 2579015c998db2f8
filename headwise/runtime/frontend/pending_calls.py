"""Clients' requests on their way to an engine, and their questions for who has a prefix.

Route --threads--> tokens and hashes --> queue --> ask the index --> choose an engine, reserve a place --> Ticket
                                           ^                              |
                                           +---- no engine can take it ---+
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError, NotReadyError, OverloadedError
from headwise.prompt_turns import ShareOf
from headwise.runtime.frontend.client_socket import Send
from headwise.runtime.frontend.dispatcher import Dispatched, Dispatcher, PendingCall
from headwise.runtime.frontend.fleet_view import FleetView
from headwise.runtime.frontend.index_view import IndexView
from headwise.runtime.frontend.preprocessing_pool import (
    Job,
    Outcome,
    PreparedRequest,
    PreprocessingPool,
    RequestPreprocessor,
    Work,
)
from headwise.runtime.frontend.routing import Matches, Router
from headwise.runtime.frontend.routing.base import RESERVATION_S, Choice
from headwise.runtime.frontend.senders import Senders, TenantCounts
from headwise.runtime.protocol.messages import (
    FORGOTTEN,
    FindPrefix,
    Pong,
    PrefixFound,
    Reroute,
    Route,
    Ticket,
    Waits,
    Withdraw,
    failure,
)
from headwise.runtime.protocol.prompt_items import PromptItem
from headwise.runtime.protocol.request import GenerateRequest, Retention
from headwise.runtime.protocol.request_checks import check_request
from headwise.storage.index.messages import TIERS

ENGINES_REPORT_S = 15.0
"""A scheduler that has just started waits so long for the reports of engines before it refuses requests."""

TELL_S = 1.0
"""A request that waits so long, and no engine serves, is told so: by then the owner has decided what to do about it."""

DELAY_S = 0.2
"""A request that waited so long for an engine counts as delayed. The index alone does not take that long."""


class PendingCalls:
    """Those that are not answered yet. Used by the scheduler's thread.

    preprocessor: makes requests, on threads of ``pool``
    size:       see `SchedulerServer`
    max_queued: calls being prepared or waiting for an engine; more are refused with `OverloadedError`
    hold_s:     longest wait of a call while no engine reports
    share_of:   of tenants
    """

    def __init__(
        self,
        router: Router,
        index: IndexView,
        fleet: FleetView,
        preprocessor: RequestPreprocessor,
        pool: PreprocessingPool,
        clock: Callable[[], float],
        send: Send,
        *,
        size: Callable[[Any, Any], int],
        max_queued: int,
        hold_s: float,
        share_of: ShareOf,
    ) -> None:
        self._router, self._fleet = router, fleet
        self._preprocessor, self._pool = preprocessor, pool
        self._clock, self._send = clock, send
        self._size, self._max_queued, self._hold_s = size, max_queued, hold_s
        self._dispatcher = Dispatcher(router, index, clock, share_of)
        self._numbers = itertools.count(1)
        self._calls: dict[tuple[bytes, int], PendingCall] = {}
        self._senders, self._tenants = Senders(), TenantCounts()
        self._tickets: dict[tuple[bytes, int], tuple[str, float]] = {}  # request ids that may still be withdrawn
        self._counts = dict.fromkeys(("routed", "rerouted", "delayed", "refused", "withdrawn"), 0)
        self._started, self._alive_at = clock(), -math.inf

    @property
    def is_asking(self) -> bool:
        """Whether an answer of the index is awaited."""
        return self._dispatcher.is_asking

    def held(self) -> tuple[int, int]:
        """Requests that wait for an engine, and the tokens of their prompts."""
        return self._dispatcher.held()

    def stats(self, tenant: str = "") -> dict[str, Any]:
        """tenant: the only one that is told of; empty: all are"""
        tenants = self._tenants.stats(self._senders.calls)
        return {
            **self._counts,
            "pending": len(self._calls),
            "queued": len(self._dispatcher),
            "max_queued": self._max_queued,
            "tenants": {name: counts for name, counts in tenants.items() if tenant in ("", name)},
        }

    # ---- in ----

    def route(self, identity: bytes, route: Route) -> None:
        """A client asks which engine to go to."""
        call = self._new_call(identity, route.key, (route.priority, 1), route.tenant, route.cache_salt)
        call.session = route.session
        self._prepare_prompt(call, route, route.sampling, route.priority, route.retention, route.tenant)

    def reroute(self, identity: bytes, reroute: Reroute) -> None:
        """The request was accepted before, so it goes before new ones, even where new ones are refused."""
        request = reroute.request
        call = self._new_call(identity, reroute.key, (request.priority, 0), request.tenant, request.cache_salt)
        try:
            check_request(request)
            if request.embeds:
                raise InvalidRequestError("embeddings go to engines, with Submit, and not to the scheduler")
        except InvalidRequestError as error:
            self._fail(call, error)
            return
        if reroute.lost:
            self._router.suspect(reroute.lost, self._clock())
        call.lost = reroute.lost
        self._prepare(call, lambda: self._prepared(request), 2 * self._max_queued)

    def find_prefix(self, identity: bytes, find: FindPrefix) -> None:
        """A client asks who has how much of a prompt."""
        call = self._new_call(identity, find.key, (0, 1))
        call.is_lookup = True
        self._prepare_prompt(call, find, {"max_tokens": 1}, 0)

    def withdraw(self, identity: bytes, withdraw: Withdraw) -> None:
        """A client does not want an answer any more, or the place that it got."""
        call = self._calls.get((identity, withdraw.key))
        if call is not None:
            self._counts["withdrawn"] += 1
            self._close(call)
        elif (ticket := self._tickets.pop((identity, withdraw.key), None)) is not None:
            self._counts["withdrawn"] += 1
            self._router.release(ticket[0])

    def _prepare_prompt(
        self,
        call: PendingCall,
        asked: Route | FindPrefix,
        sampling: dict[str, Any],
        priority: int,
        retention: Retention | None = None,
        tenant: str = "",
    ) -> None:
        prompt = asked.text if asked.token_ids is None else asked.token_ids
        chat, salt, adapter = asked.chat, asked.cache_salt, asked.adapter
        items = [
            PromptItem(start, end - start, key, columns=columns, later=later)
            for start, end, key, columns, later in asked.extra_keys
        ]

        def prepare() -> PreparedRequest:
            request = self._preprocessor.prepare(
                prompt=prompt,
                messages=chat,
                sampling=sampling,
                priority=priority,
                cache_salt=salt,
                items=items,
                adapter=adapter,
                images=asked.images,
            )
            return self._prepared(replace(request, retention=retention, tenant=tenant))

        self._prepare(call, prepare, self._max_queued, prompt, chat)

    def _prepared(self, request: GenerateRequest) -> PreparedRequest:
        return PreparedRequest(request, self._preprocessor.hashes(request))

    def _new_call(
        self, identity: bytes, key: int, rank: tuple[int, int], tenant: str = "", salt: str = ""
    ) -> PendingCall:
        return PendingCall(identity, key, self._clock(), rank, next(self._numbers), tenant, salt)

    def _prepare(self, call: PendingCall, work: Work, limit: int, prompt: Any = None, messages: Any = None) -> None:
        if (call.identity, call.key) in self._calls:
            return  # the client did not know whether its first message arrived
        senders, is_full = self._senders, len(self._calls) >= limit
        if is_full and not senders.who_has_more(senders.calls, call.sender, 1):
            self._fail(call, self._overloaded())
            return
        try:
            call.num_bytes = self._size(prompt, messages)
        except HeadwiseError as error:
            self._fail(call, error)
            return
        if is_full and not self._refuse_one(senders.who_has_more(senders.calls, call.sender, 1)):
            self._fail(call, self._overloaded())
            return
        job = Job(call, work, call.num_bytes, lambda: not call.is_over)
        while not self._pool.submit(job):
            greedy = senders.who_has_more(senders.text, call.sender, call.num_bytes)
            if not self._refuse_one(greedy, is_tokenised=False):
                self._fail(call, OverloadedError("too much text waits to be tokenised already; try again later"))
                return
        self._calls[call.identity, call.key] = call
        senders.add(call)

    def _refuse_one(self, sender: str, *, is_tokenised: bool = True) -> bool:
        """Refuse the latest new call of a sender; whether there was one.

        is_tokenised: it may be one that is
        """
        its = (each for each in self._calls.values() if each.sender == sender and each.rank[1])
        latest = max((each for each in its if is_tokenised or not each.prepared), key=_number, default=None)
        if latest is None:
            return False
        self._close(latest)
        self._fail(latest, self._overloaded())
        return True

    def _take_prepared(self, call: PendingCall, outcome: Outcome) -> None:
        if call.is_over:
            return
        if isinstance(outcome, HeadwiseError):
            self._close(call)
            self._fail(call, outcome)
            return
        self._senders.tokenised(call)
        call.prepared, call.prepared_at = outcome, self._clock()
        self._dispatcher.add(call)

    # ---- out ----

    def serve(self) -> None:
        """Queue what was tokenised, and answer what can be answered by now. Call it in every loop."""
        for call, outcome in self._pool.finished():
            self._take_prepared(call, outcome)
        self._refuse_without_engines()
        for done in self._dispatcher.dispatch():
            if isinstance(done, Dispatched):
                self._send_ticket(done.call, done.choice)
            else:
                self._answer_lookup(done.call, done.matches)

    def _refuse_without_engines(self) -> None:
        """Refuse what waits for an engine where none will come."""
        fleet = self._fleet.state
        if fleet.is_closing:
            self._refuse_waiting(DeploymentError("the deployment is stopping"))
        may_wait = self._router.num_engines or self._fleet.is_awaited
        if not may_wait and self._clock() - self._started > ENGINES_REPORT_S:
            why = fleet.reason if fleet.number == 0 else "they are starting, or were lost"
            self._refuse_waiting(NotReadyError(f"no engine is ready: {why}; try again later"))

    def _refuse_waiting(self, error: HeadwiseError) -> None:
        for call in self._dispatcher.clear():
            self._close(call)
            self._fail(call, error)

    def _answer_lookup(self, call: PendingCall, matches: Matches | None) -> None:
        assert call.prepared is not None
        self._close(call)
        if matches is None and call.prepared.hashes:
            self._fail(call, DeploymentError("the index does not answer: it is starting, or was lost; try again later"))
            return
        block_size, found = self._router.options.block_size, matches or {}
        nothing = (0,) * len(TIERS)
        engines = {
            name: {tier: blocks * block_size for tier, blocks in zip(TIERS, found.get(name, nothing), strict=True)}
            for name in self._router.alive(self._clock())
        }
        self._send(call.identity, PrefixFound(call.key, call.prepared.num_tokens, engines))

    def _send_ticket(self, call: PendingCall, choice: Choice) -> None:
        assert call.prepared is not None
        request, now = call.prepared.request, self._clock()
        self._close(call)
        self._counts["routed"] += 1
        self._tenants.routed(call.tenant, call.prepared.num_tokens)
        self._counts["rerouted"] += bool(call.lost)
        self._counts["delayed"] += now - call.prepared_at > DELAY_S
        self._tickets[call.identity, call.key] = request.request_id, now + RESERVATION_S
        self._send(call.identity, Ticket(call.key, choice.endpoint, replace(request, peer=choice.hint)))

    def _close(self, call: PendingCall) -> None:
        """Forget a call, which needs no answer any more or gets it now."""
        call.is_over = True
        if self._calls.pop((call.identity, call.key), None) is not None:
            self._senders.remove(call)
        self._dispatcher.drop(call)

    def _fail(self, call: PendingCall, error: HeadwiseError) -> None:
        self._counts["refused"] += 1
        self._tenants.refused(call.tenant)
        self._send(call.identity, failure(error, call.key))

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            f"{len(self._calls)} requests wait for an engine already (max_queued {self._max_queued}): "
            f"{self._router.describe(self._clock())}; try again later"
        )

    # ---- those that wait ----

    def watch(self, now: float) -> None:
        """Tell those that wait for an engine that none serves, and forget places that were taken or have expired."""
        if not self._router.num_engines:
            self._tell_waiting(now)
        while self._tickets:
            which, (_, until) = next(iter(self._tickets.items()))
            if until > now:
                break
            del self._tickets[which]

    def _tell_waiting(self, now: float) -> None:
        number = self._fleet.state.number
        asked_for = f"asked for {number}" if number else "none is asked for yet"
        for call in self._dispatcher.waiting():
            if not call.is_told and now - call.prepared_at > TELL_S:
                call.is_told = True
                self._send(call.identity, Waits(call.key, f"waiting for an engine to start (0 serve; {asked_for})"))

    def sweep(self, heard: Container[bytes], now: float) -> None:
        """Drop the calls of clients that are not ``heard`` any more, and refuse those that have waited too long."""
        if self._router.alive(now):
            self._alive_at = now
        forgotten = set()
        for call in list(self._calls.values()):
            if call.identity not in heard:
                self._close(call)
                forgotten.add(call.identity)
            elif now - max(call.since, self._alive_at) > self._hold_s:
                self._close(call)
                self._fail(
                    call,
                    NotReadyError(
                        f"no engine has reported for {self._hold_s:g} s: {self._router.describe(now)}; try again later"
                    ),
                )
        for identity in forgotten:
            self._send(identity, Pong(FORGOTTEN))

    def forget(self, ended: frozenset[bytes]) -> None:
        """Connections have ended. A client that lives asks again over a new connection."""
        for call in [call for call in self._calls.values() if call.identity in ended]:
            self._close(call)

    def refuse_all(self, error: HeadwiseError) -> None:
        """End all calls with an error."""
        for call in list(self._calls.values()):
            self._close(call)
            self._fail(call, error)


def _number(call: PendingCall) -> int:
    return call.number
