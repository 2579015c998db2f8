"""What an engine sends to the stages of a pipeline: several steps at once, of tokens that are known, or not yet."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.engine.given_guesses import GivenGuesses
from support.engine.simulated_engine import make_engine, request, run
from support.engine.simulation import SimulatedExecutor, continuation

from headwise.errors import EngineDiedError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.batch import LAST_SAMPLED, BatchRequest
from headwise.runtime.protocol.request import FinishReason, GenerationResult

PROMPT = [i % 7 + 1 for i in range(60)]


def pipeline(stages: int = 2, **options: Any) -> tuple[EngineCore, SimulatedExecutor]:
    """Steps end when a test says so, unless it is ``eager``."""
    given = {"num_blocks": 64, "eager": False, "pipeline_parallel_size": stages, **options}
    return make_engine(**given)


def knowing(stages: int = 2, **options: Any) -> tuple[EngineCore, SimulatedExecutor]:
    """The same where steps have known tokens alone, as there may be drafts; but there are none."""
    engine, executor = pipeline(stages, speculation=1, **options)
    engine.resources.speculator = None
    return engine, executor


MODES = pytest.mark.parametrize("pipeline_of", [pipeline, knowing])


def names(engine: EngineCore, batch: BatchRequest) -> list[str]:
    return [sequence.request.request_id for sequence in engine.resources.table.of(batch.rows)]


def turn(engine: EngineCore, executor: SimulatedExecutor, results: dict[str, GenerationResult] | None = None) -> None:
    """The oldest step ends, and another one is sent."""
    executor.finish_one()
    for delta in engine.step(0):
        if results is not None:
            results.setdefault(delta.request_id, GenerationResult(delta.request_id)).add(delta)
    engine.step(0)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_chunks_of_a_prompt_are_sent_ahead_of_each_other_s_results(stages: int) -> None:
    engine, executor = pipeline(stages)
    engine.add(request("long", PROMPT, 4))
    engine.step(0)
    sent = [(int(batch.starts[0]), int(batch.query_lens[0])) for batch in executor.queue]
    assert len(sent) == stages + 1
    assert [start for start, _ in sent] == list(np.cumsum([0, *[count for _, count in sent[:-1]]]))
    assert [batch.sample.tolist() for batch in executor.queue] == [[False]] * len(sent)
    assert run(engine)["long"].token_ids == continuation(PROMPT, 4)


def test_all_of_a_short_prompt_is_sent_and_what_comes_behind_it_waits_for_its_token() -> None:
    engine, executor = knowing(3)
    engine.add(request("short", PROMPT[:12], 4))
    engine.step(0)
    assert [batch.query_lens.tolist() for batch in executor.queue] == [[4], [4], [4]]
    assert [batch.sample.tolist() for batch in executor.queue] == [[False], [False], [True]]
    for left in (2, 1):
        executor.finish_one()
        assert engine.step(0) == []
        assert len(executor.queue) == left
    executor.finish_one()
    assert [delta.token_ids for delta in engine.step(0)] == [(continuation(PROMPT[:12], 1)[0],)]
    engine.step(0)
    assert [batch.token_ids.tolist() for batch in executor.queue] == [continuation(PROMPT[:12], 1)]
    assert run(engine)["short"].token_ids[-3:] == continuation(PROMPT[:12], 4)[1:]


def test_behind_a_short_prompt_two_steps_have_tokens_that_are_not_known_yet() -> None:
    engine, executor = pipeline(4, max_batched_tokens=16)
    engine.add(request("short", PROMPT[:8], 5))
    engine.step(0)
    assert [batch.query_lens.tolist() for batch in executor.queue] == [[4], [4], [1]]
    assert executor.queue[-1].token_ids.tolist() == [LAST_SAMPLED]
    assert [batch.sample.tolist() for batch in executor.queue] == [[False], [True], [True]]
    turn(engine, executor)
    assert len(executor.queue) == 2, "a third one would keep what comes meanwhile waiting"
    results: dict[str, GenerationResult] = {}
    while engine.has_work():
        turn(engine, executor, results)
    assert results["short"].token_ids == continuation(PROMPT[:8], 5)


@pytest.mark.parametrize(("stages", "requests"), [(2, 4), (2, 3), (3, 4), (4, 2), (2, 1), (3, 9)])
def test_decodes_are_shared_out_over_steps_and_sent_ahead(stages: int, requests: int) -> None:
    engine, executor = pipeline(stages, max_rows=9, num_blocks=200)
    for index in range(requests):
        engine.add(request(f"r{index}", [index + 1] * 3, 60))
    for _ in range(20):
        turn(engine, executor)
    most = -(-requests // stages)
    groups = -(-requests // most)
    for _ in range(3 * stages):
        steps = [batch.rows.tolist() for batch in executor.queue]
        assert len(steps) == min(2 * groups, stages + 1)
        assert {row for rows in steps for row in rows} == {*range(requests)}, "nobody waits"
        assert all(len(rows) <= most for rows in steps)
        for first in range(len(steps) - groups + 1):
            rows = [row for step in steps[first : first + groups] for row in step]
            assert len(rows) == len({*rows}), "no step waits for one that is right before it, if others could be there"
        turn(engine, executor)
    for name, result in run(engine).items():
        assert result.token_ids == continuation([int(name[1:]) + 1] * 3, 60)[-len(result.token_ids) :]


def test_while_a_prompt_is_computed_decodes_keep_clear_of_the_steps_before() -> None:
    engine, executor = pipeline(3, max_batched_tokens=12, num_blocks=96)
    engine.add(request("decodes", [5], 40))
    for _ in range(6):
        turn(engine, executor)
    engine.add(request("long", PROMPT, 4))
    for _ in range(3):
        turn(engine, executor)
    (row,) = (one.row for one in engine.resources.running if one.request.request_id == "decodes")
    for _ in range(4):
        steps = [index for index, batch in enumerate(executor.queue) if row in batch.rows]
        assert len(executor.queue) == 4
        assert all(later - earlier >= 3 for earlier, later in pairwise(steps))
        turn(engine, executor)


@pytest.mark.parametrize(("stages", "requests"), [(2, 4), (2, 3), (3, 4), (4, 2), (2, 1)])
def test_decodes_are_shared_out_over_steps(stages: int, requests: int) -> None:
    engine, executor = knowing(stages)
    for index in range(requests):
        engine.add(request(f"r{index}", [index + 1] * 3, 40))
    for _ in range(12):
        turn(engine, executor)
    most = -(-requests // stages)
    for _ in range(2 * stages):
        rows = [row for batch in executor.queue for row in batch.rows.tolist()]
        assert sorted(rows) == sorted({*rows}), "nobody is in two steps at once"
        assert len(rows) == requests, "nobody waits whose token is known"
        assert all(len(batch.rows) <= most for batch in executor.queue)
        turn(engine, executor)
    for name, result in run(engine).items():
        assert result.token_ids == continuation([int(name[1:]) + 1] * 3, 40)[-len(result.token_ids) :]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("max_batched_tokens", [1, 2, 5, 64])
@MODES
def test_steps_are_never_more_than_stages_and_one(
    pipeline_of: Callable[..., tuple[EngineCore, SimulatedExecutor]], max_batched_tokens: int, stages: int
) -> None:
    engine, executor = pipeline_of(stages, max_batched_tokens=max_batched_tokens, num_blocks=96)
    prompts = {f"r{index}": [index + 1] * (7 * index + 1) for index in range(6)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 9))
    results: dict[str, GenerationResult] = {}
    most = 0
    while engine.has_work():
        engine_sends = len(executor.queue)
        turn(engine, executor, results)
        most = max(most, len(executor.queue), engine_sends)
        for batch in executor.queue:
            assert batch.num_tokens <= max_batched_tokens
            assert stages == 1 or pipeline_of is pipeline or (batch.token_ids != LAST_SAMPLED).all()
    assert most == stages + 1
    assert {name: result.token_ids for name, result in results.items()} == {
        name: continuation(prompt, 9) for name, prompt in prompts.items()
    }
    assert engine.cache.pool.num_held == 0


def test_without_steps_ahead_there_is_one() -> None:
    engine, executor = pipeline(3, async_scheduling=False)
    engine.add(request("r", PROMPT, 4))
    engine.step(0)
    assert len(executor.queue) == 1
    assert run(engine)["r"].token_ids == continuation(PROMPT, 4)


@pytest.mark.parametrize("ended", [0, 1, 3])
def test_a_request_that_is_aborted_while_its_chunks_are_on_their_way_leaves_the_others_alone(ended: int) -> None:
    engine, executor = pipeline(2)
    engine.add(request("goes", PROMPT, 4))
    engine.step(0)
    assert len(executor.queue) == 3
    for _ in range(ended):
        turn(engine, executor)
    engine.add(request("stays", [9] * 10, 6))
    engine.abort("goes")
    held = {block for batch in executor.queue for block in engine.cache.tables[batch.rows].ravel() if block >= 0}
    assert held
    assert held.isdisjoint(engine.cache.pool.free_blocks), "steps on their way write to them still"
    results = run(engine)
    assert results["goes"].finish_reason is FinishReason.ABORT
    assert results["stays"].token_ids == continuation([9] * 10, 6)
    assert engine.stats()["requests"]["preemptions"] == 0


def test_the_only_request_is_aborted_and_all_its_steps_come_back() -> None:
    engine, executor = pipeline(3)
    engine.add(request("goes", PROMPT, 4))
    engine.step(0)
    engine.abort("goes")
    assert run(engine)["goes"].finish_reason is FinishReason.ABORT
    assert not executor.queue


@pytest.mark.parametrize("turns", [0, 1, 2, 6, 9])
def test_requests_that_are_preempted_while_chunks_are_on_their_way_say_the_same(turns: int) -> None:
    engine, executor = pipeline(2)
    prompts = {"long": PROMPT, "other": [9] * 21, "one": [3]}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 7))
    results: dict[str, GenerationResult] = {}
    engine.step(0)
    for _ in range(turns):
        turn(engine, executor, results)
    assert executor.queue
    engine.resources.preempt_all()
    while engine.has_work():
        executor.poison(engine.cache.pool.free_blocks)
        turn(engine, executor, results)
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 7)


def test_a_small_pool_preempts_and_every_request_still_gets_its_tokens() -> None:
    engine, _ = pipeline(2, num_blocks=9, prefix_caching=False, eager=True)
    prompts = {f"r{i}": [i + 1] * 6 for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 20))
    results = run(engine)
    assert engine.stats()["requests"]["preemptions"] > 0
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 20)


def test_a_more_urgent_request_takes_the_place_of_one_whose_chunks_are_on_their_way() -> None:
    engine, executor = pipeline(2, num_blocks=18)
    engine.add(request("slow", PROMPT, 6, priority=1))
    engine.step(0)
    assert len(executor.queue) == 3
    engine.add(request("urgent", [2] * 40, 6, priority=0))
    results: dict[str, GenerationResult] = {}
    order = []
    while engine.has_work():
        executor.poison(engine.cache.pool.free_blocks)
        before = {name for name, result in results.items() if result.finish_reason}
        turn(engine, executor, results)
        order += sorted({name for name, result in results.items() if result.finish_reason} - before)
    assert order == ["urgent", "slow"]
    assert engine.stats()["requests"]["preemptions"] > 0
    assert results["slow"].token_ids == continuation(PROMPT, 6)
    assert results["urgent"].token_ids == continuation([2] * 40, 6)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_prompts_of_one_token_and_answers_of_one(stages: int, max_tokens: int) -> None:
    engine, _ = pipeline(stages, max_batched_tokens=1, max_rows=2, eager=True)
    for token in range(1, 6):
        engine.add(request(f"r{token}", [token], max_tokens))
    results = run(engine)
    assert {name: result.token_ids for name, result in results.items()} == {
        f"r{token}": continuation([token], max_tokens) for token in range(1, 6)
    }


@MODES
def test_a_stop_id_ends_a_request_whatever_more_of_it_is_on_its_way(
    pipeline_of: Callable[..., tuple[EngineCore, SimulatedExecutor]],
) -> None:
    engine, executor = pipeline_of(2)
    tokens = continuation([5, 6], 8)
    engine.add(request("r", [5, 6], 30, stop_token_ids=(tokens[4],)))
    results: dict[str, GenerationResult] = {}
    engine.step(0)
    while engine.has_requests:
        turn(engine, executor, results)
    assert results["r"].token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert len(executor.queue) == (1 if pipeline_of is pipeline else 0)
    run(engine)
    assert engine.cache.pool.num_held == 0


def test_an_engine_falls_asleep_once_chunks_on_their_way_are_back_and_wakes_to_go_on() -> None:
    engine, executor = pipeline(2)
    engine.add(request("long", PROMPT, 5))
    engine.step(0)
    assert len(executor.queue) == 3
    operation, results = engine.operate("sleep"), dict[str, GenerationResult]()
    while not operation.is_done:
        turn(engine, executor, results)
    assert executor.is_asleep
    assert not executor.queue
    engine.add(request("meanwhile", [4] * 9, 3))
    assert engine.step(0) == []
    assert not executor.queue, "requests wait for an engine that is asleep"
    operation = engine.operate("wake")
    while engine.has_work():
        turn(engine, executor, results)
    assert operation.is_done
    assert results["long"].token_ids == continuation(PROMPT, 5)
    assert results["meanwhile"].token_ids == continuation([4] * 9, 3)


def test_workers_that_are_lost_while_chunks_are_on_their_way_end_all_requests() -> None:
    engine, executor = pipeline(2)
    for name in ("long", "other"):
        engine.add(request(name, PROMPT, 5))
    engine.step(0)
    executor.model.fails = MemoryError("no room")
    executor.finish_one()
    with pytest.raises(EngineDiedError, match="no room"):
        engine.step(0)
    deltas = engine.fail_all("no room")
    assert {(delta.request_id, delta.finish_reason) for delta in deltas} == {
        ("long", FinishReason.ERROR),
        ("other", FinishReason.ERROR),
    }
    assert not engine.has_requests


@pytest.mark.parametrize("stages", [2, 3])
def test_guesses_are_behind_tokens_that_are_known(stages: int) -> None:
    prompts = {"a": PROMPT[:20], "b": [9] * 5, "c": [3]}
    engine, executor = pipeline(stages, max_batched_tokens=24, speculation=3)
    whole = {name: [*prompt, *continuation(prompt, 30)] for name, prompt in prompts.items()}
    engine.resources.speculator = GivenGuesses(whole, 3)
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 30))
    results: dict[str, GenerationResult] = {}
    drafts = 0
    while engine.has_work():
        rows = [row for batch in executor.queue for row in batch.rows[batch.sample].tolist()]
        assert len(rows) == len({*rows}), "no row is sampled in two steps at once"
        assert all((batch.token_ids != LAST_SAMPLED).all() for batch in executor.queue)
        drafts += sum(int(batch.drafts.sum()) for batch in list(executor.queue)[-1:])
        turn(engine, executor, results)
    assert drafts > 10
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 30)
