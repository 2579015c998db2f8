"""The client's one I/O thread: takes commands of other threads, and messages of the scheduler and engines."""

from __future__ import annotations

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
from weakref import WeakSet

from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError, RequestAbortedError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.client.connections import Connections, deliver_error
from headwise.runtime.client.encoder_call import EncoderCall
from headwise.runtime.client.image_calls import ImageCalls
from headwise.runtime.client.locator import Locator
from headwise.runtime.client.peers import Call, GatheredAnswers, Peer
from headwise.runtime.client.served_calls import ServedCalls
from headwise.runtime.client.ways import RelayMode, Ways
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.encoder_messages import (
    Encoded,
    EncodedRows,
    Encoders,
    EndEncode,
    GetEncoders,
    WantsFile,
)
from headwise.runtime.protocol.images import EncodedImage
from headwise.runtime.protocol.messages import (
    MAX_MESSAGE_BYTES,
    EmbedsTaken,
    EmbedsWanted,
    Engines,
    Failed,
    GetEngines,
    Operate,
    Operated,
    Outputs,
    Pong,
    PrefixFound,
    Scaled,
    Stats,
    Ticket,
    Waits,
    WeightsUpdated,
    Withdraw,
)
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ClientKeys

log = logging.getLogger(__name__)


class ClientIO:
    """Runs calls over ZeroMQ. Its public methods may be called from any thread; the rest runs on the I/O thread."""

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
        self._ways = Ways(endpoint, relay, keys)
        self._clock = LivenessClock(clock)
        self._context = open_context()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        scheduler = Peer(self._context, endpoint, keys)
        locator = None if locate is None else Locator(locate, self._found)
        self._connections = Connections(self._context, scheduler, self._ways, locator, self._clock, self._lost)
        self._calls = ServedCalls(self._connections, self._clock)
        self._images = ImageCalls(self._find_encoders, self._ask_encoder, self._kept_of_images)
        self._with_images: WeakSet[Call] = WeakSet()
        self._reason = ""  # why it is closed
        self._lock = threading.RLock()  # the garbage collector may cancel a stream in the middle of a command
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headwise-client", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Of the scheduler, which may move."""
        return self._connections.endpoint

    # ---- from any thread ----

    def start(self, call: Call) -> None:
        """Begin a call; raises `DeploymentError` on a closed client, `InvalidRequestError` if it cannot be sent."""
        call.key = self._connections.new_key()
        if call.files:
            call.is_encoding = True
            self._command(lambda: self._encode_files(call))
            return
        data = _encode(replace(call.route, key=call.key))
        self._command(lambda: self._ask_scheduler(call.key, call, data))

    def cancel(self, call: Call) -> None:
        """Abort a call: it gets a `RequestAbortedError`, and nothing after that. Finished calls are ignored."""
        self._command(lambda: self._calls.cancel(call), needed=False)

    def ask(self, question: Callable[[int], Any], deliver: Callable[[Any], None]) -> None:
        """Ask the scheduler; ``question`` makes the message for a key. ``deliver`` gets the answer or an error.

        Raises as `start` does.
        """
        key = self._connections.new_key()
        data = _encode(question(key))
        self._command(lambda: self._ask_scheduler(key, deliver, data))

    def encode(self, files: Sequence[ImageFile], deliver: Callable[[list[EncodedImage] | HeadwiseError], None]) -> None:
        """Have images encoded. ``deliver`` gets what stands for each, or the first error; raises as `start` does."""

        def begin() -> None:
            self._images.encode(files, deliver)

        self._command(begin)

    def operate(self, action: str, tier: str, deliver: Callable[[dict[str, int] | HeadwiseError], None]) -> None:
        """Have every engine carry out an operation. When all are done, deliver the blocks that each forgot, by name."""
        self.ask(GetEngines, partial(self._ask_engines, action, tier, deliver))

    def follow(self, endpoint: str) -> None:
        """The scheduler is to be found there from now on, or soon. Open questions are asked again there."""
        self._connections.may_move = True
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

    def _found(self, endpoint: str) -> None:
        """The scheduler is there now."""
        self._command(lambda: self._connections.follow(endpoint), needed=False)

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
        connections, peers = self._connections, self._connections.peers
        for peer in peers:
            poller.register(peer.socket, zmq.POLLIN)
            poller.register(peer.monitor, zmq.POLLIN)
        ready = dict(poller.poll(connections.poll_ms()))
        if self._wake_read in ready:
            os.read(self._wake_read, 65536)
        self._run_commands()
        for peer in peers:
            has_news = peer.monitor in ready
            if peer.socket in ready and not peer.socket.closed:
                self._receive(peer)
            if has_news and not peer.socket.closed:
                connections.check(peer)
        connections.check_silence()

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
            take, engine = partial(gathered.take, name), self._connections.engine(endpoint)
            self._connections.ask(engine, take, lambda key: Operate(key, action, tier))

    def _ask_scheduler(self, key: int, what: Call | Callable[[Any], None], data: bytes) -> None:
        self._connections.scheduler.ask(key, what, data, self._clock())

    def _lost(self, call: Call, error: HeadwiseError, is_lost: bool) -> None:
        self._calls.lost(call, error, is_lost)

    # ---- images ----

    def _find_encoders(self, deliver: Callable[[Any], None]) -> None:
        self._connections.ask(self._connections.scheduler, deliver, GetEncoders)

    def _ask_encoder(self, endpoint: str, call: EncoderCall) -> Callable[[], None]:
        """What is returned ends the question."""
        peer = self._connections.engine(endpoint)
        key = self._connections.ask(peer, call, call.question)

        def end() -> None:
            if peer.answered(key) is not None:
                peer.send(EndEncode(key))

        return end

    def _encode_files(self, call: Call) -> None:
        end = self._images.encode(call.files, partial(self._take_encoded, call))
        if call.is_encoding:  # it is not over at once
            call.end_encoding = end

    def _take_of_encoder(self, peer: Peer, message: WantsFile | Encoded | EncodedRows) -> None:
        call = peer.awaiting.get(message.key)
        if not isinstance(call, EncoderCall):
            return  # it was ended
        try:
            said = call.take(message)
        except HeadwiseError as error:
            peer.send(EndEncode(message.key))
            self._answer(peer, message.key, error)
            return
        if isinstance(said, EncodedImage):
            self._answer(peer, message.key, said)
        else:
            peer.send(said)

    def _kept_of_images(self) -> int:
        """Bytes of what stands for the images of all calls that are not over."""
        return sum(each.embeds.nbytes for call in self._with_images for each in call.encoded)

    def _take_encoded(self, call: Call, answer: list[EncodedImage] | HeadwiseError) -> None:
        """What stands for a call's images is known: it can be routed now."""
        call.is_encoding, call.files = False, ()
        if isinstance(answer, HeadwiseError):
            call.deliver(answer)
            return
        call.encoded = answer
        self._with_images.add(call)
        call.route = replace(call.route, images=tuple(each.image for each in answer))
        try:
            data = _encode(replace(call.route, key=call.key))
        except InvalidRequestError as error:
            call.deliver(error)
            return
        self._ask_scheduler(call.key, call, data)

    # ---- messages in ----

    def _receive(self, peer: Peer) -> None:
        peer.heard = self._clock()
        try:
            for message in peer.receive():
                self._take(peer, message)
        except wire.WireError as error:
            self._connections.fail(peer, DeploymentError(f"{peer.endpoint} sent what is not a message: {error}"))

    def _take(self, peer: Peer, message: Any) -> None:
        peer.has_answered = True
        if isinstance(message, Outputs):
            for delta in message.deltas:
                self._calls.take_delta(peer, delta)
        elif isinstance(message, EmbedsTaken | EmbedsWanted):
            if isinstance(message, EmbedsTaken):
                peer.embeds.taken()
            else:
                peer.embeds.wanted(message.request_id, message.start)
            peer.send_embeds()
        elif isinstance(message, Ticket):
            self._calls.take_ticket(message)
        elif isinstance(message, Waits):
            self._calls.take_waits(peer, message)
        elif isinstance(message, Failed):
            self._calls.take_failure(peer, message)
        elif isinstance(message, Pong):
            self._connections.take_pong(peer, message)
        elif isinstance(message, Stats):
            self._answer(peer, message.key, message.stats)
        elif isinstance(message, Engines | Encoders):
            self._answer(peer, message.key, message.endpoints)
        elif isinstance(message, WantsFile | Encoded | EncodedRows):
            self._take_of_encoder(peer, message)
        elif isinstance(message, PrefixFound):
            self._answer(peer, message.key, {"tokens": message.tokens, "engines": message.engines})
        elif isinstance(message, Operated):
            self._answer(peer, message.key, message.blocks)
        elif isinstance(message, Scaled):
            self._answer(peer, message.key, message.decision)
        elif isinstance(message, WeightsUpdated):
            self._answer(peer, message.key, message.engines)
        else:
            self._connections.fail(
                peer, DeploymentError(f"{peer.endpoint} is no headwise deployment: unexpected {message!r}")
            )

    def _answer(self, peer: Peer, key: int, answer: Any) -> None:
        deliver = peer.answered(key)
        if deliver is not None:
            deliver(answer)

    def _finish(self, reason: HeadwiseError) -> None:
        self._run_commands()
        for peer in self._connections.peers:
            for key, what in list(peer.awaiting.items()):
                if isinstance(what, Call) and peer is self._connections.scheduler:
                    peer.send(Withdraw(key))
                elif isinstance(what, Call):
                    self._calls.abort(what)
                peer.answered(key)
                deliver_error(what, reason)
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
