"""Notices a thread that hangs, in this process or in another one that can be asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

INTERVAL_S = 0.5


class Watchdog:
    """Calls ``on_stuck`` when ``progress()`` has not changed for ``timeout_s``, and again after each further
    ``timeout_s`` without a change. Neither function may wait for the watched thread.

    When this process itself was suspended, the time starts again.
    """

    interval_s = INTERVAL_S

    def __init__(
        self,
        progress: Callable[[], int],
        timeout_s: float,
        on_stuck: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
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
        """Call it every ``interval_s``. After it returned True, the time starts again."""
        now, progress = self._clock(), self._progress()
        was_suspended = now - self._checked > 4 * self.interval_s
        self._checked = now
        is_stuck = progress == self._seen and not was_suspended and now - self._since > self._timeout_s
        if progress != self._seen or was_suspended or is_stuck:
            self._seen, self._since = progress, now
        return is_stuck

    def _run(self) -> None:
        while not self._stopping.wait(self.interval_s):
            if self.is_stuck():
                self._on_stuck()


class RemoteProgress:
    """The ``progress`` of a `Watchdog` for a thread in another process: asks one question at a time, and never waits.

    The count stands still while no answer comes, or while the answers are the same. An error counts as progress: the
    process is known to be gone, and is replaced for that reason.

    ask: asks for the other thread's loop count; None: nobody can be asked now, which counts as progress
    """

    def __init__(self, ask: Callable[[], Future[int] | None]) -> None:
        self._ask = ask
        self._question: Future[int] | None = None
        self._answer = -1
        self._changes = 0

    def __call__(self) -> int:
        """A different number than before if the thread may have made progress."""
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
