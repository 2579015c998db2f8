"""Notices soon that an actor hangs for which another one stands by."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headwise.actors.watchdog import Watchdog
from headwise.liveness_clock import LivenessClock


class FailoverWatchdog(Watchdog):
    """A `Watchdog` with a short timeout and a witness: another process of the same node, which has nothing to do.

    The watched thread's silence counts only while the witness answers. So on a machine that stands still, or has so
    much to do that nobody gets on, nobody seems to hang. Without a witness nothing counts.

    witness: how many questions it has answered (`Answers`); None: there is none
    """

    interval_s = 0.2

    def __init__(
        self,
        progress: Callable[[], int],
        witness: Callable[[], int | None],
        timeout_s: float,
        on_stuck: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(progress, timeout_s, on_stuck, LivenessClock(clock))
        self._witness = witness
        self._answers: int | None = None
        self._silent_s = 0.0

    def is_stuck(self) -> bool:
        now, progress, answers = self._clock(), self._progress(), self._witness()
        passed_s, self._checked = now - self._checked, now
        has_answered = answers is not None and answers != self._answers
        self._answers = answers
        if progress != self._seen:
            self._seen, self._silent_s = progress, 0.0
        elif has_answered:
            self._silent_s += passed_s
        is_stuck = self._silent_s > self._timeout_s
        if is_stuck:
            self._silent_s = 0.0
        return is_stuck


class Answers:
    """Counts what an actor answers that is asked one question at a time. Never waits.

    ask: asks; None: there is nobody to ask
    """

    def __init__(self, ask: Callable[[], Future[Any] | None]) -> None:
        self._ask = ask
        self._question: Future[Any] | None = None
        self._count = 0

    def __call__(self) -> int | None:
        if self._question is None or self._question.done():
            self._count += self._question is not None and self._question.exception() is None
            self._question = self._ask()
        return None if self._question is None else self._count
