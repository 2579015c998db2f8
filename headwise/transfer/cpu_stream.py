"""A stream on a CPU: a thread that takes work from a queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from headwise.transfer.base import ALL, Event, Work


class CpuEvent:
    """`Event` of a `CpuStream`."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._busy_s = 0.0

    @property
    def done(self) -> bool:
        return self._is_over.is_set()

    @property
    def busy_s(self) -> float:
        return self._busy_s

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`."""
        if not self._is_over.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def clear(self) -> None:
        """Make ready for another piece of work."""
        self._is_over.clear()
        self._error = None

    def finish(self, error: BaseException | None, busy_s: float) -> None:
        """The work is over."""
        self._error, self._busy_s = error, busy_s
        self._is_over.set()


class CpuStream:
    """`Stream` whose work runs on a thread of its own; copies must release the GIL to run beside the forward pass."""

    lookahead = ALL

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waited_s = 0.0
        self._queue: SimpleQueue[tuple[Work, CpuEvent] | None] = SimpleQueue()
        self._is_open = True
        # A daemon: a process that dies without `close` must not hang on its copies.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waited_s(self) -> float:
        return self._waited_s

    def make_event(self) -> CpuEvent:
        return CpuEvent()

    def submit(self, work: Work, event: Event | None = None, *, follows: bool = False) -> CpuEvent:
        """See `Stream.submit`.

        Raises:
            RuntimeError: the stream is closed.
        """
        if not self._is_open:
            raise RuntimeError(f"stream {self._thread.name!r} is closed: nothing more can be submitted to it")
        event = event or CpuEvent()
        assert isinstance(event, CpuEvent), f"an event of another kind of stream: {event!r}"
        event.clear()
        self._queue.put((work, event))
        return event

    def wait_for(self, event: Event, timeout_s: float) -> bool:
        """See `Stream.wait_for`."""
        if event.done:
            return event.wait(0)
        started = self._clock()
        try:
            return event.wait(timeout_s)
        finally:
            self._waited_s += self._clock() - started

    def close(self) -> None:
        """See `Stream.close`."""
        if self._is_open:
            self._is_open = False
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (submitted := self._queue.get()) is not None:
            work, event = submitted
            started, error = self._clock(), None
            try:
                work()
            except BaseException as raised:  # whatever it is belongs to whoever waits, and the next piece must run
                error = raised
            event.finish(error, self._clock() - started)
            del work, event, submitted, error  # an idle stream holds on to no arena
