"""The client's one I/O thread: its sockets, its calls in progress, and the heartbeats of its peers."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from headwise.errors import (
    DeploymentError,
    EngineDiedError,
    EngineLeavingError,
    HeadwiseError,
    InvalidRequestError,
    RequestAbortedError,
)
from headwise.liveness_clock import LivenessClock
from headwise.runtime.client.image_calls import ImageCalls
from headwise.runtime.client.locator import LOCATE_S, SILENT_S, Locator
from headwise.runtime.client.peers import Call, GatheredAnswers, Peer
from headwise.runtime.client.ways import RelayMode, Ways
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.images import EncodedImage
from headwise.runtime.protocol.messages import (
    FIRST_ANSWER_S,
    FORGOTTEN,
    MAX_MESSAGE_BYTES,
    MAX_PING_REQUESTS,
    PEER_TIMEOUT_S,
    PING_INTERVAL_S,
    Abort,
    Encode,
    Encoded,
    Encoders,
    Engines,
    Failed,
    GetEncoders,
    GetEngines,
    Operate,
    Operated,
    Outputs,
    Ping,
    Pong,
    PrefixFound,
    Scaled,
    Stats,
    Ticket,
    Waits,
    Withdraw,
    error_of,
)
from headwise.runtime.protocol.request import FinishReason, OutputDelta
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ClientKeys

log = logging.getLogger(__name__)

MAX_REROUTES = 3
"""Most engines that one request may lose and still continue. A request that kills engines must not kill all."""
RECONNECT_S = 60.0
"""Longest wait for a scheduler that has answered before to come back."""
REFUSED_S = 20.0
"""Longest wait for it while nothing listens at its address. The next scheduler listens within a few seconds."""


class ClientIO:
    """Runs calls over ZeroMQ. Its public methods may be called from any thread; the rest runs on the I/O thread.

    When an engine is lost, its requests continue on another engine, behind the tokens that were delivered. When a
    scheduler is lost, the open questions are asked again of the scheduler that is started in its place.
    """

    def __init__(
        self,
        endpoint: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        relay: RelayMode = "auto",
        keys: ClientKeys | None = None,
        locate: Callable[[], str] | None = None,
    ) -> None:
        """
        keys:   of the deployment, for all its connections; None: they are in the clear
        locate: returns the scheduler's endpoint, which may move; None: it does not

        Raises `ConfigError` if there is no such relay mode.
        """
        self.endpoint = endpoint
        self._ways = Ways(endpoint, relay, keys)
        self._locator = None if locate is None else Locator(locate, self._found)
        self._clock = LivenessClock(clock)
        self._context = open_context()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._keys = itertools.count(1)
        self._scheduler = Peer(self._context, endpoint, keys)
        self._engines: dict[str, Peer] = {}
        self._images = ImageCalls(self._find_encoders, self._ask_encoder)
        self._calls: dict[str, Call] = {}  # those that engines serve, by request id
        self._may_move = locate is not None
        self._reason = ""  # why it is closed
        self._has_told = False  # that calls wait, since the last one that found an engine
        self._lock = threading.RLock()  # the garbage collector may cancel a stream in the middle of a command
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headwise-client", daemon=True)
        self._thread.start()

    # ---- from any thread ----

    def start(self, call: Call) -> None:
        """Begin a call; raises `DeploymentError` on a closed client, `InvalidRequestError` if it cannot be sent."""
        call.key = next(self._keys)
        if call.files:
            call.is_encoding = True
            self._command(lambda: self._images.encode(call.files, partial(self._take_encoded, call)))
            return
        data = _encode(replace(call.route, key=call.key))
        self._command(lambda: self._scheduler.ask(call.key, call, data, self._clock()))

    def cancel(self, call: Call) -> None:
        """Abort a call: it gets a `RequestAbortedError`, and nothing after that. Finished calls are ignored."""
        self._command(lambda: self._cancel(call), needed=False)

    def ask(self, question: Callable[[int], Any], deliver: Callable[[Any], None]) -> None:
        """Ask the scheduler; ``question`` makes the message for a key. ``deliver`` gets the answer or an error.

        Raises as `start` does.
        """
        key = next(self._keys)
        data = _encode(question(key))
        self._command(lambda: self._scheduler.ask(key, deliver, data, self._clock()))

    def encode(self, files: Sequence[bytes], deliver: Callable[[list[EncodedImage] | HeadwiseError], None]) -> None:
        """Have images encoded. ``deliver`` gets what stands for each, or the first error; raises as `start` does."""
        self._command(lambda: self._images.encode(files, deliver))

    def operate(self, action: str, tier: str, deliver: Callable[[dict[str, int] | HeadwiseError], None]) -> None:
        """Have every engine carry out an operation. When all are done, deliver the blocks that each forgot, by name."""
        self.ask(GetEngines, partial(self._ask_engines, action, tier, deliver))

    def follow(self, endpoint: str) -> None:
        """The scheduler is to be found there from now on, or soon. Open questions are asked again there."""
        self._may_move = True
        self._found(endpoint)

    def close(self, reason: str = "the client was closed") -> None:
        """End every call with a `RequestAbortedError` of this reason, and close the sockets; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed, self._reason = True, reason
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

    def _run(self) -> None:
        reason: HeadwiseError
        try:
            while not self._closed:
                self._run_once()
            reason = RequestAbortedError(self._reason)
        except Exception as error:
            log.exception("the client's thread failed")
            reason = DeploymentError(f"the client of {self.endpoint} failed ({error!r}); make a new one")
        finally:
            with self._lock:
                self._closed = True
            self._finish(reason)

    def _run_once(self) -> None:
        """Wait for commands, messages and timeouts, and handle them."""
        import zmq

        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        peers = [self._scheduler, *self._engines.values()]
        for peer in peers:
            poller.register(peer.socket, zmq.POLLIN)
            poller.register(peer.monitor, zmq.POLLIN)
        ready = dict(poller.poll(self._poll_ms()))
        if self._wake_read in ready:
            os.read(self._wake_read, 65536)
        self._run_commands()
        for peer in peers:
            has_news = peer.monitor in ready
            if peer.socket in ready and not peer.socket.closed:
                self._receive(peer)
            if has_news and not peer.socket.closed:
                self._check_connection(peer)
        self._check_silence()

    def _poll_ms(self) -> int | None:
        waiting = any(peer.awaiting for peer in (self._scheduler, *self._engines.values()))
        return int(PING_INTERVAL_S * 250) if waiting else None

    def _run_commands(self) -> None:
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

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
        gathered = GatheredAnswers(endpoints, deliver)
        for name, endpoint in endpoints.items():
            key = next(self._keys)
            question = wire.encode(Operate(key, action, tier))
            self._engine(endpoint).ask(key, partial(gathered.take, name), question, self._clock())

    def _engine(self, endpoint: str) -> Peer:
        if endpoint not in self._engines:
            self._engines[endpoint] = self._ways.open(self._context, endpoint)
        return self._engines[endpoint]

    # ---- images ----

    def _find_encoders(self, deliver: Callable[[Any], None]) -> None:
        key = next(self._keys)
        self._scheduler.ask(key, deliver, wire.encode(GetEncoders(key)), self._clock())

    def _ask_encoder(self, endpoint: str, image: bytes, deliver: Callable[[Any], None]) -> None:
        key = next(self._keys)
        self._engine(endpoint).ask(key, deliver, wire.encode(Encode(key, image)), self._clock())

    def _take_encoded(self, call: Call, answer: list[EncodedImage] | HeadwiseError) -> None:
        """What stands for a call's images is known: it can be routed now."""
        if not call.is_encoding:
            return  # it was cancelled
        call.is_encoding, call.files = False, ()
        if isinstance(answer, HeadwiseError):
            call.deliver(answer)
            return
        call.encoded = answer
        call.route = replace(call.route, images=tuple(each.image for each in answer))
        try:
            data = _encode(replace(call.route, key=call.key))
        except InvalidRequestError as error:
            call.deliver(error)
            return
        self._scheduler.ask(call.key, call, data, self._clock())

    # ---- calls ----

    def _take_ticket(self, ticket: Ticket) -> None:
        call = self._scheduler.answered(ticket.key)
        if call is None:
            return
        self._has_told = False
        engine, request_id = self._engine(ticket.endpoint), ticket.request.request_id
        self._calls[request_id] = call
        engine.wait_for(request_id, call, self._clock())
        engine.send(call.submit(ticket.request, engine))

    def _take_waits(self, peer: Peer, waits: Waits) -> None:
        call = peer.awaiting.get(waits.key)
        if not isinstance(call, Call):
            return
        if not self._has_told:
            log.warning("%s", waits.reason)
        self._has_told, call.waits = True, waits.reason

    def _take_delta(self, peer: Peer, delta: OutputDelta) -> None:
        call = self._calls.get(delta.request_id)
        if call is None or call.engine is not peer:
            return
        if delta.finish_reason is FinishReason.ERROR:
            self._end(call, EngineDiedError(delta.error or "the engine failed"))
        elif delta.finish_reason is FinishReason.ABORT:
            self._end(call, RequestAbortedError(f"request {call.name} was aborted by the engine"))
        else:
            if delta.finish_reason is not None:
                self._detach(call)
            call.take(delta)

    def _take_failure(self, peer: Peer, failed: Failed) -> None:
        call = self._calls.get(failed.request_id)
        if call is not None and call.engine is peer:
            error = error_of(failed)
            if isinstance(error, EngineDiedError | RequestAbortedError):
                is_sent_away = failed.key != 0 or isinstance(error, EngineLeavingError)  # it killed nobody
                self._reroute(call, error, was_served=not is_sent_away)
            else:
                self._end(call, error)
        elif failed.key:
            what = peer.answered(failed.key)
            if what is not None:
                _deliver(what, error_of(failed))
        elif not failed.request_id:
            error = error_of(failed)
            self._fail_peer(peer, error)
            peer.has_answered &= not isinstance(error, DeploymentError)  # it has stopped, and is not restarted

    def _reroute(self, call: Call, error: HeadwiseError, was_served: bool = True, is_lost: bool = True) -> None:
        """Continue a call on another engine. If it has lost too many engines, it ends with ``error`` instead.

        is_lost: False: it may continue on the same engine, to which only the relay was lost
        """
        call.is_in_doubt = was_served and call.engine is not None and call.engine.is_relayed
        call.engines_lost += was_served
        if call.engines_lost > MAX_REROUTES:
            self._end(call, error)
            return
        self._detach(call)
        key = next(self._keys)
        self._scheduler.ask(key, call, wire.encode(call.reroute(key, is_lost)), self._clock())

    def _cancel(self, call: Call) -> None:
        if self._scheduler.answered(call.key) is not None:
            self._scheduler.send(Withdraw(call.key))
            call.deliver(RequestAbortedError("the request was cancelled"))
        elif call.is_encoding:
            call.is_encoding = False
            call.deliver(RequestAbortedError("the request was cancelled"))
        elif self._is_served(call):
            self._abort(call)
            self._end(call, RequestAbortedError(f"request {call.name} was cancelled"))

    def _is_served(self, call: Call) -> bool:
        return call.request is not None and self._calls.get(call.request.request_id) is call

    def _abort(self, call: Call) -> None:
        if call.engine is not None and call.request is not None:
            call.engine.send(Abort(call.request.request_id))

    def _detach(self, call: Call) -> None:
        """Expect nothing more from a call's engine."""
        if call.request is not None:
            self._calls.pop(call.request.request_id, None)
            if call.engine is not None:
                call.engine.answered(call.request.request_id)

    def _end(self, call: Call, error: HeadwiseError) -> None:
        self._detach(call)
        call.deliver(error)

    # ---- messages in ----

    def _receive(self, peer: Peer) -> None:
        peer.heard = self._clock()
        try:
            for message in peer.receive():
                self._take(peer, message)
        except wire.WireError as error:
            self._fail_peer(peer, DeploymentError(f"{peer.endpoint} sent what is not a message: {error}"))

    def _take(self, peer: Peer, message: Any) -> None:
        peer.has_answered = True
        if isinstance(message, Outputs):
            for delta in message.deltas:
                self._take_delta(peer, delta)
        elif isinstance(message, Ticket):
            self._take_ticket(message)
        elif isinstance(message, Waits):
            self._take_waits(peer, message)
        elif isinstance(message, Failed):
            self._take_failure(peer, message)
        elif isinstance(message, Pong):
            self._take_pong(peer, message)
        elif isinstance(message, Stats):
            self._answer(peer, message.key, message.stats)
        elif isinstance(message, Engines | Encoders):
            self._answer(peer, message.key, message.endpoints)
        elif isinstance(message, Encoded):
            self._answer(peer, message.key, message)
        elif isinstance(message, PrefixFound):
            self._answer(peer, message.key, {"tokens": message.tokens, "engines": message.engines})
        elif isinstance(message, Operated):
            self._answer(peer, message.key, message.blocks)
        elif isinstance(message, Scaled):
            self._answer(peer, message.key, message.decision)
        else:
            self._fail_peer(peer, DeploymentError(f"{peer.endpoint} is no headwise deployment: unexpected {message!r}"))

    def _answer(self, peer: Peer, key: int, answer: Any) -> None:
        deliver = peer.answered(key)
        if deliver is not None:
            deliver(answer)

    def _take_pong(self, peer: Peer, pong: Pong) -> None:
        """Ask again if the scheduler was replaced. A proxy in between may keep the connection, and so hide the loss."""
        is_other = pong.instance == FORGOTTEN or peer.instance not in ("", pong.instance)
        if peer is self._scheduler and is_other:
            peer.ask_again()
        peer.instance = pong.instance

    # ---- peers ----

    def _found(self, endpoint: str) -> None:
        """The scheduler is there now. Called on any thread."""
        self._command(lambda: self._follow(endpoint), needed=False)

    def _follow(self, endpoint: str) -> None:
        if endpoint == self._scheduler.endpoint:
            return
        log.warning("the scheduler has moved from %s to %s", self._scheduler.endpoint, endpoint)
        self.endpoint = endpoint
        self._ways.follow(endpoint)
        for peer in [each for each in self._engines.values() if self._ways.is_by_former(each) and not each.awaiting]:
            del self._engines[peer.endpoint]
            peer.close()
        self._scheduler.move(endpoint)
        self._scheduler.ask_again()

    def _look_for_scheduler(self, now: float) -> None:
        """Whoever waits for a scheduler that is away finds out whether it has moved."""
        scheduler = self._scheduler
        if self._locator is None or not scheduler.awaiting or not scheduler.has_answered:
            return
        if scheduler.refused_s(now) > LOCATE_S or now - scheduler.heard > SILENT_S:
            self._locator.look(now)

    def _check_connection(self, peer: Peer) -> None:
        """An engine whose connection ends is lost at once. A scheduler comes back, but has forgotten all calls. If
        connections are refused, and no scheduler has answered yet or they have been for `REFUSED_S`, there is none.
        """
        has_ended, is_refused = peer.connection_events(self._clock())
        if peer is not self._scheduler:
            if peer.is_made:
                self._ways.note_made(peer)
            if (has_ended or is_refused) and not self._ways.detour(peer):
                self._fail_peer(peer, self._lost_error(peer, "its connection ended"))
        elif peer.refusal:
            self._fail_peer(
                peer, DeploymentError(f"the deployment at {peer.endpoint} refuses this client: {peer.refusal}")
            )
        elif has_ended:
            self._forgive(peer)
            peer.reconnect()
            peer.ask_again()
        elif is_refused and not peer.has_answered:
            self._fail_peer(peer, self._absence_error("no connection could be made"))
        elif is_refused and peer.refused_s(self._clock()) > self._refused_limit_s:
            self._fail_peer(peer, self._absence_error(f"nothing has listened there for {self._refused_limit_s:g} s"))

    @property
    def _refused_limit_s(self) -> float:
        """One that may move takes its time: its node must be known to be dead."""
        return RECONNECT_S if self._may_move else REFUSED_S

    def _forgive(self, scheduler: Peer) -> None:
        """The relay was lost with the scheduler: engines that were lost a moment before, and are reached through it, do
        not count as lost."""
        for call in scheduler.awaiting.values():
            if isinstance(call, Call) and call.is_in_doubt:
                call.engines_lost -= 1
                call.is_in_doubt = False

    def _lost_error(self, peer: Peer, how: str) -> EngineDiedError:
        """The error for a lost engine. If it never answered, it may be unreachable from here."""
        if peer.has_answered:
            return EngineDiedError(f"the engine at {peer.endpoint} is gone: {how}")
        return EngineDiedError(
            f"the engine at {peer.endpoint} cannot be reached from here{self._ways.tried(peer)}, or is gone: clients "
            f"of {self.endpoint} must be able to connect to the engines, too"
        )

    def _absence_error(self, how: str) -> DeploymentError:
        return DeploymentError(
            f"no deployment answers at {self.endpoint} ({how}); check the address, or start one with `headwise serve`"
        )

    def _check_silence(self) -> None:
        """Ping the peers from which something is awaited. One that stays silent for too long counts as dead."""
        now = self._clock()
        self._look_for_scheduler(now)
        for peer in [self._scheduler, *self._engines.values()]:
            if not peer.awaiting:
                continue
            if now - peer.heard > self._silence_limit_s(peer):
                self._fail_peer(peer, self._silence_error(peer))
            elif self._ways.is_overdue(peer, now):
                self._ways.detour(peer)
            elif now - peer.pinged >= PING_INTERVAL_S:
                peer.pinged = now
                named = [key for key in peer.awaiting if isinstance(key, str)]
                for first in range(0, max(1, len(named)), MAX_PING_REQUESTS):
                    peer.send(Ping(tuple(named[first : first + MAX_PING_REQUESTS])))

    def _silence_limit_s(self, peer: Peer) -> float:
        if peer is not self._scheduler:
            return PEER_TIMEOUT_S
        return RECONNECT_S if peer.has_answered else FIRST_ANSWER_S

    def _silence_error(self, peer: Peer) -> HeadwiseError:
        waited = f"waited {self._silence_limit_s(peer):g} s"
        if peer is not self._scheduler:
            return self._lost_error(peer, f"it stopped answering ({waited})")
        if peer.has_answered:
            return DeploymentError(f"the deployment at {peer.endpoint} stopped answering ({waited})")
        return self._absence_error(waited)

    def _fail_peer(self, peer: Peer, error: HeadwiseError) -> None:
        """Give up a peer: its requests continue on other engines, everything else that it should answer fails.

        An engine's connection is closed; the next ticket for it opens a new one.
        """
        is_engine = self._engines.get(peer.endpoint) is peer
        # Else only the relay is, with the scheduler.
        is_lost = not peer.is_relayed or (self._scheduler.is_made and not self._ways.is_by_former(peer))
        if is_engine:
            del self._engines[peer.endpoint]
            self._ways.note_failed(peer)
        for key, what in list(peer.awaiting.items()):
            if isinstance(what, Call) and is_engine:
                self._abort(what)
                self._reroute(what, error, was_served=is_lost, is_lost=is_lost)
            else:
                peer.answered(key)
                _deliver(what, error)
        if is_engine:
            peer.close()

    def _finish(self, reason: HeadwiseError) -> None:
        self._run_commands()
        for peer in [self._scheduler, *self._engines.values()]:
            for key, what in list(peer.awaiting.items()):
                if isinstance(what, Call) and peer is self._scheduler:
                    peer.send(Withdraw(key))
                elif isinstance(what, Call):
                    self._abort(what)
                peer.answered(key)
                _deliver(what, reason)
        close_context(self._context, linger_ms=100)
        self._ways.close()
        with self._lock:
            os.close(self._wake_write)
            os.close(self._wake_read)


def _encode(message: Any) -> bytes:
    try:
        data = wire.encode(message)
    except (HeadwiseError, OverflowError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(f"the request has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
    return data


def _deliver(what: Call | Callable[[Any], None], error: HeadwiseError) -> None:
    """Deliver an error to a call, or to the function that waits for an answer."""
    if isinstance(what, Call):
        what.deliver(error)
    else:
        what(error)
