"""The load to count on, from what has arrived lately: what a minute shows is mostly chance.

    sizes   engine-seconds of a request, their mean and variation: over `SIZE_WINDOW_S`. Few long prompts among many
            short ones make the mean of a minute wrong by a fifth
    rate    requests a second: the line through both halves of `TREND_WINDOW_S`, read off where an engine that is
            ordered now will serve. The mean alone would lag behind by half a window

Either changes at once, too: what the last `LOAD_WINDOW_S` show counts instead where it differs by more than chance
explains (`SURPRISE` standard deviations).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from headwise.runtime.frontend.routing.engines import Arrivals

LOAD_WINDOW_S = 60.0
TREND_WINDOW_S = 300.0
SIZE_WINDOW_S = 600.0

LEAST_WINDOW_S = 5.0
"""Load that was measured for a shorter time says nothing."""

SURPRISE = 3.0

MAX_GROWTH = 1.6
"""A line says nothing of peaks: at most so many times the mean of its window is expected, and at least its inverse."""


@dataclass(frozen=True)
class Expected:
    """rate: requests a second; mean_s: engine-seconds of one; variation: of these, variance over the mean's square"""

    rate: float = 0.0
    mean_s: float = 0.0
    variation: float = 0.0


class LoadHistory:
    """What had arrived, by time. Times never go back."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._seen: list[Arrivals] = []

    def clear(self) -> None:
        self._times.clear()
        self._seen.clear()

    def add(self, now: float, arrivals: Arrivals) -> None:
        """What has arrived by now; less than before: who counts was started again, and counts from nothing."""
        if self._seen and arrivals.requests < self._seen[-1].requests:
            self.clear()
        self._times.append(now)
        self._seen.append(arrivals)
        old = self._first_since(now - SIZE_WINDOW_S)
        if old > len(self._times) // 2:
            del self._times[:old], self._seen[:old]

    def expected(self, ahead_s: float) -> Expected | None:
        """What to count on in so many seconds; None: it was not watched for long enough."""
        if not self._times or self._times[-1] - self._times[0] < LEAST_WINDOW_S:
            return None
        sizes, lately = self._sizes(SIZE_WINDOW_S), self._sizes(LOAD_WINDOW_S)
        count = self._since(LOAD_WINDOW_S).requests
        spread = sizes.mean_s * math.sqrt(sizes.variation / count) if count else math.inf
        if abs(lately.mean_s - sizes.mean_s) > SURPRISE * spread:
            sizes = lately
        return Expected(self._rate(ahead_s), sizes.mean_s, sizes.variation)

    def _rate(self, ahead_s: float) -> float:
        seconds = self._span(LOAD_WINDOW_S)
        lately = self._since(LOAD_WINDOW_S).requests
        whole = self._span(TREND_WINDOW_S)
        if whole < TREND_WINDOW_S / 2:
            return lately / seconds
        requests, half = self._since(TREND_WINDOW_S).requests, self._since(whole / 2).requests
        mean, later = requests / whole, half / self._span(whole / 2)
        growth = (later - mean) / (whole / 4)  # the middle of the later half is so far from that of the whole
        now = mean + growth * whole / 2
        as_expected = (now - growth * seconds / 2) * seconds
        if abs(lately - as_expected) > SURPRISE * math.sqrt(max(1.0, as_expected)):
            return lately / seconds
        return min(max(now + growth * ahead_s, mean / MAX_GROWTH), mean * MAX_GROWTH)

    def _sizes(self, window_s: float) -> Expected:
        since = self._since(window_s)
        if since.requests <= 0 or since.seconds <= 0:
            return Expected()
        mean = since.seconds / since.requests
        return Expected(mean_s=mean, variation=max(0.0, since.squares / since.requests / mean**2 - 1))

    # ---- windows ----

    def _first_since(self, at: float) -> int:
        """The last entry at or before a time; the first one if there is none."""
        return max(0, bisect_left(self._times, at + 1e-9) - 1)

    def _since(self, window_s: float) -> Arrivals:
        """What has arrived within a time until now."""
        before, now = self._seen[self._first_since(self._times[-1] - window_s)], self._seen[-1]
        return Arrivals(
            now.requests - before.requests, now.seconds - before.seconds, max(0.0, now.squares - before.squares)
        )

    def _span(self, window_s: float) -> float:
        """The seconds of such a window that were watched."""
        return self._times[-1] - self._times[self._first_since(self._times[-1] - window_s)]
