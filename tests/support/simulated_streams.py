"""Streams without threads, for tests: time stands still until somebody waits or moves it.

Work runs at the moment it would end, on the thread that looks: by `SimulatedEvent.done`, a wait, or
`SimulatedStream.catch_up`. Delays and failures are handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headwise.transfer.base import ALL, Event, Work

UPTIME_S = 1e6


class SimulatedClock:
    """Seconds, as a call; shared by the streams of a test, which so run at the same time.

    now: those since the test began, where the machine has been up for `UPTIME_S`
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return UPTIME_S + self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class SimulatedEvent:
    """`Event` of a `SimulatedStream`."""

    def __init__(self, stream: SimulatedStream) -> None:
        self._stream = stream
        self.ends_at = 0.0
        self.is_over = False
        self.error: Exception | None = None
        self.busy_s = 0.0

    @property
    def done(self) -> bool:
        self._stream.catch_up()
        return self.is_over

    def wait(self, timeout_s: float | None = None) -> bool:
        """Moves the clock to the end of the work, or by the timeout if that comes first."""
        if not self.done:
            left = self.ends_at - self._stream.clock.now
            self._stream.clock.advance(left if timeout_s is None else min(left, timeout_s))
            if timeout_s is None or left <= timeout_s:
                self._stream.clock.now = max(self._stream.clock.now, self.ends_at)  # whatever rounding says
        if not self.done:
            return False
        if self.error is not None:
            raise self.error
        return True


class SimulatedStream:
    """`Stream` on a simulated clock.

    delay_s: seconds the next piece of work submitted takes
    failure: what the next piece of work to run raises instead of running; None to let it run
    """

    def __init__(
        self,
        clock: SimulatedClock,
        delay_s: Callable[[], float] = lambda: 0.0,
        failure: Callable[[], Exception | None] = lambda: None,
        lookahead: int = ALL,
    ) -> None:
        self.clock = clock
        self.lookahead = lookahead
        self._delay_s = delay_s
        self._failure = failure
        self._queue: deque[tuple[Work, SimulatedEvent]] = deque()
        self._busy_until = 0.0
        self.waited_s = 0.0
        self.is_closed = False

    def __len__(self) -> int:
        """Pieces of work that did not end yet."""
        return len(self._queue)

    def make_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def submit(self, work: Work, event: Event | None = None, *, follows: bool = False) -> SimulatedEvent:
        assert not self.is_closed
        event = event or SimulatedEvent(self)
        assert isinstance(event, SimulatedEvent)
        assert all(event is not other for _, other in self._queue), "the event is in use"
        event.is_over, event.error, event.busy_s = False, None, self._delay_s()
        event.ends_at = self._busy_until = max(self._busy_until, self.clock.now) + event.busy_s
        self._queue.append((work, event))
        return event

    def wait_for(self, event: Event, timeout_s: float) -> bool:
        started = self.clock.now
        try:
            return event.wait(timeout_s)
        finally:
            self.waited_s += self.clock.now - started

    def close(self) -> None:
        while self.step():
            pass
        self.is_closed = True

    def catch_up(self) -> None:
        """Run what has ended by now."""
        while self._queue and self._queue[0][1].ends_at <= self.clock.now:
            self.step()

    def step(self) -> bool:
        """Run the next piece of work, whatever the clock says; False if there is none."""
        if not self._queue:
            return False
        work, event = self._queue.popleft()
        event.error = self._failure()
        if event.error is None:
            try:
                work()
            except Exception as error:
                event.error = error
        event.is_over = True
        return True
