"""Calls that share one engine core, each on its caller's thread: whoever waits for output steps the core for all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from headwise.errors import EngineDiedError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.operations import EVERY_TIER
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, OutputDelta

Inbox = deque[OutputDelta]


class LocalCalls:
    """Runs requests and operations on ``core``, for any number of threads.

    The core serves one thread at a time, for one step, in the order in which they asked. A step brings output of
    every call's requests: what is another's waits in its inbox, so a stream that nobody reads holds up nobody.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._changed = threading.Condition()  # held by whoever uses the core
        self._asking: deque[object] = deque()  # turns at the core, the next one first
        self._inside = threading.local()
        self._inboxes: dict[str, Inbox] = {}  # by request
        self._left: deque[str] = deque()  # requests whose call has ended, to be aborted
        self._is_closed = False

    def run(self, requests: Sequence[GenerateRequest]) -> Iterator[OutputDelta]:
        """The output of ``requests`` as it comes. Closing the iterator aborts them.

        Raises:
            EngineDiedError: a step failed.
        """
        inbox: Inbox = deque()
        running: set[str] = set()
        try:
            with self._turn():
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
            self._left.extend(running)
            self._settle()

    def operate(self, action: str, tier: str = EVERY_TIER) -> int:
        """Carry out an operation of the core; the blocks that a reset has forgotten."""
        with self._turn():
            operation = self._core.operate(action, tier)
        while not operation.is_done:
            with self._turn():
                self._step()
        return operation.blocks

    def close(self) -> None:
        """Let the core alone from now on; streams that are open end with `EngineDiedError`."""
        with self._turn():
            self._is_closed = True

    def _next(self, inbox: Inbox) -> OutputDelta:
        """The next of a call's deltas; waits while the engine is asleep."""
        while not inbox:
            with self._turn():
                if not inbox and (self._is_closed or self._core.has_work()):
                    self._step()
            with self._entered(), self._changed:
                self._changed.wait_for(lambda: inbox or self._is_closed or self._core.has_work())
        return inbox.popleft()

    def _step(self) -> None:
        """Have the core get on, and everybody their output. Within a turn."""
        if self._is_closed:
            raise EngineDiedError("the engine was closed")
        for delta in self._core.step(None):
            if delta.request_id in self._inboxes:
                self._inboxes[delta.request_id].append(delta)

    def _settle(self) -> None:
        """Abort what was left, and let copies and steps in flight end, unless other calls see to that."""
        if self._is_inside:
            return  # a stream is collected as garbage in the middle of a turn of this thread: the next one sees to it
        with suppress(EngineDiedError):  # whoever waits for output hears of it
            while True:
                with self._turn():
                    if self._inboxes or not self._core.has_work():
                        return
                    self._step()

    # ---- turns ----

    @property
    def _is_inside(self) -> bool:
        """Whether this thread asks for the core already, or uses it."""
        return getattr(self._inside, "depth", 0) > 0

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            yield
        finally:
            self._inside.depth -= 1

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the core, and use it alone."""
        me = object()
        with self._entered(), self._changed:
            self._asking.append(me)
            try:
                self._changed.wait_for(lambda: self._asking[0] is me)
                self._abort_left()
                yield
            finally:
                self._asking.remove(me)
                self._changed.notify_all()

    def _abort_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            self._inboxes.pop(request_id, None)
            self._core.abort(request_id)
