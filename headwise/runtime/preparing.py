"""Tokenising and hashing on a few threads, beside the thread that serves."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headwise.errors import HeadwiseError
from headwise.runtime.request import GenerateRequest

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

TOKENIZER_THREADS = 4


class Door(Protocol):
    """`headwise.runtime.front_door.FrontDoor`: called from several threads."""

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


class Preparer:
    """Runs ``work`` for whoever asks; `finished` gives back what came of it, on the thread that serves.

    socket: readable while there is something to collect
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        import zmq

        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="headwise-tokenizer")
        self._outcomes: queue.SimpleQueue[tuple[Any, Outcome]] = queue.SimpleQueue()
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind("inproc://prepared")
        self._waker = context.socket(zmq.PUSH)
        self._waker.setsockopt(zmq.SNDHWM, 0)
        self._waker.connect("inproc://prepared")
        self._wake_lock = threading.Lock()

    def submit(self, tag: Any, work: Callable[[], Prepared]) -> None:
        """Run ``work`` on one of the threads; its result or error comes back with ``tag``."""
        self._pool.submit(self._run, tag, work)

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
        self._pool.shutdown(cancel_futures=True)

    def _run(self, tag: Any, work: Callable[[], Prepared]) -> None:
        outcome: Outcome
        try:
            outcome = work()
        except HeadwiseError as error:
            outcome = error
        except Exception as error:
            log.exception("a request could not be prepared")
            outcome = HeadwiseError(f"the request could not be prepared: {type(error).__name__}: {error}")
        self._outcomes.put((tag, outcome))
        with self._wake_lock:
            self._waker.send(b"")
