"""Calls that share one engine core. A thread that waits for its output runs the core's steps for all calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from headwise.errors import EngineDiedError, ModelError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.operations import EVERY_TIER, NewWeights, Operation
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, OutputDelta

Inbox = deque[OutputDelta]


class LocalCalls:
    """Runs requests and operations on ``core``, for any number of threads.

    One thread at a time runs one step of the core, in the order in which they asked. A step has output for the requests
    of several calls. Output of other calls goes to their inboxes, so a stream that nobody reads blocks no other.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._changed = threading.Condition()  # held by the thread that uses the core
        self._waiting: deque[object] = deque()  # threads that want the core, the next one first
        self._thread_state = threading.local()
        self._inboxes: dict[str, Inbox] = {}  # by request
        self._to_abort: deque[str] = deque()  # requests whose call has ended, to be aborted
        self._is_closed = False

    def run(self, requests: Sequence[GenerateRequest]) -> Iterator[OutputDelta]:
        """The output of ``requests`` as it comes. Closing the iterator aborts them.

        Raises:
            EngineDiedError: a step failed.
        """
        inbox: Inbox = deque()
        running: set[str] = set()
        try:
            with self._core_lock():
                for request in requests:
                    self._core.add(request)
                    running.add(request.request_id)
                    self._inboxes[request.request_id] = inbox
            while running:
                delta = self._next(inbox)
                if delta.finish_reason is FinishReason.ERROR:
                    raise EngineDiedError(delta.error)
                if delta.finish_reason is not None:
                    running.remove(delta.request_id)
                    del self._inboxes[delta.request_id]
                yield delta
        finally:
            self._to_abort.extend(running)
            self._drain()

    def operate(self, action: str, tier: str = EVERY_TIER) -> int:
        """Carry out an operation of the core. Returns how many blocks a reset forgot."""
        return self._carry_out(lambda: self._core.operate(action, tier)).blocks

    def change_weights(self, new: NewWeights) -> None:
        """Have the core's model get other weights. Raises `ModelError` if it cannot have these and goes on with what it
        had, and `EngineDiedError` if it has that no more either."""
        refusal = self._carry_out(lambda: self._core.change_weights(new)).refusal
        if refusal:
            raise ModelError(refusal)

    def _carry_out(self, begin: Callable[[], Operation]) -> Operation:
        with self._core_lock():
            operation = begin()
        while not operation.is_done:
            with self._core_lock():
                self._step()
        return operation

    def close(self) -> None:
        """Use the core no more. Open streams end with `EngineDiedError`."""
        with self._core_lock():
            self._is_closed = True

    def _next(self, inbox: Inbox) -> OutputDelta:
        """The next of a call's deltas; waits while the engine is asleep."""
        while not inbox:
            with self._core_lock():
                if not inbox and (self._is_closed or self._core.has_work()):
                    self._step()
            with self._inside_core(), self._changed:
                self._changed.wait_for(lambda: inbox or self._is_closed or self._core.has_work())
        return inbox.popleft()

    def _step(self) -> None:
        """Run one step of the core, and deliver its output to the inboxes. Only within `_core_lock`."""
        if self._is_closed:
            raise EngineDiedError("the engine was closed")
        for delta in self._core.step(None):
            if delta.request_id in self._inboxes:
                self._inboxes[delta.request_id].append(delta)

    def _drain(self) -> None:
        """Abort requests whose call has ended, and run until steps and copies in flight end, unless other calls run."""
        if self._is_in_core:
            return  # a stream was garbage-collected while this thread uses the core: the next user aborts it
        with suppress(EngineDiedError):  # calls that wait for output get this error
            while True:
                with self._core_lock():
                    if self._inboxes or not self._core.has_work():
                        return
                    self._step()

    # ---- who uses the core ----

    @property
    def _is_in_core(self) -> bool:
        """Whether this thread already waits for the core, or uses it."""
        return getattr(self._thread_state, "depth", 0) > 0

    @contextmanager
    def _inside_core(self) -> Iterator[None]:
        self._thread_state.depth = getattr(self._thread_state, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread_state.depth -= 1

    @contextmanager
    def _core_lock(self) -> Iterator[None]:
        """Wait for the core, and use it alone. Threads get it in the order in which they asked."""
        me = object()
        with self._inside_core(), self._changed:
            self._waiting.append(me)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is me)
                self._abort_ended()
                yield
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def _abort_ended(self) -> None:
        while self._to_abort:
            request_id = self._to_abort.popleft()
            self._inboxes.pop(request_id, None)
            self._core.abort(request_id)
