"""What a section of `gpu_checks.py` measures with: times of work on a rig, and the card's bandwidths."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gpu.random_bytes import fill
from gpu.report import Recorder
from gpu.rig import Rig, Work
from gpu.sizes import Sizes

MOST_FLUSHES = 64
"""So often at most, for the host to enqueue all that is timed while the GPU reads."""

WARM_FLUSHES = 1000
"""Before the first measurement: some 0.3 s, in which clocks go up."""


@dataclass
class Bench:
    """What a section is handed.

    rows:    takes what it finds
    options: those of the command line
    late:    times that were taken although the host was not ahead
    is_warm: whether the clocks have gone up
    """

    rig: Rig
    rows: Recorder
    options: argparse.Namespace
    late: int = 0
    is_warm: bool = False

    @property
    def sizes(self) -> Sizes:
        return self.rig.sizes

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a plain copy within the device's memory."""
        rig, half = self.rig, self.sizes.copied_bytes
        source, target = fill(rig, rig.empty(half)), rig.empty(half)
        return 2 * half / self.seconds({"copy": lambda: rig.copy(target, source)})["copy"]

    @cached_property
    def read_bandwidth(self) -> float:
        """Bytes per second of a kernel that only reads."""
        rig, size = self.rig, self.sizes.copied_bytes
        source = fill(rig, rig.empty(size))
        return size / self.seconds({"read": lambda: rig.read(source)})["read"]

    def seconds(self, works: Mapping[str, Work], rounds: int | None = None, ahead: bool = True) -> dict[str, float]:
        """Median time that the GPU takes for each work on the current stream. They take turns, and find cold caches.

        ahead: the GPU begins with a work when the host is through with it, so that it waits for no launch
        """
        self._warm_up()
        times: dict[str, list[float]] = {name: [] for name in works}
        flushes = dict.fromkeys(works, 1)
        rehearsals = int(self.sizes.rehearsed)
        for work in works.values() if rehearsals else ():
            work()
        for turn in range((rounds or self.sizes.rounds) + rehearsals):
            for name, work in works.items():
                taken, is_late = self._timed(work, flushes[name])
                while ahead and is_late and flushes[name] < MOST_FLUSHES:
                    flushes[name] *= 2
                    taken, is_late = self._timed(work, flushes[name])
                if turn >= rehearsals:  # the first turn warms up
                    times[name].append(taken)
                    self.late += int(ahead and is_late)
        return {name: statistics.median(taken) for name, taken in times.items()}

    def _timed(self, work: Work, flushes: int) -> tuple[float, bool]:
        """Seconds, and whether the GPU may have waited for the host meanwhile."""
        rig = self.rig
        for _ in range(flushes):
            rig.flush()
        begin = rig.mark()
        work()
        end = rig.mark()
        is_late = rig.has_passed(begin)
        rig.wait(end)
        return rig.seconds_between(begin, end), is_late

    def _warm_up(self) -> None:
        if not self.is_warm:
            self.is_warm = True
            for _ in range(WARM_FLUSHES):
                self.rig.flush()

    def finish(self) -> None:
        """The end of a section."""
        if self.late:
            self.rows.add("late", self.late, "times", note="taken while the GPU waited for the host's launches")
