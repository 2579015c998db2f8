"""Notices that a thread of this process does not get on, though it should."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

INTERVAL_S = 0.5


class Watchdog:
    """Calls ``on_stuck`` once ``turns()`` has not changed for ``timeout_s``, unless stopped before.

    A process that was suspended as a whole, and its threads with it, is given the time again.
    """

    def __init__(
        self,
        turns: Callable[[], int],
        timeout_s: float,
        on_stuck: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turns = turns
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._clock = clock
        self._seen = -1
        self._since = self._checked = clock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def is_stuck(self) -> bool:
        """To be asked every `INTERVAL_S`."""
        now, turns = self._clock(), self._turns()
        was_suspended = now - self._checked > 4 * INTERVAL_S
        self._checked = now
        if turns != self._seen or was_suspended:
            self._seen, self._since = turns, now
        return now - self._since > self._timeout_s

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            if self.is_stuck():
                self._on_stuck()
                return
