from __future__ import annotations

import threading
from concurrent.futures import Future

from support.waiting import PATIENCE_S

from headwise.actors.watchdog import INTERVAL_S, RemoteProgress, Watchdog


class Time:
    def __init__(self) -> None:
        self.now, self.progress = 100.0, 0
        self.watchdog = Watchdog(lambda: self.progress, 3.0, lambda: None, clock=lambda: self.now)

    def passes(self, seconds: float) -> bool:
        """Whether the watchdog has called it stuck at any of its looks."""
        stuck = []
        for _ in range(round(seconds / INTERVAL_S)):
            self.now += INTERVAL_S
            stuck.append(self.watchdog.is_stuck())
        return any(stuck)


def test_a_thread_whose_loop_stands_still_for_longer_than_the_timeout_is_stuck() -> None:
    time = Time()
    assert not time.passes(3.0)
    assert time.passes(1.0)


def test_a_thread_that_makes_progress_now_and_then_is_not_stuck() -> None:
    time = Time()
    for _ in range(5):
        assert not time.passes(2.5)
        time.progress += 1


def test_a_process_that_was_suspended_is_given_the_time_again() -> None:
    time = Time()
    assert not time.passes(2.5)
    time.now += 1000.0
    assert not time.passes(3.0)
    assert time.passes(1.0)


def test_a_thread_that_stays_stuck_is_told_of_again_only_after_the_timeout() -> None:
    time = Time()
    assert time.passes(4.0)
    assert not time.passes(2.5)
    assert time.passes(1.0)


def test_it_tells_until_it_is_stopped() -> None:
    told = threading.Semaphore(0)
    watchdog = Watchdog(lambda: 0, 0.0, told.release)
    watchdog.start()
    assert told.acquire(timeout=PATIENCE_S)
    assert told.acquire(timeout=PATIENCE_S)
    watchdog.stop()
    assert not watchdog._thread.is_alive()


class Remote(Time):
    """A process that is asked for the progress of its thread; answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[Future[int] | None] = []
        self.answers = True
        self.is_known_gone = self.is_left = False
        self.watchdog = Watchdog(RemoteProgress(self.ask), 3.0, lambda: None, clock=lambda: self.now)

    def ask(self) -> Future[int] | None:
        question: Future[int] | None = None if self.is_left else Future()
        self.questions.append(question)
        if question is not None and self.is_known_gone:
            question.set_exception(ConnectionError("it is being started again"))
        elif question is not None and self.answers:
            question.set_result(self.progress)
        return question

    def runs(self, seconds: float) -> bool:
        """As `passes`, with some progress before each look."""
        stuck = []
        for _ in range(round(seconds / INTERVAL_S)):
            self.progress += 1
            stuck.append(self.passes(INTERVAL_S))
        return any(stuck)


def test_a_process_that_answers_with_more_turns_each_time_gets_on() -> None:
    assert not Remote().runs(20.0)


def test_a_process_that_answers_with_the_same_turns_is_stuck() -> None:
    remote = Remote()
    assert not remote.runs(5.0)
    assert not remote.passes(2.5)
    assert remote.passes(1.5)


def test_a_process_that_does_not_answer_is_stuck_and_is_asked_only_once() -> None:
    remote = Remote()
    assert not remote.runs(5.0)
    remote.answers, before = False, len(remote.questions)
    assert not remote.runs(2.5)
    assert remote.runs(1.5)
    assert len(remote.questions) == before + 1


def test_an_answer_that_comes_late_but_within_the_timeout_gives_the_time_again() -> None:
    remote = Remote()
    remote.answers = False
    for progress in range(5):
        assert not remote.passes(2.5)
        question = remote.questions[-1]
        assert question is not None
        question.set_result(progress)


def test_a_process_that_is_being_replaced_is_left_in_peace_however_long_that_takes() -> None:
    remote = Remote()
    remote.answers = False
    assert remote.passes(4.0)
    question = remote.questions[-1]
    assert question is not None
    remote.is_known_gone = True
    question.set_exception(ConnectionError("it has died"))
    assert not remote.passes(100.0)
    remote.is_known_gone, remote.answers, remote.progress = False, True, 0
    assert not remote.runs(20.0)


def test_nothing_is_stuck_where_there_is_nobody_to_be_asked() -> None:
    remote = Remote()
    remote.is_left = True
    assert not remote.passes(20.0)
