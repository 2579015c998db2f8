"""The global scheduler's server: checks and tokenises requests, and tells clients which engine to go to.

    Route --threads--> tokens and hashes --> queue --> ask the index --> choose an engine, reserve a place --> Ticket
                                               ^                              |
                                               +---- no engine can take it ---+

A restarted scheduler needs no saved state: engines report twice a second, the store has the index, clients ask again.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError, NotReadyError, OverloadedError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.frontend.client_socket import listen
from headwise.runtime.frontend.directory import DirectoryService
from headwise.runtime.frontend.dispatcher import Dispatched, Dispatcher, PendingCall
from headwise.runtime.frontend.encoders import KnownEncoders
from headwise.runtime.frontend.index_view import IndexClient, IndexView
from headwise.runtime.frontend.preprocessing_pool import (
    Job,
    Outcome,
    PreparedRequest,
    PreprocessingPool,
    RequestPreprocessor,
    Work,
)
from headwise.runtime.frontend.prompts import any_size
from headwise.runtime.frontend.routing import Matches, Router, RouterOptions
from headwise.runtime.frontend.routing.base import RESERVATION_S, Choice
from headwise.runtime.frontend.scaling import Exchange, FleetState, Split, observe
from headwise.runtime.frontend.scaling.requests import ScaleRequests
from headwise.runtime.frontend.tcp_proxy import TcpProxy
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import (
    CLIENT_TIMEOUT_S,
    FORGOTTEN,
    Encoders,
    EncoderStatus,
    Engines,
    EngineStatus,
    FindPrefix,
    GetEncoders,
    GetEngines,
    GetStats,
    Ping,
    Pong,
    PrefixFound,
    Reroute,
    Roll,
    Route,
    Scale,
    Scaled,
    Stats,
    Ticket,
    Waits,
    Withdraw,
    failure,
)
from headwise.runtime.protocol.prompt_items import PromptItem
from headwise.runtime.protocol.request import GenerateRequest
from headwise.runtime.protocol.request_checks import check_request
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ServerKeys
from headwise.storage.index.messages import TIERS

log = logging.getLogger(__name__)

ENGINES_REPORT_S = 15.0
"""A scheduler that has just started waits so long for the reports of engines before it refuses requests."""

TELL_S = 1.0
"""A request that waits so long, and no engine serves, is told so: by then the owner has decided what to do about it."""

DELAY_S = 0.2
"""A request that waited so long for an engine counts as delayed. The index alone does not take that long."""

_IDLE_MS, _ASKING_MS = 100, 10
_WATCH_S, _SWEEP_S = 0.25, 1.0
_BURST, _BURST_S = 256, 0.1
"""Most messages, and seconds, before anything else is done: a round that takes long looks like a thread that hangs."""


class SchedulerServer:
    """Serves at ``tcp://host:port`` on one thread, behind a `TcpProxy`. A few other threads tokenise.

    secret:     of the deployment; engines report with it
    keys:       only clients and engines with these keys may connect, encrypted; None: all may
    replicas:   engines of the deployment, until its owner tells by ``exchange``
    routing:    see `RouterOptions`
    max_queued: requests being prepared or waiting for an engine; more are refused with `OverloadedError`
    hold_s:     longest wait of a request while no engine reports. While one reports, even full or asleep, requests wait
    store:      the index of what engines hold; None: there is none. Used by the server's thread only
    index_timeout_s: longest wait of a request for the index's answer
    exchange:   with the owner of the engines: gets the names of engines that have been silent for
                ``routing.engine_timeout_s``, what is observed, and how many engines clients ask for; tells of engines
    size:       returns a lower bound of the bytes of text to tokenise for a prompt or messages; raises
                `InvalidRequestError` if they cannot fit. Called on the server's thread
    tokenizers: prompts that are tokenised at once, each on a thread
    without_images: why images are refused; empty: they are encoded
    instance:   lets clients tell this scheduler from its predecessor; empty: drawn at random
    loop_count: rounds of the thread's loop in which clients could connect; it stands still when the thread hangs
    """

    def __init__(
        self,
        preprocessor: RequestPreprocessor,
        host: str,
        port: int,
        *,
        secret: str,
        model: str,
        keys: ServerKeys | None = None,
        replicas: int = 1,
        routing: RouterOptions | None = None,
        max_queued: int = 4096,
        hold_s: float = 600.0,
        store: IndexClient | None = None,
        index_timeout_s: float = 0.1,
        exchange: Exchange | None = None,
        size: Callable[[Any, Any], int] = any_size,
        tokenizers: int = 2,
        clock: Callable[[], float] = time.monotonic,
        instance: str = "",
        without_images: str = "images are not enabled here",
    ) -> None:
        self._preprocessor = preprocessor
        self._secret = secret
        self._model = model
        self._unknown_fleet = FleetState(replicas, "the owner of the engines has not called yet", expected=replicas)
        self._router = Router(routing or RouterOptions())
        self._max_queued = max_queued
        self._hold_s = hold_s
        self._alive_at = -math.inf
        self._index = IndexView(store, index_timeout_s)
        self._exchange = exchange or Exchange()
        self._clock = LivenessClock(clock)
        self.instance = instance or secrets.token_hex(8)
        self._scale_requests = ScaleRequests(self._exchange, self.instance)
        self.loop_count = 0
        self._proxy = TcpProxy(host, port)
        self.port = self._proxy.port
        self._context = open_context()
        self._listener = listen(self._context, "127.0.0.1", 0, keys)  # clients connect through the proxy
        self._size = size
        self._preprocessing = PreprocessingPool(self._context, tokenizers)
        self._numbers = itertools.count(1)
        self._calls: dict[tuple[bytes, int], PendingCall] = {}
        self._dispatcher = Dispatcher(self._router, self._index, self._clock)
        self._tickets: dict[tuple[bytes, int], tuple[str, float]] = {}  # request ids that may still be withdrawn
        self._heard: dict[bytes, float] = {}
        self._directory = DirectoryService(secret) if self._router.options.peer_loads else None
        self._encoders = KnownEncoders(without_images)
        self._reporters: dict[str, bytes] = {}  # by an engine's endpoint, whose connection its statuses come over
        self._counts = dict.fromkeys(
            ("routed", "rerouted", "delayed", "refused", "withdrawn", "malformed", "strangers"), 0
        )
        self._started = self._clock()
        self._watch_at = self._sweep_at = self._started
        self._stopping, self._closing, self._has_left = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="headwise-scheduler", daemon=True)

    def start(self) -> None:
        self._proxy.start(int(self._listener.endpoint.rpartition(":")[2]))
        self._thread.start()

    def leave(self) -> None:
        """Another scheduler takes its place elsewhere: answer nobody any more, as after a sudden death. After `hang_up`
        clients and engines turn to the other one. Connections to engines that lead through here go on until `stop`.
        """
        self._has_left = True
        self._proxy.leave()
        self._end_loop()

    def hang_up(self) -> None:
        """End the connections of clients and engines, once what is being tokenised is."""
        with self._closing:
            if not self._context.closed:
                self._preprocessing.close()
                self._listener.close()
                close_context(self._context, linger_ms=100)

    @property
    def is_quiet(self) -> bool:
        """Whether, after `hang_up`, nothing leads through here any more."""
        return self._proxy.is_quiet

    def stop(self) -> None:
        self._end_loop()
        self.hang_up()
        self._proxy.close()

    def _end_loop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    # ---- the loop ----

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        for socket in (self._listener.socket, self._preprocessing.socket, self._index.socket):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while not self._stopping.is_set():
            poller.poll(_ASKING_MS if self._dispatcher.is_asking else _IDLE_MS)
            self._receive()
            for call, outcome in self._preprocessing.finished():
                self._take_prepared(call, outcome)
            self._dispatch()
            self._watch()
            self.loop_count += self._proxy.is_open
        if self._has_left:
            return
        stopping = DeploymentError("the deployment is stopping")
        for call in list(self._calls.values()):
            self._close(call)
            self._fail(call, stopping)
        for identity in self._listener.peers():  # idle clients too: their next call fails at once
            self._send(identity, failure(stopping))

    def _receive(self) -> None:
        until = self._clock() + _BURST_S
        for identity, frames in self._listener.receive(_BURST):
            self._heard[identity] = self._clock()
            try:
                if len(frames) != 1:
                    raise wire.WireError(f"a message must be one frame, got {len(frames)}")
                self._take(identity, wire.decode(frames[0], *self._HANDLERS))
            except HeadwiseError as error:
                self._counts["malformed"] += 1
                self._send(identity, failure(error))
            if self._clock() > until:
                break
        if ended := self._listener.ended():
            self._forget_peers(frozenset(ended))

    def _forget_peers(self, ended: frozenset[bytes]) -> None:
        """Forget peers whose connections have ended. A client that lives asks again over a new connection."""
        for identity in ended:
            self._heard.pop(identity, None)
        for endpoint in [endpoint for endpoint, identity in self._reporters.items() if identity in ended]:
            del self._reporters[endpoint]
            self._proxy.relay.forbid(endpoint)
            self._router.disconnected(endpoint, self._clock())
        for endpoint in self._encoders.forget(ended):
            self._proxy.relay.forbid(endpoint)
        self._scale_requests.forget(ended)
        for call in [call for call in self._calls.values() if call.identity in ended]:
            self._close(call)

    def _take(self, identity: bytes, message: Any) -> None:
        self._HANDLERS[type(message)](self, identity, message)

    def _take_status(self, identity: bytes, status: EngineStatus) -> None:
        if status.secret == self._secret:
            self._router.update(status, self._clock())
            self._reporters[status.endpoint] = identity
            self._proxy.relay.allow(status.endpoint, status.address or status.endpoint)
            if self._directory is not None:
                news = self._directory.answer(self._router.table, status)
                if news is not None:
                    self._listener.send(identity, news)
        else:
            self._counts["strangers"] += 1

    def _take_encoder(self, identity: bytes, status: EncoderStatus) -> None:
        if status.secret != self._secret:
            self._counts["strangers"] += 1
            return
        self._encoders.update(identity, status, self._clock())
        self._proxy.relay.allow(status.endpoint, status.address)
        self._tell_encoders()

    def _find_encoders(self, identity: bytes, get: GetEncoders) -> None:
        self._encoders.ask(identity, get.key, self._clock())
        self._tell_encoders()

    def _tell_encoders(self) -> None:
        for identity, key, found in self._encoders.answers(self._clock()):
            self._send(identity, failure(found, key) if isinstance(found, HeadwiseError) else Encoders(key, found))

    def _scale(self, identity: bytes, scale: Scale) -> None:
        try:
            split = self._checked_split(scale.split)
            self._scale_requests.scale((identity, scale.key), scale.replicas, self._clock(), split)
        except HeadwiseError as error:
            self._send(identity, failure(error, scale.key))

    def _checked_split(self, split: tuple[int, int] | None) -> Split | None:
        if split is None:
            return None
        if any(split) and not self._router.options.peer_loads:
            raise InvalidRequestError(
                "prompts are computed apart only where engines fetch blocks from each other: see peer_loads"
            )
        try:
            return Split(*split)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None

    def _roll(self, identity: bytes, roll: Roll) -> None:
        try:
            self._scale_requests.roll((identity, roll.key), self._clock())
        except HeadwiseError as error:
            self._send(identity, failure(error, roll.key))

    def _take_ping(self, identity: bytes, ping: Ping) -> None:
        self._send(identity, Pong(self.instance))

    # ---- requests in ----

    def _route(self, identity: bytes, route: Route) -> None:
        call = self._new_call(identity, route.key, (route.priority, 1))
        call.session = route.session
        self._prepare_prompt(call, route, route.sampling, route.priority)

    def _reroute(self, identity: bytes, reroute: Reroute) -> None:
        """The request was accepted before, so it goes before new ones, even where new ones are refused."""
        call = self._new_call(identity, reroute.key, (reroute.request.priority, 0))
        try:
            check_request(reroute.request)
            if reroute.request.embeds:
                raise InvalidRequestError("embeddings go to engines, with Submit, and not to the scheduler")
        except InvalidRequestError as error:
            self._fail(call, error)
            return
        if reroute.lost:
            self._router.suspect(reroute.lost, self._clock())
        call.lost = reroute.lost
        self._prepare(call, lambda: self._prepared(reroute.request), 2 * self._max_queued)

    def _find_prefix(self, identity: bytes, find: FindPrefix) -> None:
        call = self._new_call(identity, find.key, (0, 1))
        call.is_lookup = True
        self._prepare_prompt(call, find, {"max_tokens": 1}, 0)

    def _prepare_prompt(
        self, call: PendingCall, asked: Route | FindPrefix, sampling: dict[str, Any], priority: int
    ) -> None:
        prompt = asked.text if asked.token_ids is None else asked.token_ids
        chat, salt, adapter = asked.chat, asked.cache_salt, asked.adapter
        items = [PromptItem(start, end - start, key, columns=columns) for start, end, key, columns in asked.extra_keys]

        def prepare() -> PreparedRequest:
            return self._prepared(
                self._preprocessor.prepare(
                    prompt=prompt,
                    messages=chat,
                    sampling=sampling,
                    priority=priority,
                    cache_salt=salt,
                    items=items,
                    adapter=adapter,
                    images=asked.images,
                )
            )

        self._prepare(call, prepare, self._max_queued, prompt, chat)

    def _prepared(self, request: GenerateRequest) -> PreparedRequest:
        return PreparedRequest(request, self._preprocessor.hashes(request))

    def _new_call(self, identity: bytes, key: int, rank: tuple[int, int]) -> PendingCall:
        return PendingCall(identity, key, self._clock(), (*rank, next(self._numbers)))

    def _prepare(self, call: PendingCall, work: Work, limit: int, prompt: Any = None, messages: Any = None) -> None:
        if (call.identity, call.key) in self._calls:
            return  # the client did not know whether its first message arrived
        if len(self._calls) >= limit:
            self._fail(call, self._overloaded())
            return
        try:
            num_bytes = self._size(prompt, messages)
        except HeadwiseError as error:
            self._fail(call, error)
            return
        if self._preprocessing.submit(Job(call, work, num_bytes, lambda: not call.is_over)):
            self._calls[call.identity, call.key] = call
        else:
            self._fail(call, OverloadedError("too much text waits to be tokenised already; try again later"))

    def _take_prepared(self, call: PendingCall, outcome: Outcome) -> None:
        if call.is_over:
            return
        if isinstance(outcome, HeadwiseError):
            self._close(call)
            self._fail(call, outcome)
            return
        call.prepared, call.prepared_at = outcome, self._clock()
        self._dispatcher.add(call)

    def _withdraw(self, identity: bytes, withdraw: Withdraw) -> None:
        call = self._calls.get((identity, withdraw.key))
        if call is not None:
            self._counts["withdrawn"] += 1
            self._close(call)
        elif (ticket := self._tickets.pop((identity, withdraw.key), None)) is not None:
            self._counts["withdrawn"] += 1
            self._router.release(ticket[0])

    # ---- requests out ----

    def _tell_waiting(self, now: float) -> None:
        """Tell those that wait for an engine that none serves."""
        if self._router.num_engines:
            return
        asked_for = f"asked for {self._fleet.number}" if self._fleet.number else "none is asked for yet"
        for call in self._dispatcher.waiting():
            if not call.is_told and now - call.prepared_at > TELL_S:
                call.is_told = True
                self._send(call.identity, Waits(call.key, f"waiting for an engine to start (0 serve; {asked_for})"))

    def _dispatch(self) -> None:
        if self._fleet.is_closing:
            for call in self._dispatcher.clear():
                self._close(call)
                self._fail(call, DeploymentError("the deployment is stopping"))
        may_wait = self._exchange.fleet is not None and self._exchange.fleet.is_awaited
        if not self._router.num_engines and not may_wait and self._clock() - self._started > ENGINES_REPORT_S:
            for call in self._dispatcher.clear():
                self._close(call)
                why = self._fleet.reason if self._fleet.number == 0 else "they are starting, or were lost"
                self._fail(call, NotReadyError(f"no engine is ready: {why}; try again later"))
        for outcome in self._dispatcher.dispatch():
            if isinstance(outcome, Dispatched):
                self._send_ticket(outcome.call, outcome.choice)
            else:
                self._answer_lookup(outcome.call, outcome.matches)

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
        self._counts["rerouted"] += bool(call.lost)
        self._counts["delayed"] += now - call.prepared_at > DELAY_S
        self._tickets[call.identity, call.key] = request.request_id, now + RESERVATION_S
        self._send(call.identity, Ticket(call.key, choice.endpoint, replace(request, peer=choice.hint)))

    def _send_engines(self, identity: bytes, get: GetEngines) -> None:
        try:
            answer: Any = Engines(get.key, self._router.endpoints(self._clock(), self._fleet.expected))
        except HeadwiseError as error:
            answer = failure(error, get.key)
        self._send(identity, answer)

    def _close(self, call: PendingCall) -> None:
        """Forget a call, which needs no answer any more or gets it now."""
        call.is_over = True
        self._calls.pop((call.identity, call.key), None)
        self._dispatcher.drop(call)

    def _fail(self, call: PendingCall, error: HeadwiseError) -> None:
        self._counts["refused"] += 1
        self._send(call.identity, failure(error, call.key))

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            f"{len(self._calls)} requests wait for an engine already (max_queued {self._max_queued}): "
            f"{self._router.describe(self._clock())}; try again later"
        )

    @property
    def _fleet(self) -> FleetState:
        return self._exchange.fleet or self._unknown_fleet

    # ---- timers ----

    def _watch(self) -> None:
        now = self._clock()
        if now < self._watch_at:
            return
        self._watch_at = now + _WATCH_S
        self._router.table.set_roles(self._fleet.roles)
        for silence in self._router.watch(now):
            log.warning("%s has been silent for %g s", silence.engine, silence.for_s)
            if silence.is_given_up:
                self._index.gone(silence.engine, silence.epoch)
                self._exchange.note_silent(silence.engine)
        if self._index.service(now):
            self._router.note("the index does not answer: routed without it")
        self._exchange.observe(observe(self._router.table, self._router.options, now, *self._dispatcher.held()))
        self._tell_waiting(now)
        self._tell_encoders()
        for (identity, key), told in self._scale_requests.answers(now):
            self._send(identity, failure(told, key) if isinstance(told, HeadwiseError) else Scaled(key, told))
        while self._tickets:
            which, (_, until) = next(iter(self._tickets.items()))
            if until > now:
                break
            del self._tickets[which]
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Drop the calls of clients that are gone, and refuse calls that have waited too long."""
        self._heard = {each: at for each, at in self._heard.items() if now - at <= CLIENT_TIMEOUT_S}
        if self._router.alive(now):
            self._alive_at = now
        forgotten = set()
        for call in list(self._calls.values()):
            if call.identity not in self._heard:
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

    # ---- messages out ----

    def _send_stats(self, identity: bytes, get: GetStats) -> None:
        now = self._clock()
        stats = {
            "model": self._model,
            "scheduler": {
                **self._counts,
                "pending": len(self._calls),
                "queued": len(self._dispatcher),
                "max_queued": self._max_queued,
                "instance": self.instance,
                **self._router.stats(),
                "relay": dict(self._proxy.relay.counts),
                "index": dict(self._index.counts),
            },
            "engines": self._router.table.stats(now),
            "encoders": self._encoders.stats(now),
            "index": self._index.stats(),
            "faults": self._router.faults(),
            "fleet": {
                "number": self._fleet.number,
                "reason": self._fleet.reason,
                "replicas": dict(self._fleet.replicas),
                "is_on_demand": self._fleet.is_on_demand,
            },
        }
        self._send(identity, Stats(get.key, stats))

    def _send(self, identity: bytes, message: Any) -> None:
        """Send, unless the client is gone. A client that does not read is disconnected, and then asks again."""
        self._listener.send(identity, wire.encode(message))

    _HANDLERS: ClassVar[dict[type, Callable[[SchedulerServer, bytes, Any], None]]] = {
        Route: _route,
        Reroute: _reroute,
        Withdraw: _withdraw,
        Ping: _take_ping,
        GetStats: _send_stats,
        GetEngines: _send_engines,
        FindPrefix: _find_prefix,
        Scale: _scale,
        Roll: _roll,
        EngineStatus: _take_status,
        GetEncoders: _find_encoders,
        EncoderStatus: _take_encoder,
    }
