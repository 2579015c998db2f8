"""Notices that a thread does not get on, though it should: one of this process, or of another that can be asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

INTERVAL_S = 0.5


class Watchdog:
    """Calls ``on_stuck`` once ``turns()`` has not changed for ``timeout_s``, and again each time it goes on like that
    for as long, until stopped. Neither may wait for what is watched.

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
        """Nothing is called any more once this returns. Not to be called by ``on_stuck``."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def is_stuck(self) -> bool:
        """To be asked every `INTERVAL_S`; after a yes, the time begins anew."""
        now, turns = self._clock(), self._turns()
        was_suspended = now - self._checked > 4 * INTERVAL_S
        self._checked = now
        is_stuck = turns == self._seen and not was_suspended and now - self._since > self._timeout_s
        if turns != self._seen or was_suspended or is_stuck:
            self._seen, self._since = turns, now
        return is_stuck

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            if self.is_stuck():
                self._on_stuck()


class RemoteTurns:
    """For a `Watchdog`, the turns of a thread in another process: one question at a time, never waited for.

    Only silence stands still, and an answer that is the same as before. An error is no silence: it tells that somebody
    knows the process to be gone, and sees to it.

    ask: puts the question; None: there is nobody to be asked now, and nothing to be noticed
    """

    def __init__(self, ask: Callable[[], Future[int] | None]) -> None:
        self._ask = ask
        self._question: Future[int] | None = None
        self._answer = -1
        self._changes = 0

    def __call__(self) -> int:
        """Another number than before if the thread may have got on."""
        if self._question is None or self._question.done():
            self._take(self._question)
            self._question = self._ask()
        return self._changes

    def _take(self, question: Future[int] | None) -> None:
        if question is None or question.exception() is not None:
            self._changes += 1
        elif question.result() != self._answer:
            self._answer = question.result()
            self._changes += 1
