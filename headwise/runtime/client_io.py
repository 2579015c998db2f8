"""The client's one I/O thread: its sockets, its calls in progress, and the heartbeats of its peers."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headwise.errors import DeploymentError, EngineDiedError, HeadwiseError, InvalidRequestError, RequestAbortedError
from headwise.runtime import wire
from headwise.runtime.client_protocol import (
    MAX_MESSAGE_BYTES,
    PEER_TIMEOUT_S,
    PING_INTERVAL_S,
    Abort,
    Engines,
    Failed,
    GetEngines,
    GetStats,
    Operate,
    Operated,
    Outputs,
    Ping,
    Pong,
    Route,
    Stats,
    Submit,
    Ticket,
    error_of,
)
from headwise.runtime.request import FinishReason, OutputDelta

if TYPE_CHECKING:
    import zmq

Event = OutputDelta | HeadwiseError
"""What a call hears: deltas, of which one with a finish reason is the last, or an error, which is the last too."""


@dataclass(eq=False)
class Call:
    """One request from route to last delta. ``deliver`` is called on the I/O thread.

    Touched by the I/O thread only, once it was started.
    """

    route: Route
    deliver: Callable[[Event], None]
    request_id: str = ""
    engine: _Peer | None = None


@dataclass(eq=False)
class _Peer:
    """A scheduler or an engine: its socket, when it last spoke, and what is awaited from it."""

    endpoint: str
    socket: zmq.Socket[bytes]
    heard: float = 0.0
    pinged: float = 0.0
    awaiting: dict[Any, Any] = field(default_factory=dict)

    def wait_for(self, key: Any, what: Any, now: float) -> None:
        """Await an answer; the time to give it starts with the first one awaited."""
        if not self.awaiting:
            self.heard = self.pinged = now
        self.awaiting[key] = what


class _Gathered:
    """The answers of several engines to one question: delivered by name when all are there, or the first error then."""

    def __init__(self, names: Iterable[str], deliver: Callable[[dict[str, Any] | HeadwiseError], None]) -> None:
        self._answers: dict[str, Any] = {}
        self._missing = set(names)
        self._deliver = deliver

    def take(self, name: str, answer: Any) -> None:
        self._answers[name] = answer
        self._missing.discard(name)
        if not self._missing:
            errors = (answer for answer in self._answers.values() if isinstance(answer, HeadwiseError))
            self._deliver(next(errors, self._answers))


class ClientIO:
    """Runs calls over ZeroMQ. Its methods may be called from any thread; the rest is the I/O thread's own."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        import zmq

        self.endpoint = endpoint
        self._clock = clock
        self._context = zmq.Context()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._keys = itertools.count(1)
        self._scheduler = self._connect(endpoint)
        self._engines: dict[str, _Peer] = {}
        self._requests: dict[str, Call] = {}
        self._lock = threading.RLock()  # the garbage collector may cancel a stream in the middle of a command
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headwise-client", daemon=True)
        self._thread.start()

    # ---- from any thread ----

    def start(self, call: Call) -> None:
        """Begin a call; raises `DeploymentError` on a closed client, `InvalidRequestError` if it cannot be sent."""
        call.route = replace(call.route, key=next(self._keys))
        try:
            data = wire.encode(call.route)
        except (HeadwiseError, OverflowError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"the request cannot be sent: {error}") from None
        if len(data) > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(f"the request has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
        self._command(lambda: self._ask_scheduler(call.route.key, call, data))

    def cancel(self, call: Call) -> None:
        """Abort a call; nothing is delivered after its `RequestAbortedError`. Finished calls are ignored."""
        self._command(lambda: self._cancel(call), needed=False)

    def ask_stats(self, deliver: Callable[[dict[str, Any] | HeadwiseError], None]) -> None:
        key = next(self._keys)
        self._command(lambda: self._ask_scheduler(key, deliver, wire.encode(GetStats(key))))

    def operate(self, action: str, tier: str, deliver: Callable[[dict[str, int] | HeadwiseError], None]) -> None:
        """Have every engine carry out an operation; when all are done, the blocks that each has forgotten, by name."""
        key = next(self._keys)
        answer = partial(self._ask_engines, action, tier, deliver)
        self._command(lambda: self._ask_scheduler(key, answer, wire.encode(GetEngines(key))))

    def close(self) -> None:
        """End every call with `RequestAbortedError` and close the sockets; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wake()
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()

    def _command(self, command: Callable[[], None], needed: bool = True) -> None:
        with self._lock:
            if not self._closed:
                self._commands.put(command)
                self._wake()
            elif needed:
                raise DeploymentError(f"this client of {self.endpoint} is closed; make a new one")

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full: the thread will wake anyway
            os.write(self._wake_write, b".")

    # ---- the thread ----

    def _connect(self, endpoint: str) -> _Peer:
        import zmq

        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 100)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        return _Peer(endpoint, socket)

    def _run(self) -> None:
        import zmq

        while not self._closed:
            poller = zmq.Poller()
            poller.register(self._wake_read, zmq.POLLIN)
            peers = [self._scheduler, *self._engines.values()]
            for peer in peers:
                poller.register(peer.socket, zmq.POLLIN)
            ready = dict(poller.poll(self._poll_ms()))
            if self._wake_read in ready:
                os.read(self._wake_read, 65536)
            self._run_commands()
            for peer in peers:
                if peer.socket in ready:
                    self._receive(peer)
            self._check_peers()
        self._finish()

    def _poll_ms(self) -> float | None:
        waiting = any(peer.awaiting for peer in (self._scheduler, *self._engines.values()))
        return PING_INTERVAL_S * 250 if waiting else None

    def _run_commands(self) -> None:
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _ask_scheduler(self, key: int, what: Any, data: bytes) -> None:
        self._scheduler.wait_for(key, what, self._clock())
        self._scheduler.socket.send(data)

    def _ask_engines(
        self,
        action: str,
        tier: str,
        deliver: Callable[[dict[str, int] | HeadwiseError], None],
        endpoints: dict[str, str] | HeadwiseError,
    ) -> None:
        if isinstance(endpoints, HeadwiseError):
            deliver(endpoints)
            return
        gathered = _Gathered(endpoints, deliver)
        for name, endpoint in endpoints.items():
            key, peer = next(self._keys), self._engine(endpoint)
            peer.wait_for(key, partial(gathered.take, name), self._clock())
            peer.socket.send(wire.encode(Operate(key, action, tier)))

    def _engine(self, endpoint: str) -> _Peer:
        if endpoint not in self._engines:
            self._engines[endpoint] = self._connect(endpoint)
        return self._engines[endpoint]

    def _cancel(self, call: Call) -> None:
        if self._scheduler.awaiting.pop(call.route.key, None) is not None:
            call.deliver(RequestAbortedError("the request was cancelled"))
        elif call.engine is not None and call.request_id in call.engine.awaiting:
            call.engine.socket.send(wire.encode(Abort(call.request_id)))
            self._end(call, RequestAbortedError(f"request {call.request_id} was cancelled"))

    def _end(self, call: Call, event: Event) -> None:
        """Deliver a call's last event and forget it."""
        self._requests.pop(call.request_id, None)
        if call.engine is not None:
            call.engine.awaiting.pop(call.request_id, None)
        call.deliver(event)

    # ---- messages in ----

    def _receive(self, peer: _Peer) -> None:
        import zmq

        peer.heard = self._clock()
        while not peer.socket.closed:
            try:
                message = wire.decode(peer.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except HeadwiseError as error:
                self._fail_peer(peer, DeploymentError(f"{peer.endpoint} sent what is not a message: {error}"))
                return
            self._take(peer, message)

    def _take(self, peer: _Peer, message: Any) -> None:
        if isinstance(message, Outputs):
            for delta in message.deltas:
                self._take_delta(delta)
        elif isinstance(message, Ticket):
            self._take_ticket(message)
        elif isinstance(message, Failed):
            self._take_failure(peer, message)
        elif isinstance(message, Stats):
            self._answer(peer, message.key, message.stats)
        elif isinstance(message, Engines):
            self._answer(peer, message.key, message.endpoints)
        elif isinstance(message, Operated):
            self._answer(peer, message.key, message.blocks)
        elif not isinstance(message, Pong):
            self._fail_peer(peer, DeploymentError(f"{peer.endpoint} is no headwise deployment: unexpected {message!r}"))

    def _answer(self, peer: _Peer, key: int, answer: Any) -> None:
        deliver = peer.awaiting.pop(key, None)
        if deliver is not None:
            deliver(answer)

    def _take_delta(self, delta: OutputDelta) -> None:
        call = self._requests.get(delta.request_id)
        if call is None:
            return
        if delta.finish_reason is FinishReason.ERROR:
            self._end(call, EngineDiedError(delta.error or "the engine failed"))
        elif delta.finish_reason is FinishReason.ABORT:
            self._end(call, RequestAbortedError(f"request {delta.request_id} was aborted by the engine"))
        elif delta.finish_reason is not None:
            self._end(call, delta)
        else:
            call.deliver(delta)

    def _take_ticket(self, ticket: Ticket) -> None:
        call = self._scheduler.awaiting.pop(ticket.key, None)
        if call is None:
            return
        peer = self._engine(ticket.endpoint)
        call.request_id, call.engine = ticket.request.request_id, peer
        self._requests[call.request_id] = call
        peer.wait_for(call.request_id, call, self._clock())
        peer.socket.send(wire.encode(Submit(ticket.key, ticket.request)))

    def _take_failure(self, peer: _Peer, failed: Failed) -> None:
        if failed.request_id in self._requests:
            self._end(self._requests[failed.request_id], error_of(failed))
            return
        if failed.key == 0 and not failed.request_id:
            self._fail_peer(peer, error_of(failed))
            return
        what = peer.awaiting.pop(failed.key, None)
        if isinstance(what, Call):
            what.deliver(error_of(failed))
        elif what is not None:
            what(error_of(failed))

    # ---- peers ----

    def _check_peers(self) -> None:
        """Ping the peers of which something is awaited; one that stays silent is dead."""
        now = self._clock()
        for peer in [self._scheduler, *self._engines.values()]:
            if not peer.awaiting:
                continue
            if now - peer.heard > PEER_TIMEOUT_S:
                self._fail_peer(peer, self._silence(peer))
            elif now - peer.pinged >= PING_INTERVAL_S:
                peer.pinged = now
                requests = tuple(key for key in peer.awaiting if isinstance(key, str))
                peer.socket.send(wire.encode(Ping(requests)))

    def _silence(self, peer: _Peer) -> HeadwiseError:
        if peer is self._scheduler:
            return DeploymentError(
                f"no deployment answers at {peer.endpoint} (waited {PEER_TIMEOUT_S:g} s); check the address, or start "
                "one with `headwise serve`"
            )
        return EngineDiedError(f"the engine at {peer.endpoint} stopped answering (waited {PEER_TIMEOUT_S:g} s)")

    def _fail_peer(self, peer: _Peer, error: HeadwiseError) -> None:
        """End all that is awaited of a peer; an engine's connection is closed, the next ticket makes a new one."""
        self._fail_calls(peer, error)
        if self._engines.get(peer.endpoint) is peer:
            del self._engines[peer.endpoint]
            peer.socket.close(linger=0)

    def _fail_calls(self, peer: _Peer, error: HeadwiseError) -> None:
        for what in list(peer.awaiting.values()):
            if not isinstance(what, Call):
                what(error)
            elif what.engine is None:
                what.deliver(error)
            else:
                self._end(what, error)
        peer.awaiting.clear()

    def _finish(self) -> None:
        self._run_commands()
        closed = RequestAbortedError("the client was closed")
        for call in list(self._requests.values()):
            assert call.engine is not None
            call.engine.socket.send(wire.encode(Abort(call.request_id)))
        for peer in [self._scheduler, *self._engines.values()]:
            self._fail_calls(peer, closed)
        self._context.destroy(linger=100)
        with self._lock:
            os.close(self._wake_write)
            os.close(self._wake_read)
