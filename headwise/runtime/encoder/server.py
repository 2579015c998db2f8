"""The encoder behind a socket: a thread that talks to clients, and one that encodes their images, one at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from headwise.errors import DeploymentError, HeadwiseError, OverloadedError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.encoder.job_queue import Job, JobQueue
from headwise.runtime.encoder.reports import EncoderReports, Reporting
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.encoder_messages import Encode, Encoded, EncoderStatus
from headwise.runtime.protocol.images import EncodedImage
from headwise.runtime.protocol.messages import MAX_MESSAGE_BYTES, Ping, Pong, failure
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ServerKeys
from headwise.sockets.listener import Listener

log = logging.getLogger(__name__)

_IDLE_MS = 100
_BURST, _BURST_S = 64, 0.02
_SEND_QUEUE = 64
MAX_UNREAD_BYTES = 160 << 20
"""Of a client: two images of the largest size, which are as many as it asks for at a time."""


class Encoder(Protocol):
    """`headwise.runtime.encoder.image_encoder.ImageEncoder`."""

    def encode(self, data: bytes) -> EncodedImage: ...

    def stats(self) -> dict[str, int]: ...


class EncoderServer:
    """Serves at ``endpoint`` (the one bound, where port ``*`` was asked for).

    reporting:  tell this scheduler of the encoder; None: nobody
    keys:       only clients with these keys may connect, encrypted; None: all may
    loop_count: counts up for as long as the socket's thread gets on

    Raises `zmq.ZMQError` if it cannot listen there.
    """

    def __init__(
        self,
        encoder: Encoder,
        endpoint: str,
        *,
        reporting: Reporting | None = None,
        keys: ServerKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import zmq

        self._context = open_context()
        try:
            self._listener = Listener(
                self._context,
                endpoint,
                max_message_bytes=MAX_MESSAGE_BYTES,
                send_queue=_SEND_QUEUE,
                max_unread_bytes=MAX_UNREAD_BYTES,
                keys=keys,
                clock=clock,
            )
        except Exception:
            close_context(self._context)
            raise
        self.endpoint, self.loop_count = self._listener.endpoint, 0
        self._encoder, self._clock = encoder, LivenessClock(clock)
        self._instance = uuid.uuid4().hex
        self._reports = None if reporting is None else EncoderReports(self._context, reporting, self._clock)
        self._jobs = JobQueue()
        self._outcomes: queue.SimpleQueue[tuple[Job, EncodedImage | HeadwiseError]] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._counts = dict.fromkeys(("encoded", "refused", "overloaded", "malformed"), 0)
        self._awake = self._context.socket(zmq.PULL)
        self._awake.bind("inproc://encoded")
        self._waker = self._context.socket(zmq.PUSH)
        self._waker.connect("inproc://encoded")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-encoder", daemon=True)
        self._worker = threading.Thread(target=self._work, name="headwise-tower", daemon=True)

    # ---- from any thread ----

    def start(self) -> None:
        self._thread.start()
        self._worker.start()

    def follow(self, scheduler: str) -> None:
        """The scheduler has moved to this endpoint."""
        reports = self._reports
        if reports is not None:
            self._commands.put(lambda: reports.follow(scheduler))

    def stop(self) -> None:
        """End the threads, when the image that is being encoded is done, and close the sockets."""
        self._stopping.set()
        self._jobs.close()
        for thread in (self._worker, self._thread):
            if thread.is_alive():
                thread.join()
        self._listener.close()
        close_context(self._context, linger_ms=100)

    # ---- the thread that encodes ----

    def _work(self) -> None:
        import zmq

        while (job := self._jobs.get()) is not None:
            self._outcomes.put((job, self._outcome(job)))
            try:
                self._waker.send(b"", zmq.NOBLOCK)
            except zmq.Again:  # it has much to look at already
                continue

    def _outcome(self, job: Job) -> EncodedImage | HeadwiseError:
        try:
            return self._encoder.encode(job.image)
        except HeadwiseError as error:
            return error
        except Exception as error:
            log.exception("an image could not be encoded")
            return HeadwiseError(f"the image could not be encoded: {type(error).__name__}: {error}"[:400])

    # ---- the socket's thread ----

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        for socket in (self._listener.socket, self._awake):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping.is_set():
            poller.poll(_IDLE_MS)
            while not self._commands.empty():
                self._commands.get()()
            self._take_messages()
            self._send_outcomes()
            if self._reports is not None:
                self._reports.service(self._status)
            self.loop_count += 1
        stopping = DeploymentError("the deployment is stopping")
        for identity in self._listener.peers():
            self._send(identity, failure(stopping))

    def _take_messages(self) -> None:
        until = self._clock() + _BURST_S
        for identity, frames in self._listener.receive(_BURST):
            try:
                if len(frames) != 1:
                    raise wire.WireError(f"a message must be one frame, got {len(frames)}")
                self._take(identity, wire.decode(frames[0], Encode, Ping))
            except HeadwiseError as error:
                self._counts["malformed"] += 1
                self._send(identity, failure(error))
            if self._clock() > until:
                break
        for identity in self._listener.ended():
            self._jobs.drop(identity)

    def _take(self, identity: bytes, message: Encode | Ping) -> None:
        if isinstance(message, Ping):
            self._send(identity, Pong(self._instance))
        elif not self._jobs.put(Job(identity, message.key, message.image)):
            self._counts["overloaded"] += 1
            error = OverloadedError(f"{len(self._jobs)} images wait to be encoded already; try again later")
            self._send(identity, failure(error, message.key))

    def _send_outcomes(self) -> None:
        import zmq

        while self._awake.poll(0):
            self._awake.recv(zmq.NOBLOCK)
        while not self._outcomes.empty():
            job, outcome = self._outcomes.get()
            if isinstance(outcome, HeadwiseError):
                self._counts["refused"] += 1
                self._send(job.client, failure(outcome, job.key))
            else:
                self._counts["encoded"] += 1
                self._send(job.client, Encoded(job.key, outcome.image, outcome.embeds))

    def _send(self, identity: bytes, message: Any) -> None:
        """Send without waiting; a client that is gone or does not read is dropped. Its connection tells it so."""
        if not self._listener.send(identity, wire.encode(message)):
            self._jobs.drop(identity)

    def _status(self, reporting: Reporting) -> EncoderStatus:
        stats = {**self._counts, "waiting": len(self._jobs), "cache": self._encoder.stats()}
        return EncoderStatus(
            reporting.secret, reporting.name, reporting.advertised(self.endpoint), self.endpoint, stats
        )
