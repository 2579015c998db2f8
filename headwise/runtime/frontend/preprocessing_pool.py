"""Threads that tokenise and hash requests, so that the scheduler's thread need not."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headwise.errors import HeadwiseError
from headwise.runtime.config.model_card import Naming
from headwise.runtime.protocol.images import PromptImage
from headwise.runtime.protocol.prompt_items import PromptItem
from headwise.runtime.protocol.request import GenerateRequest

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

SHORT_BYTES = 64 << 10
"""Texts up to this size are short: they are tokenised in a moment."""
BYTES_PER_S = 500_000
"""About how fast text is tokenised."""
MAX_WAITING_BYTES = 256 << 20
"""Most bytes of text that may wait to be tokenised."""


class RequestPreprocessor(Protocol):
    """`headwise.runtime.frontend.preprocessor.Preprocessor`: called from several threads."""

    naming: Naming

    def prepare(
        self,
        *,
        prompt: Any,
        messages: Any,
        sampling: dict[str, Any],
        priority: int,
        cache_salt: str,
        items: Sequence[PromptItem],
        adapter: str,
        images: Sequence[PromptImage],
    ) -> GenerateRequest: ...

    def hashes(self, request: GenerateRequest) -> list[bytes]: ...


@dataclass(frozen=True)
class PreparedRequest:
    """A request, and the hashes of the full blocks of its tokens."""

    request: GenerateRequest
    hashes: list[bytes]

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)


Work = Callable[[], PreparedRequest]
Outcome = PreparedRequest | HeadwiseError


@dataclass(frozen=True)
class Job:
    """A request to prepare.

    tag:       returned with the outcome
    num_bytes: of text to tokenise
    is_wanted: whether the client still waits for it; if not, the job is skipped
    """

    tag: Any
    work: Work
    num_bytes: int
    is_wanted: Callable[[], bool]


class JobQueue:
    """Jobs in the order of their virtual end: arrival time plus estimated duration. So short texts overtake long ones,
    and no job waits for ever. Safe to use from several threads.
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
        """Add a job. False if too much text waits already: at most `MAX_WAITING_BYTES`, or a single larger job."""
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
        """Wait for the next job that is wanted; None once the queue is closed."""
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
        """Wake all waiting threads, and drop the jobs in the queue."""
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
    """Runs jobs on its threads. The thread that submits them collects the outcomes with `finished`.

    threads: jobs that run at once. If there are several, one thread takes short texts only, so that these never wait
             for long ones
    socket:  readable while there is something to collect
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], threads: int) -> None:
        import zmq

        self._jobs = JobQueue()
        self._outcomes: queue.SimpleQueue[tuple[Any, Outcome]] = queue.SimpleQueue()
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind("inproc://prepared")
        self._wake_socket = context.socket(zmq.PUSH)
        self._wake_socket.setsockopt(zmq.SNDHWM, 0)
        self._wake_socket.connect("inproc://prepared")
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
        """Queue a job; its result or error comes back with its tag. False if too much text waits already."""
        return self._jobs.put(job)

    def finished(self) -> list[tuple[Any, Outcome]]:
        """The tags and outcomes of the jobs that have ended since the last call."""
        import zmq

        done: list[tuple[Any, Outcome]] = []
        while True:
            try:
                self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return done
            done.append(self._outcomes.get())

    def close(self) -> None:
        """Wait for the running jobs; the others are dropped."""
        self._jobs.close()
        for thread in self._threads:
            thread.join()

    def _run(self, only_short: bool) -> None:
        while (job := self._jobs.get(only_short=only_short)) is not None:
            self._outcomes.put((job.tag, _outcome(job)))
            with self._wake_lock:
                self._wake_socket.send(b"")


def _outcome(job: Job) -> Outcome:
    try:
        return job.work()
    except HeadwiseError as error:
        return error
    except Exception as error:
        log.exception("a request could not be prepared")
        return HeadwiseError(f"the request could not be prepared: {type(error).__name__}: {error}")
