from __future__ import annotations

from concurrent.futures import Future

from headwise.actors.failover import Answers, FailoverWatchdog


class Time:
    """A scheduler and its witness, who do so much in every interval."""

    def __init__(self) -> None:
        self.now, self.progress = 100.0, 0
        self.answers: int | None = 0
        self.watchdog = FailoverWatchdog(
            lambda: self.progress, lambda: self.answers, 1.5, lambda: None, clock=lambda: self.now
        )

    def passes(self, seconds: float, progress: int = 0, answers: int = 1, step_s: float = 0.2) -> bool:
        """Whether the scheduler seems stuck at any look."""
        stuck = []
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            self.progress += progress
            if self.answers is not None:
                self.answers += answers
            stuck.append(self.watchdog.is_stuck())
        return any(stuck)


def test_who_is_silent_while_the_witness_answers_is_stuck_soon() -> None:
    time = Time()
    time.passes(10.0, progress=1)
    assert not time.passes(1.4)
    assert time.passes(0.6)


def test_who_gets_on_now_and_then_is_not_stuck() -> None:
    time = Time()
    for _ in range(20):
        assert not time.passes(1.4)
        assert not time.passes(0.2, progress=1)


def test_while_the_witness_is_silent_too_nobody_is_stuck() -> None:
    """The machine has too much to do."""
    time = Time()
    time.passes(10.0, progress=1)
    assert not time.passes(600.0, answers=0)
    assert not time.passes(1.2)
    assert time.passes(0.6)


def test_without_a_witness_nobody_is_stuck() -> None:
    time = Time()
    time.answers = None
    assert not time.passes(600.0)


def test_a_machine_that_stood_still_replaces_nobody_whoever_goes_on_first() -> None:
    time = Time()
    time.passes(10.0, progress=1)
    time.now += 10.0
    assert not time.passes(1.0), "the scheduler goes on a second later than the others"
    assert not time.passes(10.0, progress=1)


def test_on_a_machine_so_slow_that_looks_are_seconds_apart_only_half_a_second_of_each_counts() -> None:
    time = Time()
    assert not time.passes(9.0, step_s=3.0)
    assert time.passes(6.0, step_s=3.0)


def test_who_stays_stuck_is_told_of_again_after_the_timeout() -> None:
    time = Time()
    assert time.passes(2.0)
    assert not time.passes(1.0)
    assert time.passes(1.0)


def test_answers_are_counted_and_errors_and_open_questions_are_not() -> None:
    asked = list[Future[int]]()

    def ask() -> Future[int]:
        asked.append(Future())
        return asked[-1]

    answers = Answers(ask)
    assert [answers(), answers()] == [0, 0]
    asked[0].set_result(7)
    assert [answers(), answers()] == [1, 1]
    asked[1].set_exception(RuntimeError("it has ended"))
    assert answers() == 1
    asked[2].set_result(7)
    assert answers() == 2, "the same answer is an answer"


def test_who_is_not_there_is_no_witness() -> None:
    assert Answers(lambda: None)() is None
