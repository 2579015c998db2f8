"""Stages that work on different steps at once: tokens stay those of the reference, and a rank's end is the engine's."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.ranks import Ranks
from support.engine.staged_engine import StagedEngine, staged_engine
from support.reference import Answer, answers, assert_same
from support.tiny_checkpoints import checkpoint
from support.waiting import PATIENCE_S

from headwise.errors import EngineDiedError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.models.base import Model
from headwise.runtime.protocol.request import FinishReason, GenerationResult
from headwise.runtime.worker.model_runner import ModelRunner

TOKENS = 12
SAMPLING = replace(GREEDY, max_tokens=TOKENS)


def config_of(name: str, stages: int = 2, **changes: Any) -> EngineConfig:
    given = {
        "model": str(checkpoint(name)),
        "kv_cache": "24MiB",
        "pipeline_parallel_size": stages,
        "max_batched_tokens": 128,
        "cpu_threads": 1,
        "block_size": 16,
    }
    return replace(BASE, **{**given, **changes})


def wanted_of(name: str) -> list[Answer]:
    return [answer.first(TOKENS) for answer in answers(name)]


def begin(engine: StagedEngine, wanted: list[Answer]) -> dict[str, GenerationResult]:
    for answer in wanted:
        prepared = engine.preprocessor.prepare(prompt=answer.prompt_ids, sampling=SAMPLING, request_id=answer.name)
        engine.core.add(prepared)
    return {answer.name: GenerationResult(answer.name) for answer in wanted}


def turn(engine: StagedEngine, results: dict[str, GenerationResult], timeout_s: float | None = None) -> None:
    for delta in engine.core.step(timeout_s):
        assert delta.error is None, delta.error
        results[delta.request_id].add(delta)


def finish(engine: StagedEngine, results: dict[str, GenerationResult]) -> None:
    while engine.core.has_work():
        turn(engine, results)
    assert engine.core.cache.pool.num_held == 0
    engine.core.cache.check_integrity()


@pytest.mark.parametrize(
    ("name", "stages", "changes"),
    [
        ("qwen3", 2, {}),
        ("qwen3", 3, {"max_batched_tokens": 24}),
        ("gemma2", 2, {"tp_size": 2}),
        ("qwen3-next", 4, {}),
        ("kimi-linear", 2, {}),
        ("gpt-oss", 3, {"tensor_ops": "numpy", "kernels": "reference"}),
        ("deepseek-v3", 2, {"tp_size": 2, "context_parallel_size": 2}),
        pytest.param("nemotron-h", 6, {}, marks=pytest.mark.soak),  # stages of an MLP alone
        pytest.param("llama4", 4, {}, marks=pytest.mark.soak),
        pytest.param("granite-hybrid", 3, {}, marks=pytest.mark.soak),
    ],
)
def test_tokens_are_those_of_the_reference(name: str, stages: int, changes: dict[str, Any]) -> None:
    wanted = wanted_of(name)
    with staged_engine(config_of(name, stages, **changes)) as engine:
        for _ in range(2):
            results = serve(engine.core, engine.preprocessor, wanted, {each.name: SAMPLING for each in wanted})
            for answer in wanted:
                assert_same(answer, results[answer.name].token_ids)
        assert engine.core.stats()["cache"]["hit_tokens"] > 1000
        assert engine.failures == {}


def test_stages_are_within_different_steps_at_once() -> None:
    """Whatever the last stage waits for, the first one goes on."""
    name, seen, went_on = "qwen3", list[int](), threading.Event()

    def prepare(ranks: Ranks) -> None:
        first, last = (worker.served.runner for worker in ranks.workers)
        first_forward, last_forward = first.forward, last.forward

        def on_first(*arguments: Any) -> Any:
            seen.append(1)
            if len(seen) == 3:
                went_on.set()
            return first_forward(*arguments)

        def on_last(*arguments: Any) -> Any:
            assert went_on.wait(PATIENCE_S), "the first stage never began its third step"
            return last_forward(*arguments)

        first.forward, last.forward = on_first, on_last

    answer = max(wanted_of(name), key=lambda answer: len(answer.prompt_ids))
    with staged_engine(config_of(name, max_batched_tokens=64), prepare=prepare) as engine:
        results = begin(engine, [answer])
        finish(engine, results)
    assert_same(answer, results[answer.name].token_ids)


def test_a_request_that_is_aborted_while_its_chunks_are_on_their_way_changes_no_other() -> None:
    name = "gpt-oss"
    wanted = wanted_of(name)
    longest = max(wanted, key=lambda answer: len(answer.prompt_ids))
    with staged_engine(config_of(name, max_batched_tokens=48)) as engine:
        for turns in range(4):
            results = begin(engine, [longest])
            for _ in range(turns):
                turn(engine, results)
            results |= begin(engine, [answer for answer in wanted if answer is not longest])
            turn(engine, results, 0)
            engine.core.abort(longest.name)
            finish(engine, results)
            assert results[longest.name].finish_reason is FinishReason.ABORT
            for answer in wanted:
                if answer is not longest:
                    assert_same(answer, results[answer.name].token_ids)
            operation = engine.core.operate("reset_cache")
            while not operation.is_done:
                turn(engine, results)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-next"])
def test_requests_that_are_preempted_while_chunks_are_on_their_way_say_the_same(name: str) -> None:
    wanted = wanted_of(name)
    with staged_engine(config_of(name, max_batched_tokens=48, prefix_caching=False)) as engine:
        results = begin(engine, wanted)
        for turns in (1, 4, 9):
            for _ in range(turns):
                turn(engine, results)
            assert engine.core.resources.has_steps
            engine.core.resources.preempt_all()
        finish(engine, results)
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)


def test_a_pool_that_is_too_small_for_all_preempts_and_changes_no_token() -> None:
    name = "qwen3"
    wanted = [answer for answer in wanted_of(name) if len(answer.prompt_ids) <= 400]
    config = config_of(name, kv_cache="1MiB", max_model_len=480, max_batched_tokens=64, prefix_caching=False)
    with staged_engine(config) as engine:
        results = begin(engine, wanted)
        finish(engine, results)
        blocks = sum(-(-(len(answer.prompt_ids) + TOKENS) // 16) for answer in wanted)
        assert blocks > engine.core.cache.pool.num_blocks
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)


def test_steps_of_a_single_token() -> None:
    name = "gemma2"
    wanted = [answer.first(3) for answer in wanted_of(name) if len(answer.prompt_ids) <= 40]
    assert min(len(answer.prompt_ids) for answer in wanted) == 1
    with staged_engine(config_of(name, max_batched_tokens=1)) as engine:
        results = begin(engine, wanted)
        finish(engine, results)
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)


def test_an_engine_sleeps_and_wakes_while_chunks_are_on_their_way() -> None:
    name = "kimi-linear"
    wanted = wanted_of(name)
    with staged_engine(config_of(name, max_batched_tokens=64)) as engine:
        results = begin(engine, wanted)
        for turns in (1, 6):
            for _ in range(turns):
                turn(engine, results)
            for action in ("sleep", "wake"):
                operation = engine.core.operate(action)
                while not operation.is_done:
                    turn(engine, results, 0.05)
                asleep = [worker.served.is_asleep for worker in engine.ranks.workers]
                assert asleep == [action == "sleep"] * 2
            for worker in engine.ranks.workers:
                worker.served.runner.cache.arena.view(np.float32)[:] = np.nan
        finish(engine, results)
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)


# ---- what fails ----


def fails_in_step(ranks: Ranks, rank: int, step: int, error: Exception) -> None:
    runner: ModelRunner = ranks.workers[rank].served.runner
    forward, begun = runner.forward, [0]

    def failing(*arguments: Any) -> Any:
        begun[0] += 1
        if begun[0] == step:
            raise error
        return forward(*arguments)

    runner.forward = failing


class EndsWaits:
    """A clock of links, which has every wait end at once when ``is_over`` is set: ranks wait for those that died."""

    def __init__(self, ranks: Ranks, is_over: threading.Event) -> None:
        self._now, self._is_over = 0.0, is_over
        for link in ranks._links:
            link._clock = self

    def __call__(self) -> float:
        self._now += PATIENCE_S if self._is_over.is_set() else 0.0
        return self._now


NO_ROOM = MemoryError("no room")
ERRORS = (NO_ROOM, ValueError("what fails a step alone, of one rank"), ZeroDivisionError("by 0"))
PLACES = ((0, 1), (0, 4), (1, 1), (1, 3), (2, 2))


@pytest.mark.parametrize(
    ("rank", "step", "error"),
    [
        pytest.param(*place, error, marks=() if error is NO_ROOM or place == (1, 3) else pytest.mark.soak)
        for error in ERRORS
        for place in PLACES
    ],
)
def test_a_rank_that_fails_in_a_step_is_named_and_all_end(rank: int, step: int, error: Exception) -> None:
    is_over = threading.Event()

    def prepare(ranks: Ranks) -> None:
        fails_in_step(ranks, rank, step, error)
        EndsWaits(ranks, is_over)

    wanted = wanted_of("qwen3")
    with staged_engine(config_of("qwen3", 3, max_batched_tokens=32), prepare=prepare) as engine:
        results = begin(engine, wanted)
        with pytest.raises(EngineDiedError, match=rf"rank {rank} failed in step \d+: {type(error).__name__}: {error}$"):
            finish(engine, results)
        is_over.set()
        deltas = engine.core.fail_all("the engine died")
        assert {delta.finish_reason for delta in deltas} == {FinishReason.ERROR}
        assert not engine.core.has_requests
    assert f"rank {rank} failed" in engine.failures[rank]


@pytest.mark.parametrize(("rank", "waiting"), [(0, 2), (1, 3)])
def test_a_stage_that_gives_nothing_is_named_by_the_next_one(rank: int, waiting: int) -> None:
    """Each rank waits for the one in its place; the others of its stage wait for it."""
    is_over = threading.Event()

    def prepare(ranks: Ranks) -> None:
        EndsWaits(ranks, is_over)
        ranks.workers[rank]._own.links.next.send = lambda stream: None
        ranks._links[waiting]._timeout_s, ranks._links[waiting]._clock = 0.3, time.monotonic

    wanted = wanted_of("gemma2")
    with staged_engine(config_of("gemma2", tp_size=2), prepare=prepare) as engine:
        results = begin(engine, wanted)
        with pytest.raises(
            EngineDiedError,
            match=rf"^rank {waiting} waits in step \d+ for rank {rank}: the stage of the pipeline before this one "
            r"sent nothing for 0\.3 s$",
        ):
            finish(engine, results)
        is_over.set()
        for worker in engine.ranks.workers:
            worker._own.comm._barrier.abort()


def test_a_stage_that_stalls_is_named_by_the_engine_once_its_time_is_over() -> None:
    release = threading.Event()

    def prepare(ranks: Ranks) -> None:
        forward = ranks.workers[0].served.runner.forward

        def stalls(*arguments: Any) -> Any:
            release.wait(PATIENCE_S)
            return forward(*arguments)

        ranks.workers[0].served.runner.forward = stalls

    wanted = wanted_of("qwen3")
    with staged_engine(config_of("qwen3"), step_timeout_s=0.3, prepare=prepare) as engine:
        results = begin(engine, wanted)
        try:
            with pytest.raises(
                EngineDiedError, match=r"step \d+ did not end within step_timeout_s = 0\.3 s on .*rank \[0, 1\]"
            ):
                finish(engine, results)
        finally:
            release.set()


def test_a_stage_in_another_step_than_the_next_one_is_told() -> None:
    is_over = threading.Event()

    def prepare(ranks: Ranks) -> None:
        EndsWaits(ranks, is_over)
        outgoing = ranks.workers[0]._own.links.next
        assert outgoing is not None
        send, sent = outgoing.send, [0]

        def loses_one(stream: Any) -> None:
            sent[0] += 1
            if sent[0] == 2:
                send(stream[:1])
            send(stream)

        outgoing.send = loses_one

    with staged_engine(config_of("qwen3"), prepare=prepare) as engine:
        results = begin(engine, wanted_of("qwen3"))
        with pytest.raises(EngineDiedError, match=r"^rank 1 waits in step .* for rank 0: .* is in another step"):
            finish(engine, results)
        is_over.set()


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    """Also where a stage before the last one made them so."""
    wanted = wanted_of("qwen3")
    broken = wanted[0]
    used = {token for answer in wanted for token in (*answer.prompt_ids, *answer.output_ids)}
    unused = next(token for token in range(3, 263) if token not in used)

    def prepare(ranks: Ranks) -> None:
        model: Model = ranks.workers[0].served.model
        forward = model.forward

        def breaks(token_ids: Any, *arguments: Any) -> Any:
            hidden = forward(token_ids, *arguments)
            hidden[np.asarray(token_ids) == unused] = np.nan
            return hidden

        model.forward = breaks

    with staged_engine(config_of("qwen3"), prepare=prepare) as engine:
        results = begin(engine, wanted)
        prompt = [*broken.prompt_ids, unused]
        engine.core.add(engine.preprocessor.prepare(prompt=prompt, sampling=SAMPLING, request_id="broken"))
        results["broken"] = GenerationResult("broken")
        errors: dict[str, str] = {}
        while engine.core.has_work():
            for delta in engine.core.step(None):
                results[delta.request_id].add(delta)
                errors |= {delta.request_id: delta.error} if delta.error else {}
        assert errors.keys() == {"broken"}
        assert engine.failures == {}
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)
