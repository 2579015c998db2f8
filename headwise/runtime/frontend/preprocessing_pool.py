"""Tokenising and hashing on a few threads, beside the thread that serves."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headwise.errors import HeadwiseError
from headwise.runtime.protocol.request import GenerateRequest

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

SHORT_BYTES = 64 << 10
"""A text of so many bytes is tokenised in a moment."""
BYTES_PER_S = 500_000
"""About what is tokenised in a second."""
MAX_WAITING_BYTES = 256 << 20
"""Of texts that wait to be tokenised."""


class Door(Protocol):
    """`headwise.runtime.frontend.preprocessor.Preprocessor`: called from several threads."""

    def prepare(
        self, *, prompt: Any, messages: Any, sampling: dict[str, Any], priority: int, cache_salt: str
    ) -> GenerateRequest: ...

    def hashes(self, request: GenerateRequest) -> list[bytes]: ...


@dataclass(frozen=True)
class Prepared:
    """A request, and the hashes of the full blocks of its tokens."""

    request: GenerateRequest
    hashes: list[bytes]

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)


Outcome = Prepared | HeadwiseError


@dataclass(frozen=True)
class Job:
    """What is to be prepared.

    tag:       comes back with what came of it
    num_bytes: of text to tokenise
    is_wanted: whether anybody waits for it still; it is left out if not
    """

    tag: Any
    work: Callable[[], Prepared]
    num_bytes: int
    is_wanted: Callable[[], bool]


class JobQueue:
    """Jobs of which the one comes first that would end first, had each begun when it came: short texts overtake long
    ones, and none waits for ever. Safe to use from several threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._short: list[tuple[float, int, Job]] = []
        self._long: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._num_bytes = 0
        self._is_closed = False
        self._change = threading.Condition()

    def put(self, job: Job) -> bool:
        """False if there are too many bytes of text already: at most `MAX_WAITING_BYTES`, or one job's."""
        with self._change:
            if self._num_bytes and self._num_bytes + job.num_bytes > MAX_WAITING_BYTES:
                self._drop_unwanted()
                if self._num_bytes and self._num_bytes + job.num_bytes > MAX_WAITING_BYTES:
                    return False
            ends_at = self._clock() + job.num_bytes / BYTES_PER_S
            jobs = self._short if job.num_bytes <= SHORT_BYTES else self._long
            heapq.heappush(jobs, (ends_at, next(self._numbers), job))
            self._num_bytes += job.num_bytes
            self._change.notify_all()
            return True

    def get(self, *, only_short: bool) -> Job | None:
        """The next job that is wanted, once there is one; None once the queue is closed."""
        with self._change:
            while True:
                while not self._is_closed and not self._first(only_short):
                    self._change.wait()
                if self._is_closed:
                    return None
                _, _, job = heapq.heappop(self._first(only_short))
                self._num_bytes -= job.num_bytes
                if job.is_wanted():
                    return job

    def close(self) -> None:
        """Nobody waits any more; what is in the queue is dropped."""
        with self._change:
            self._is_closed = True
            self._short, self._long = [], []
            self._change.notify_all()

    def _first(self, only_short: bool) -> list[tuple[float, int, Job]]:
        """The heap with the next job."""
        if only_short or not self._long or (self._short and self._short[0] < self._long[0]):
            return self._short
        return self._long

    def _drop_unwanted(self) -> None:
        self._short = [each for each in self._short if each[2].is_wanted()]
        self._long = [each for each in self._long if each[2].is_wanted()]
        heapq.heapify(self._short)
        heapq.heapify(self._long)
        self._num_bytes = sum(job.num_bytes for _, _, job in (*self._short, *self._long))


class PreprocessingPool:
    """Runs ``work`` for whoever asks; `finished` gives back what came of it, on the thread that serves.

    threads: how many run at once. Of several, one takes what is short only, so that this never waits for what is long
    socket:  readable while there is something to collect
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], threads: int) -> None:
        import zmq

        self._jobs = JobQueue()
        self._outcomes: queue.SimpleQueue[tuple[Any, Outcome]] = queue.SimpleQueue()
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind("inproc://prepared")
        self._waker = context.socket(zmq.PUSH)
        self._waker.setsockopt(zmq.SNDHWM, 0)
        self._waker.connect("inproc://prepared")
        self._wake_lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._run, args=(threads > 1 and index == 0,), name=f"headwise-tokenizer-{index}", daemon=True
            )
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """Do the job on one of the threads; its result or error comes back with its tag. False if it is not taken:
        too much text waits already.
        """
        return self._jobs.put(job)

    def finished(self) -> list[tuple[Any, Outcome]]:
        """What has been done since the last call."""
        import zmq

        done: list[tuple[Any, Outcome]] = []
        while True:
            try:
                self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return done
            done.append(self._outcomes.get())

    def close(self) -> None:
        """Wait for what runs; the rest is dropped."""
        self._jobs.close()
        for thread in self._threads:
            thread.join()

    def _run(self, only_short: bool) -> None:
        while (job := self._jobs.get(only_short=only_short)) is not None:
            self._outcomes.put((job.tag, _outcome(job)))
            with self._wake_lock:
                self._waker.send(b"")


def _outcome(job: Job) -> Outcome:
    try:
        return job.work()
    except HeadwiseError as error:
        return error
    except Exception as error:
        log.exception("a request could not be prepared")
        return HeadwiseError(f"the request could not be prepared: {type(error).__name__}: {error}")
