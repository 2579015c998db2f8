"""The deployment's front: checks and tokenises requests, and tells clients which engine to go to."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from headwise.errors import DeploymentError, HeadwiseError, OverloadedError
from headwise.runtime import wire
from headwise.runtime.client_protocol import (
    MAX_MESSAGE_BYTES,
    Engines,
    EngineStatus,
    GetEngines,
    GetStats,
    Ping,
    Pong,
    Route,
    Stats,
    Ticket,
    failure,
)
from headwise.runtime.request import GenerateRequest
from headwise.runtime.routing import EngineTable

log = logging.getLogger(__name__)

TOKENIZER_THREADS = 4
_POLL_MS = 100


class Prepare(Protocol):
    """`headwise.runtime.front_door.FrontDoor.prepare`: called from several threads."""

    def __call__(
        self, *, prompt: Any, messages: Any, sampling: dict[str, Any], priority: int, cache_salt: str
    ) -> GenerateRequest: ...


class SchedulerServer:
    """Serves at ``tcp://host:port`` on one thread; tokenises on a few others.

    secret: of the deployment; engines report with it
    replicas: engines of the deployment
    max_pending: requests being tokenised at once; more are refused with `OverloadedError`
    """

    def __init__(
        self,
        prepare: Prepare,
        host: str,
        port: int,
        *,
        secret: str,
        model: str,
        replicas: int = 1,
        max_pending: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepare = prepare
        self._secret = secret
        self._model = model
        self._replicas = replicas
        self._max_pending = max_pending
        self._clock = clock
        self._open_sockets(host, port)
        self._table = EngineTable()
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="headwise-tokenizer")
        self._tokenised: queue.SimpleQueue[tuple[bytes, int, GenerateRequest | HeadwiseError]] = queue.SimpleQueue()
        self._wake_lock = threading.Lock()
        self._counts = {"routed": 0, "refused": 0, "malformed": 0}
        self._pending = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-scheduler", daemon=True)

    def _open_sockets(self, host: str, port: int) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 2 * self._max_pending)  # no ticket is lost to a client that is slow
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise DeploymentError(
                f"cannot listen on {host}:{port}: {error}; choose another --port (0 takes a free one) or --host"
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._woken = self._context.socket(zmq.PULL)
        self._woken.bind("inproc://tokenised")
        self._waker = self._context.socket(zmq.PUSH)
        self._waker.connect("inproc://tokenised")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        self._context.destroy(linger=100)

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        for socket in (self._socket, self._woken):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(_POLL_MS))
            if self._woken in ready:
                self._woken.recv()
                self._send_tickets()
            if self._socket in ready:
                self._receive()

    def _receive(self) -> None:
        identity, *frames = self._socket.recv_multipart()
        try:
            if len(frames) != 1:
                raise wire.WireError(f"a message must be one frame, got {len(frames)}")
            message = wire.decode(frames[0], Route, Ping, GetStats, GetEngines, EngineStatus)
        except HeadwiseError as error:
            self._counts["malformed"] += 1
            self._send(identity, failure(error))
            return
        if isinstance(message, Route):
            self._route(identity, message)
        elif isinstance(message, EngineStatus):
            if message.secret == self._secret:
                self._table.update(message, self._clock())
        elif isinstance(message, GetStats):
            self._send(identity, Stats(message.key, self._stats()))
        elif isinstance(message, GetEngines):
            self._send_engines(identity, message.key)
        else:
            self._send(identity, Pong())

    def _send_engines(self, identity: bytes, key: int) -> None:
        try:
            answer: Any = Engines(key, self._table.endpoints(self._clock(), self._replicas))
        except HeadwiseError as error:
            answer = failure(error, key)
        self._send(identity, answer)

    def _route(self, identity: bytes, route: Route) -> None:
        if self._pending >= self._max_pending:
            self._counts["refused"] += 1
            error = OverloadedError(f"{self._max_pending} requests are being tokenised already; try again later")
            self._send(identity, failure(error, route.key))
            return
        self._pending += 1
        self._pool.submit(self._tokenise, identity, route)

    def _tokenise(self, identity: bytes, route: Route) -> None:
        """On a thread of the pool: hand the prepared request, or the error, back to the server's thread."""
        outcome: GenerateRequest | HeadwiseError
        try:
            outcome = self._prepare(
                prompt=route.text if route.token_ids is None else route.token_ids,
                messages=route.messages,
                sampling=route.sampling,
                priority=route.priority,
                cache_salt=route.cache_salt,
            )
        except HeadwiseError as error:
            outcome = error
        except Exception as error:
            log.exception("a request could not be prepared")
            outcome = HeadwiseError(f"the request could not be prepared: {type(error).__name__}: {error}")
        self._tokenised.put((identity, route.key, outcome))
        with self._wake_lock:
            self._waker.send(b"")

    def _send_tickets(self) -> None:
        identity, key, outcome = self._tokenised.get()
        self._pending -= 1
        try:
            if isinstance(outcome, HeadwiseError):
                raise outcome
            endpoint = self._table.pick(self._clock()).endpoint
        except HeadwiseError as error:
            self._counts["refused"] += 1
            self._send(identity, failure(error, key))
            return
        self._counts["routed"] += 1
        self._send(identity, Ticket(key, endpoint, outcome))

    def _stats(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "scheduler": {**self._counts, "pending": self._pending},
            "engines": self._table.stats(self._clock()),
        }

    def _send(self, identity: bytes, message: Any) -> None:
        """Clients that are gone, or do not read, lose the message."""
        import zmq

        self._socket.send_multipart((identity, wire.encode(message)), zmq.NOBLOCK)
