"""Time by which the silence of others is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_S = 0.5
"""As much of the time between two looks counts. Those who use it look several times a second while they run."""


class LivenessClock:
    """A clock that goes on only while it is looked at: of a long time between two looks, `LONGEST_S` counts.

    Whoever was suspended with its process or machine has heard nothing meanwhile, and what the others have said is
    still to be read: they must not count as silent at the first look at the clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = self._now = clock()

    def __call__(self) -> float:
        """Seconds, of no particular beginning."""
        now = self._clock()
        self._now += min(now - self._looked_at, LONGEST_S)
        self._looked_at = now
        return self._now
