"""What was needed lately: the number rises only after more, and falls only after less, was needed for a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headwise.runtime.frontend.scaling.demand import Need


@dataclass(frozen=True)
class Sample:
    """What was needed at a time: ``up`` to keep the target, ``down`` to keep it with something to spare."""

    at: float
    up: Need
    down: Need


class Evidence:
    """The number rises to the least that was needed in all of the last ``upscale_s``, and falls to the most that was
    needed, with something to spare, in all of the last ``downscale_s``.

    So after it rose it cannot fall for ``downscale_s``, and after it fell it cannot rise for ``upscale_s``: what was
    needed when it was changed is among what counts.
    """

    def __init__(self, upscale_s: float, downscale_s: float) -> None:
        self._upscale_s, self._downscale_s = upscale_s, downscale_s
        self._samples: deque[Sample] = deque()
        self._since: float | None = None

    def add(self, sample: Sample) -> None:
        """The samples' times never go back."""
        if self._since is None:
            self._since = sample.at
        self._samples.append(sample)
        longest = max(self._upscale_s, self._downscale_s)
        while self._samples[0].at < sample.at - longest:
            self._samples.popleft()

    def clear(self) -> None:
        """Nothing is known of the time before now."""
        self._samples.clear()
        self._since = None

    def rise(self, number: int, now: float) -> Need | None:
        """What to rise to; None: nothing over ``number``."""
        if self._since is None or now - self._since < self._upscale_s:
            return None
        lately = (one.up for one in self._samples if one.at >= now - self._upscale_s)
        least = min(lately, key=_number, default=None)  # none: the load was not measured in this time
        return least if least is not None and least.number > number else None

    def fall(self, number: int, now: float) -> Need | None:
        """What to fall to; None: nothing under ``number``."""
        if self._since is None or now - self._since < self._downscale_s:
            return None
        lately = (one.down for one in self._samples if one.at >= now - self._downscale_s)
        most = max(lately, key=_number, default=None)
        return most if most is not None and most.number < number else None


def _number(need: Need) -> int:
    return need.number
