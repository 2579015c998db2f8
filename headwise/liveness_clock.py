"""The clock by which timeouts of other processes are measured."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_S = 0.5
"""Between two reads at most so much time counts. Its users read it several times a second while they run."""


class LivenessClock:
    """A clock that stops while this process is suspended: of a long time between two reads, only `LONGEST_S` counts.

    A suspended process receives nothing. When it goes on, the messages of the others are still unread. So the time of
    its own suspension must not count as their silence.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = self._now = clock()

    def __call__(self) -> float:
        """Seconds since an arbitrary start."""
        now = self._clock()
        self._now += min(now - self._read_at, LONGEST_S)
        self._read_at = now
        return self._now
