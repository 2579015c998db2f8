from __future__ import annotations

import threading

from headwise.runtime.watchdog import INTERVAL_S, Watchdog


class Time:
    def __init__(self) -> None:
        self.now, self.turns = 100.0, 0
        self.watchdog = Watchdog(lambda: self.turns, 3.0, lambda: None, clock=lambda: self.now)

    def passes(self, seconds: float) -> bool:
        """Whether the watchdog has called it stuck at any of its looks."""
        stuck = []
        for _ in range(round(seconds / INTERVAL_S)):
            self.now += INTERVAL_S
            stuck.append(self.watchdog.is_stuck())
        return any(stuck)


def test_a_thread_that_takes_no_turn_for_longer_than_the_timeout_is_stuck() -> None:
    time = Time()
    assert not time.passes(3.0)
    assert time.passes(1.0)


def test_a_thread_that_takes_a_turn_now_and_then_is_not() -> None:
    time = Time()
    for _ in range(5):
        assert not time.passes(2.5)
        time.turns += 1


def test_a_process_that_was_suspended_is_given_the_time_again() -> None:
    time = Time()
    assert not time.passes(2.5)
    time.now += 1000.0
    assert not time.passes(3.0)
    assert time.passes(1.0)


def test_it_tells_once() -> None:
    told = threading.Semaphore(0)
    watchdog = Watchdog(lambda: 0, 0.0, told.release)
    watchdog.start()
    assert told.acquire(timeout=10)
    watchdog._thread.join(10)
    assert not watchdog._thread.is_alive()
