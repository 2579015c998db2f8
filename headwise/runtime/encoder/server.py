"""The encoder behind a socket: a thread that talks to clients, and one that encodes their images, one at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from headwise.errors import DeploymentError, HeadwiseError, OverloadedError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.encoder.arriving_files import ArrivingFiles, check_encode
from headwise.runtime.encoder.job_queue import Job, JobQueue
from headwise.runtime.encoder.leaving_rows import MAX_KEPT_BYTES, LeavingRows
from headwise.runtime.encoder.reports import EncoderReports, Reporting
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.encoder_messages import (
    STALLED_S,
    Encode,
    EncoderStatus,
    EndEncode,
    FilePart,
    WantsFile,
    WantsRows,
)
from headwise.runtime.protocol.images import EncodedImage
from headwise.runtime.protocol.messages import MAX_MESSAGE_BYTES, Ping, Pong, failure
from headwise.runtime.protocol.users import NO_USERS, LetIn, Users
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ServerKeys
from headwise.sockets.listener import Listener

log = logging.getLogger(__name__)

_IDLE_MS = 100
_BURST, _BURST_S = 64, 0.02
_SEND_QUEUE = 64
_TAKEN = (Encode, FilePart, WantsRows, EndEncode, Ping)
MAX_UNREAD_BYTES = 64 << 20
"""Of a client: more parts than it asks for at a time."""


class Encoder(Protocol):
    """`headwise.runtime.encoder.image_encoder.ImageEncoder`."""

    def encode(self, file: ImageFile) -> Iterator[EncodedImage | None]: ...

    def stats(self) -> dict[str, int]: ...


class EncoderServer:
    """Serves at ``endpoint`` (the one bound, where port ``*`` was asked for).

    reporting:  tell this scheduler of the encoder; None: nobody
    keys:       only clients with these keys may connect, encrypted; None: all may
    users:      and these, until the scheduler tells of others
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
        users: Users = NO_USERS,
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
                users=users.by_key,
                clock=clock,
            )
        except Exception:
            close_context(self._context)
            raise
        self.endpoint, self.loop_count = self._listener.endpoint, 0
        self._encoder, self._clock = encoder, LivenessClock(clock)
        self._instance, self._users = uuid.uuid4().hex, LetIn(self._listener, users)
        self._reports = None if reporting is None else EncoderReports(self._context, reporting, self._clock)
        self._jobs = JobQueue()
        self._arriving, self._leaving = ArrivingFiles(), LeavingRows()
        self._done: list[tuple[Job, EncodedImage | HeadwiseError]] = []  # that were not answered yet
        self._outcomes: queue.SimpleQueue[tuple[Job, EncodedImage | HeadwiseError]] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._counts = dict.fromkeys(("encoded", "refused", "overloaded", "malformed"), 0)
        self._awake = self._context.socket(zmq.PULL)
        self._awake.bind("inproc://encoded")
        self._waker = self._context.socket(zmq.PUSH)
        self._waker.connect("inproc://encoded")
        self._stopping, self._has_room = threading.Event(), threading.Event()
        self._has_room.set()
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

        while self._work_on_next():
            with suppress(zmq.Again):  # it has much to look at already
                self._waker.send(b"", zmq.NOBLOCK)

    def _work_on_next(self) -> bool:
        """False once there is nothing to do any more. While it waits it keeps nobody's file."""
        while not self._has_room.wait(_IDLE_MS / 1000):
            if self._stopping.is_set():
                return False
        job = self._jobs.get()
        if job is None:
            return False
        outcome = self._step(job)
        if outcome is None:
            self._jobs.put(job)
        else:
            self._outcomes.put((job, outcome))
        return True

    def _step(self, job: Job) -> EncodedImage | HeadwiseError | None:
        """None: there is more to do."""
        assert job.file is not None
        try:
            job.steps = job.steps or self._encoder.encode(job.file)
            return next(job.steps)
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
            self._end_stalled()
            if self._reports is not None:
                self._reports.service(self._status)
                self._users.follow(self._reports.users)
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
                self._take(identity, wire.decode(frames[0], *_TAKEN))
            except HeadwiseError as error:
                self._counts["malformed"] += 1
                self._send(identity, failure(error))
            if self._clock() > until:
                break
        for identity in self._listener.ended():
            self._drop(identity)

    def _take(self, identity: bytes, message: Encode | FilePart | WantsRows | EndEncode | Ping) -> None:
        if isinstance(message, Ping):
            self._send(identity, Pong(self._instance))
            return
        if isinstance(message, EndEncode):
            self._drop(identity, message.key)
            return
        try:
            if isinstance(message, Encode):
                self._begin(identity, message)
            elif isinstance(message, FilePart):
                arrived = self._arriving.take(identity, message, self._clock())
                if arrived is not None:
                    self._go_on(*arrived)
            else:
                rows = self._leaving.rows(identity, message, self._clock())
                if rows is not None:
                    self._send(identity, rows)
        except HeadwiseError as error:
            self._counts["refused"] += 1
            self._fail(identity, message.key, error)

    def _begin(self, identity: bytes, encode: Encode) -> None:
        check_encode(encode)
        self._drop(identity, encode.key)  # it may be asked again
        job = Job(identity, encode.key, encode.size, encode.is_video)
        if self._jobs.admit(job):
            self._go_on(job, self._arriving.begin(job, encode, self._clock()))
            return
        self._counts["overloaded"] += 1
        error = OverloadedError(f"{len(self._jobs)} images wait to be encoded already; try again later")
        self._fail(identity, encode.key, error)

    def _go_on(self, job: Job, wanted: int | None) -> None:
        """wanted: the first byte of its file that is not there yet; None: all are"""
        if wanted is None:
            self._jobs.put(job)
        else:
            self._send(job.client, WantsFile(job.key, wanted))

    def _end_stalled(self) -> None:
        """Let go of files that do not come, and of rows that nobody asks for."""
        moment = self._clock() - STALLED_S
        for identity, key in (*self._arriving.stalled_since(moment), *self._leaving.stalled_since(moment)):
            self._fail(identity, key, HeadwiseError(f"nothing was heard for {STALLED_S:g} s of an image under way"))

    def _fail(self, identity: bytes, key: int, error: HeadwiseError) -> None:
        self._drop(identity, key)
        self._send(identity, failure(error, key))

    def _drop(self, identity: bytes, key: int | None = None) -> None:
        """Forget a client, or one of its questions."""
        for place in (self._jobs, self._arriving, self._leaving):
            place.drop(identity, key)

    def _send_outcomes(self) -> None:
        import zmq

        while self._awake.poll(0):
            self._awake.recv(zmq.NOBLOCK)
        while not self._outcomes.empty():
            self._done.append(self._outcomes.get())
        waiting = [(job, outcome) for job, outcome in self._done if not self._is_answered(job, outcome)]
        self._done = waiting
        if sum(outcome.embeds.nbytes for _, outcome in waiting if isinstance(outcome, EncodedImage)) > MAX_KEPT_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()

    def _is_answered(self, job: Job, outcome: EncodedImage | HeadwiseError) -> bool:
        """Answer, unless it has to wait until others have fetched what was made for them."""
        if not self._jobs.is_wanted(job):
            return True
        message: Any
        if isinstance(outcome, HeadwiseError):
            message = failure(outcome, job.key)
        else:
            message = self._leaving.begin(job.client, job.key, outcome, self._clock())
        if message is None:
            return False
        self._jobs.done(job)
        self._counts["refused" if isinstance(outcome, HeadwiseError) else "encoded"] += 1
        self._send(job.client, message)
        return True

    def _send(self, identity: bytes, message: Any) -> None:
        """Send without waiting; a client that is gone or does not read is dropped. Its connection tells it so."""
        if not self._listener.send(identity, wire.encode(message)):
            self._drop(identity)

    def _status(self, reporting: Reporting) -> EncoderStatus:
        stats = {**self._counts, "waiting": len(self._jobs), "cache": self._encoder.stats()}
        where = reporting.advertised(self.endpoint), self.endpoint
        return EncoderStatus(reporting.secret, reporting.name, *where, stats, self._users.users.version)
