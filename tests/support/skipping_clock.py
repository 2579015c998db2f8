"""A clock for threads that are suspended for a while."""

from __future__ import annotations

import time

from support.waiting import eventually


class SkippingClock:
    """The machine's, but for what it skips."""

    def __init__(self) -> None:
        self.skipped_s, self._looks = 0.0, 0

    def __call__(self) -> float:
        self._looks += 1
        return time.monotonic() + self.skipped_s

    def skip(self, seconds: float) -> None:
        """Return once those who use the clock have looked at it a few times since."""
        self.skipped_s += seconds
        looks = self._looks
        eventually(lambda: self._looks > looks + 5)
