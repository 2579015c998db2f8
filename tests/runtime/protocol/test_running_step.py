"""The next step is begun while the last one runs, and results come in order."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.running_step import LOOK_S, MOST_BEGUN, DoneStep, RunningStep, StepRunner

INTS = np.zeros(1, np.int32)


class Late:
    """A step that is done when the test says so, or when somebody waits for it."""

    def __init__(self, number: int) -> None:
        self.number, self.is_done, self.waited = number, False, False

    def result(self) -> StepResult:
        self.waited, self.is_done = not self.is_done, True
        return StepResult(self.number, 0, INTS)


class Scene:
    def __init__(self, is_late: bool = True) -> None:
        self.queue: deque[int] = deque()
        self.waits: list[float] = []
        self.steps: dict[int, Late] = {}
        self.told: list[int] = []
        self._is_late = is_late
        self.runner = StepRunner(self._begin, self._take, lambda result: self.told.append(result.step_id))

    def _take(self, wait_s: float) -> BatchRequest | None:
        self.waits.append(wait_s)
        if not self.queue:
            return None
        return BatchRequest(self.queue.popleft(), INTS, INTS, INTS, INTS, INTS == 0, np.empty((0, 4), np.int32))

    def _begin(self, batch: BatchRequest) -> RunningStep:
        step = self.steps[batch.step_id] = Late(batch.step_id)
        return step if self._is_late else DoneStep(step.result())


def test_a_step_that_runs_is_left_for_the_next_one_and_no_more_are_begun_than_an_engine_sends() -> None:
    scene = Scene()
    scene.queue.extend([1, 2, 3])
    for _ in range(MOST_BEGUN):
        scene.runner.turn(9.0)
    assert list(scene.steps) == [1, 2]
    assert scene.waits == [9.0, LOOK_S]
    scene.runner.turn(9.0)
    assert scene.told == [1]
    assert scene.steps[1].waited
    scene.runner.turn(9.0)
    assert list(scene.steps) == [1, 2, 3]


def test_while_no_other_comes_a_step_is_looked_at_until_it_is_done() -> None:
    scene = Scene()
    scene.queue.append(1)
    for _ in range(5):
        scene.runner.turn(9.0)
    assert (scene.told, scene.waits[1:]) == ([], [LOOK_S] * 4)
    scene.steps[1].is_done = True
    scene.runner.turn(9.0)
    assert scene.told == [1]
    assert not scene.steps[1].waited
    assert not scene.runner.is_busy


def test_steps_that_are_over_at_once_are_told_before_others_are_taken() -> None:
    scene = Scene(is_late=False)
    scene.queue.extend([1, 2])
    for _ in range(4):
        scene.runner.turn(9.0)
    assert scene.told == [1, 2]
    assert scene.waits == [9.0, 9.0]


def test_what_a_worker_raises_comes_out() -> None:
    scene = Scene()
    scene.queue.append(1)
    scene.runner.turn(0.0)
    scene.steps[1].result = lambda: [][0]
    scene.steps[1].is_done = True
    with pytest.raises(IndexError):
        scene.runner.turn(0.0)
