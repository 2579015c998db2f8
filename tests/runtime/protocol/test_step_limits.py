from __future__ import annotations

import numpy as np
import pytest

from headwise.runtime.protocol.batch import BatchRequest, NewSequence
from headwise.runtime.protocol.copies import SwapIn
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.protocol.step_limits import FACTOR, KEPT, LEAST_S, MEASURED, StepLimits

STEP_TIMEOUT_S, LOAD_TIMEOUT_S = 120.0, 5.0


def step(
    tokens: int,
    *,
    start: int = 0,
    rows: int = 1,
    samples: bool = True,
    loads: int = 0,
    command: str = "",
    form: Guided | None = None,
) -> BatchRequest:
    """``tokens`` of each of ``rows`` sequences that have ``start`` tokens already. With a ``form`` the first is new."""
    return BatchRequest(
        step_id=0,
        rows=np.arange(rows, dtype=np.int32),
        starts=np.full(rows, start, np.int32),
        query_lens=np.full(rows, tokens, np.int32),
        token_ids=np.zeros(rows * tokens, np.int32),
        sample=np.full(rows, samples),
        table_updates=np.empty((0, 4), np.int32),
        new_sequences=() if form is None else (NewSequence(0, "r", SamplingParams(guided=form), 0),),
        cache_swap_metadata=SwapIn(np.zeros((loads, 3), np.int32)),
        command=command,
    )


@pytest.fixture
def limits() -> StepLimits:
    return StepLimits(STEP_TIMEOUT_S, LOAD_TIMEOUT_S)


def takes(limits: StepLimits, batch: BatchRequest, compute_s: float) -> float:
    """The limit of a step that takes so long."""
    work, limit = limits.sent(batch)
    limits.came_back(work, compute_s)
    return limit.seconds


def test_the_first_steps_of_a_size_have_all_the_time_there_is_and_later_ones_much_less(limits: StepLimits) -> None:
    assert [takes(limits, step(1, start=9), 0.05) for _ in range(MEASURED + 2)] == [STEP_TIMEOUT_S] * MEASURED + [
        LEAST_S
    ] * 2
    assert takes(limits, step(300), 0.5) == STEP_TIMEOUT_S, "prompts were never seen"
    assert takes(limits, step(1, start=9), 0.05) == LEAST_S


def test_what_takes_long_may_take_a_multiple_of_it(limits: StepLimits) -> None:
    for _ in range(MEASURED):
        takes(limits, step(512), 4.0)
    assert takes(limits, step(512), 4.0) == FACTOR * 4.0
    assert takes(limits, step(600), 4.0) == pytest.approx(FACTOR * 4.0 * (600 / 512) ** 2), "by pairs of tokens"
    assert takes(limits, step(520, start=100_000), 4.0) == STEP_TIMEOUT_S, "a longer context takes longer"


def test_a_long_prompt_s_chunks_are_left_to_the_device_until_something_is_sampled(limits: StepLimits) -> None:
    """On a GPU they are over at once for the host, and the last one waits for all of them."""
    for _ in range(MEASURED):
        for chunk in range(63):
            takes(limits, step(512, start=512 * chunk, samples=False), 0.001)
        takes(limits, step(512, start=512 * 63), 9.0)
    for _ in range(MEASURED):
        takes(limits, step(512), 0.15)
    seen = [takes(limits, step(512, start=512 * chunk, samples=False), 0.001) for chunk in range(63)]
    assert seen[0] == LEAST_S
    assert takes(limits, step(512, start=512 * 63), 9.0) > 90.0
    assert takes(limits, step(512), 0.15) == LEAST_S, "nothing was left"


def test_steps_that_load_may_wait_for_each_load_and_say_nothing_of_others(limits: StepLimits) -> None:
    for _ in range(MEASURED):
        takes(limits, step(1, start=50), 0.05)
    assert takes(limits, step(1, start=50, loads=4), 14.9) == LEAST_S + 3 * LOAD_TIMEOUT_S
    assert takes(limits, step(1, start=50), 0.05) == LEAST_S


def test_a_step_that_begins_a_form_may_wait_for_its_tokenizer_and_says_nothing_of_others(limits: StepLimits) -> None:
    for _ in range(MEASURED):
        takes(limits, step(8, start=50), 0.05)
    form = Guided(regex="a")
    assert takes(limits, step(8, start=50, samples=False, form=form), 0.05) == LEAST_S, "it samples nothing"
    assert takes(limits, step(8, start=50), 30.0) == STEP_TIMEOUT_S
    assert takes(limits, step(8, start=50), 0.05) == LEAST_S


def test_steps_that_compute_nothing_are_watched_too(limits: StepLimits) -> None:
    for _ in range(MEASURED):
        takes(limits, step(0, rows=0), 0.01)
    assert takes(limits, step(0, rows=0), 0.01) == LEAST_S


def test_a_worker_that_was_suspended_once_is_not_given_its_time_for_ever(limits: StepLimits) -> None:
    for _ in range(MEASURED):
        takes(limits, step(1, start=50), 0.05)
    takes(limits, step(1, start=50), 3600.0)
    assert {takes(limits, step(1, start=50), 0.05) for _ in range(KEPT)} == {STEP_TIMEOUT_S}
    assert takes(limits, step(1, start=50), 0.05) == LEAST_S


def test_no_step_has_more_than_step_timeout_s_and_workers_that_start_anew_have_all_of_it() -> None:
    limits = StepLimits(2.0, LOAD_TIMEOUT_S)
    assert {takes(limits, step(1, start=50, loads=1), 0.05) for _ in range(20)} == {2.0}
    limits = StepLimits(STEP_TIMEOUT_S, LOAD_TIMEOUT_S)
    for _ in range(MEASURED):
        takes(limits, step(1, start=50), 0.05)
    limits.forget()
    assert takes(limits, step(1, start=50), 0.05) == STEP_TIMEOUT_S
