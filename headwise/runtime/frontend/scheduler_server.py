"""The global scheduler's server: checks and tokenises requests, and tells clients which engine to go to.

A restarted scheduler needs no saved state: engines report twice a second, the store has the index, clients ask again.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from headwise.errors import DeploymentError, HeadwiseError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.frontend.client_socket import listen
from headwise.runtime.frontend.encoder_service import EncoderService
from headwise.runtime.frontend.engine_reports import EngineReports
from headwise.runtime.frontend.fleet_view import FleetView
from headwise.runtime.frontend.index_view import IndexClient, IndexView
from headwise.runtime.frontend.pending_calls import PendingCalls
from headwise.runtime.frontend.preprocessing_pool import PreprocessingPool, RequestPreprocessor
from headwise.runtime.frontend.prompts import any_size
from headwise.runtime.frontend.routing import Router, RouterOptions
from headwise.runtime.frontend.scaling import Exchange, observe
from headwise.runtime.frontend.tcp_proxy import TcpProxy
from headwise.runtime.frontend.users_service import UsersService, UsersSource
from headwise.runtime.frontend.weights_service import WeightsService
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.encoder_messages import EncoderStatus, GetEncoders
from headwise.runtime.protocol.messages import (
    CLIENT_TIMEOUT_S,
    Engines,
    EngineStatus,
    Failed,
    FindPrefix,
    GetEngines,
    GetStats,
    Ping,
    Pong,
    Reroute,
    Roll,
    Route,
    Scale,
    Stats,
    UpdateWeights,
    Withdraw,
    failure,
)
from headwise.runtime.protocol.users import NO_USERS, LetIn, Users
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ServerKeys

log = logging.getLogger(__name__)

_IDLE_MS, _ASKING_MS = 100, 10
_WATCH_S, _SWEEP_S = 0.25, 1.0
_BURST, _BURST_S = 256, 0.1
"""Most messages, and seconds, before anything else is done: a round that takes long looks like a thread that hangs."""


class SchedulerServer:
    """Serves at ``tcp://host:port`` on one thread, behind a `TcpProxy`. A few other threads tokenise.

    secret:     of the deployment; engines report with it
    keys:       only clients and engines with these keys may connect, encrypted; None: all may
    users:      that may connect, until ``users_source`` tells of others
    users_are_known: whether these are those of now, and not of some time ago, so that engines may know of others
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
    adapters:   of the configuration
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
        users: Users = NO_USERS,
        users_source: UsersSource | None = None,
        users_are_known: bool = True,
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
        adapters: str = "",
    ) -> None:
        self._model = model
        self._router = Router(routing or RouterOptions())
        self._index = IndexView(store, index_timeout_s)
        self._clock = LivenessClock(clock)
        self.instance = instance or secrets.token_hex(8)
        self.loop_count = 0
        self._proxy = TcpProxy(host, port)
        self.port = self._proxy.port
        self._context = open_context()
        self._listener = listen(self._context, "127.0.0.1", 0, keys, users.by_key)  # clients connect through the proxy
        self._preprocessing = PreprocessingPool(self._context, tokenizers)
        relay, send = self._proxy.relay, self._send
        self._let_in, is_told = LetIn(self._listener, users), keys is not None and users_are_known
        self._users = UsersService(self._let_in, secret, users_source, is_told, send, self._router.note)
        self._encoders = EncoderService(secret, without_images, relay, self._clock, send, self._users)
        may_split = self._router.options.peer_loads
        self._fleet = FleetView(exchange or Exchange(), replicas, self.instance, may_split, self._clock, send)
        parts = self._router, self._fleet, preprocessor, self._clock, send, hold_s
        self._weights = WeightsService(secret, *parts, adapters)
        self._engines = EngineReports(
            secret, self._router, relay, self._clock, self._listener.send, self._weights, self._users
        )
        self._calls = PendingCalls(
            self._router,
            self._index,
            self._fleet,
            preprocessor,
            self._preprocessing,
            self._clock,
            send,
            size=size,
            max_queued=max_queued,
            hold_s=hold_s,
            share_of=self._let_in.share_of,
        )
        self._handlers: dict[type, Callable[[bytes, Any], None]] = {
            Route: self._calls.route,
            Reroute: self._calls.reroute,
            Withdraw: self._calls.withdraw,
            FindPrefix: self._calls.find_prefix,
            Ping: self._take_ping,
            GetStats: self._send_stats,
            GetEngines: self._send_engines,
            Scale: self._fleet.scale,
            Roll: self._fleet.roll,
            UpdateWeights: self._weights.update,
            EngineStatus: self._engines.take,
            GetEncoders: self._encoders.find,
            EncoderStatus: self._encoders.take,
        }
        self._heard: dict[bytes, float] = {}
        self._malformed = 0
        self._watch_at = self._sweep_at = self._clock()
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
            poller.poll(_ASKING_MS if self._calls.is_asking else _IDLE_MS)
            self._receive()
            self._calls.serve()
            self._watch()
            self.loop_count += self._proxy.is_open
        if self._has_left:
            return
        stopping = DeploymentError("the deployment is stopping")
        self._calls.refuse_all(stopping)
        for identity in self._listener.peers():  # idle clients too: their next call fails at once
            self._send(identity, failure(stopping))

    def _receive(self) -> None:
        until = self._clock() + _BURST_S
        for identity, frames in self._listener.receive(_BURST):
            self._heard[identity] = self._clock()
            try:
                if len(frames) != 1:
                    raise wire.WireError(f"a message must be one frame, got {len(frames)}")
                self._take(identity, self._let_in.as_sent(wire.decode(frames[0], *self._handlers)))
            except HeadwiseError as error:
                self._malformed += 1
                self._send(identity, failure(error))
            if self._clock() > until:
                break
        if ended := self._listener.ended():
            self._forget_peers(frozenset(ended))

    def _forget_peers(self, ended: frozenset[bytes]) -> None:
        """Forget peers whose connections have ended. A client that lives asks again over a new connection."""
        for identity in ended:
            self._heard.pop(identity, None)
        for part in (self._engines, self._encoders, self._fleet, self._weights, self._calls):
            part.forget(ended)

    # ---- messages ----

    def _take(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Failed):
            self._send(identity, message)
        else:
            self._handlers[type(message)](identity, message)

    def _take_ping(self, identity: bytes, ping: Ping) -> None:
        self._send(identity, Pong(self.instance))

    def _send_engines(self, identity: bytes, get: GetEngines) -> None:
        try:
            answer: Any = Engines(get.key, self._router.endpoints(self._clock(), self._fleet.state.expected))
        except HeadwiseError as error:
            answer = failure(error, get.key)
        self._send(identity, answer)

    def _send_stats(self, identity: bytes, get: GetStats) -> None:
        now = self._clock()
        stats = {
            "model": self._model,
            "scheduler": {
                **self._calls.stats(get.tenant),
                "malformed": self._malformed,
                "strangers": self._engines.strangers + self._encoders.strangers,
                "instance": self.instance,
                **self._router.stats(),
                "relay": dict(self._proxy.relay.counts),
                "index": dict(self._index.counts),
            },
            "engines": self._router.table.stats(now),
            "encoders": self._encoders.stats(now),
            "index": self._index.stats(),
            "faults": self._router.faults(),
            "fleet": self._fleet.stats(),
            "weights": self._weights.stats(),
        }
        self._send(identity, Stats(get.key, stats))

    def _send(self, identity: bytes, message: Any) -> None:
        """Send, unless the client is gone. A client that does not read is disconnected, and then asks again."""
        self._listener.send(identity, wire.encode(message))

    # ---- timers ----

    def _watch(self) -> None:
        now = self._clock()
        if now < self._watch_at:
            return
        self._watch_at = now + _WATCH_S
        self._router.table.set_roles(self._fleet.state.roles)
        for silence in self._router.watch(now):
            log.warning("%s has been silent for %g s", silence.engine, silence.for_s)
            if silence.is_given_up:
                self._index.gone(silence.engine, silence.epoch)
                self._fleet.exchange.note_silent(silence.engine)
        if self._index.service(now):
            self._router.note("the index does not answer: routed without it")
        self._fleet.exchange.observe(observe(self._router.table, self._router.options, now, *self._calls.held()))
        self._calls.watch(now)
        self._users.watch()
        self._encoders.answer(now)
        self._fleet.answer(now)
        self._weights.answer(now)
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._heard = {each: at for each, at in self._heard.items() if now - at <= CLIENT_TIMEOUT_S}
            self._calls.sweep(self._heard, now)
