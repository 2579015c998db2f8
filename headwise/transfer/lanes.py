"""Work for several parties on several streams: for one party in order, for different ones at the same time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from headwise.transfer.base import Event, Stream, Work, end, ends_by


class Lanes:
    """Runs pieces of work for one party one after the other, and for as many parties at a time as there are streams.
    Who has waited for longest is next: a party whose work hangs holds up its own, and one stream.

    Used by one thread, but for what streams run. Work raises nothing.
    """

    def __init__(self, streams: Sequence[Stream], clock: Callable[[], float] = time.monotonic) -> None:
        self._streams, self._clock = streams, clock
        self._last: list[Event | None] = [None] * len(streams)
        self._lock = threading.Lock()
        self._idle = list(reversed(range(len(streams))))
        self._waiting: deque[tuple[Hashable, Work]] = deque()
        self._served: set[Hashable] = set()
        self._open = len(streams)

    def submit(self, party: Hashable, work: Work) -> None:
        """Run ``work`` when what was submitted for this party is over, and a stream is free. Returns at once."""
        with self._lock:
            self._waiting.append((party, work))
            lane = self._idle.pop() if self._idle else None
        if lane is not None:
            self._last[lane] = self._streams[lane].submit(partial(self._serve, lane))

    def _serve(self, lane: int) -> None:
        """Run what nobody else runs. A lane is idle only if all that waits is for parties that others serve, which
        look for more before they are idle themselves."""
        while (taken := self._take(lane)) is not None:
            party, work = taken
            work()
            with self._lock:
                self._served.remove(party)

    def _take(self, lane: int) -> tuple[Hashable, Work] | None:
        with self._lock:
            for at, (party, work) in enumerate(self._waiting):
                if party not in self._served:
                    del self._waiting[at]
                    self._served.add(party)
                    return party, work
            self._idle.append(lane)
            return None

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is over, and return whether it is."""
        until = self._clock() + timeout_s
        return all(event is None or ends_by(event, max(0.0, until - self._clock())) for event in self._last)

    def close(self, last: Work, timeout_s: float) -> None:
        """End the streams, within about ``timeout_s``, and run ``last`` when nothing else runs any more. Work that
        hangs is left to its stream's thread. The last call."""
        self._last = [stream.submit(partial(self._leave, last)) for stream in self._streams]
        self.drain(timeout_s)
        for stream, event in zip(self._streams, self._last, strict=True):
            end(stream, event)

    def _leave(self, last: Work) -> None:
        with self._lock:
            self._open -= 1
            is_last = not self._open
        if is_last:
            last()
