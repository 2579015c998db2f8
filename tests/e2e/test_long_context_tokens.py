"""Gemma 3 over up to 8,000 tokens says what transformers says, with recycling and without, in poisoned memory.

Its local layers see 512 tokens; what the prompts ask for stands in their first thousand.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.long_prompts import MODEL, long_answers
from support.poisoned import PoisonedModel, Run
from support.reference import Answer, answers, assert_same

from headwise.runtime.config.engine_config import EngineConfig

pytestmark = pytest.mark.model

CHUNK = 512
CONFIG = EngineConfig(model=MODEL, dtype="float32", kv_cache="512MiB", max_model_len=8192, max_batched_tokens=CHUNK)


@pytest.fixture(scope="module")
def loaded() -> PoisonedModel:
    return PoisonedModel(CONFIG)


@pytest.fixture(scope="module")
def wanted(loaded: PoisonedModel) -> dict[str, Answer]:
    return long_answers(loaded.preprocessor.tokenizer)


def assert_windows_are_bounded(run: Run) -> None:
    """No window group ever held more than sink, window and the chunks in flight."""
    config, card = run.engine.config, run.engine.card
    plan = card.plan
    assert any(not policy.is_full for policy in plan.policies)
    for policy, held in zip(plan.policies, run.executor.most_held.tolist(), strict=True):
        if not policy.is_full:
            most = policy.sink + policy.window + config.most_batched_tokens
            assert 0 < held <= -(-most // card.layout.block_size), (policy, held)


def test_references_judge_what_they_must(wanted: dict[str, Answer]) -> None:
    assert max(len(answer.prompt_ids) for answer in wanted.values()) >= 8000
    for answer in wanted.values():
        assert len(answer.judged) >= 24, answer.name


@pytest.mark.soak
def test_8000_tokens_with_recycling(loaded: PoisonedModel, wanted: dict[str, Answer]) -> None:
    run = loaded.start(prefix_caching=False, async_scheduling=False)
    name = run.add(wanted["island_8000"])
    run.serve()
    run.close()
    assert_same(wanted["island_8000"], run.results[name].token_ids)
    assert run.cache["recycled_blocks"] > 0
    assert run.cache["free_blocks"] == run.cache["total_blocks"]
    assert_windows_are_bounded(run)


@pytest.mark.soak
def test_4000_tokens_without_recycling(loaded: PoisonedModel, wanted: dict[str, Answer]) -> None:
    answer = wanted["harbour_4000"]
    run = loaded.start(recycling=False, prefix_caching=False, async_scheduling=False)
    name = run.add(answer)
    run.serve()
    run.close()
    assert_same(answer, run.results[name].token_ids)
    assert run.cache["recycled_blocks"] == 0
    computed = len(answer.prompt_ids) + len(answer.output_ids) - 1
    np.testing.assert_array_equal(run.executor.most_held, -(-computed // run.engine.cache.block_size))


@pytest.mark.soak
def test_a_long_prefix_is_served_while_its_request_runs_and_afterwards(
    loaded: PoisonedModel, wanted: dict[str, Answer]
) -> None:
    shorter, longer = wanted["harbour_4000"], wanted["harbour_6000"]
    run = loaded.start()
    first = run.add(shorter)
    run.serve(until=run.spoken(first, tokens=3))
    meanwhile = run.add(longer)
    run.serve()
    afterwards = [run.add(shorter), run.add(longer)]
    run.serve()
    run.close()
    served = dict(zip((first, meanwhile, *afterwards), (shorter, longer, shorter, longer), strict=True))
    for name, answer in served.items():
        assert_same(answer, run.results[name].token_ids)
    hits = [run.results[name].usage.cached_tokens for name in served]
    common = next(i for i, (a, b) in enumerate(zip(shorter.prompt_ids, longer.prompt_ids, strict=False)) if a != b)
    assert common > 4000
    reusable = [0, common, len(shorter.prompt_ids) - 1, len(longer.prompt_ids) - 1]
    block_size = run.engine.cache.block_size
    assert hits == [tokens // block_size * block_size for tokens in reusable]
    assert_windows_are_bounded(run)


@pytest.mark.soak
def test_a_long_request_is_preempted_and_computed_again(loaded: PoisonedModel, wanted: dict[str, Answer]) -> None:
    long = wanted["harbour_4000"]
    urgent = next(answer for answer in answers(MODEL) if answer.name == "long_1300")
    run = loaded.start(kv_cache=loaded.pool_for(long), max_model_len=0)
    first = run.add(long, priority=1)
    run.serve(until=run.spoken(first, tokens=3))
    second = run.add(urgent, priority=0)
    run.serve(until=lambda: run.preemptions > 0)
    assert len(run.results[first].token_ids) < len(long.output_ids)
    run.serve()
    run.close()
    assert run.preemptions > 0
    assert_same(long, run.results[first].token_ids)
    assert_same(urgent, run.results[second].token_ids)
    assert run.cache["evicted_blocks"] > 0
    assert_windows_are_bounded(run)
