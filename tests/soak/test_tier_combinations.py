"""Real models over all tiers, in every combination of their options, with requests that are aborted and preempted."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from support.engine.loaded_model import GREEDY, MODELS, LoadedModel
from support.reference import answers, assert_same

from headwise.runtime.protocol.request import GenerationResult

pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(1200)]

TOKENS = 12
SHORT = replace(GREEDY, max_tokens=TOKENS)
ROUNDS = 2
SAMPLED = 3
"""Combinations of sizes for each of policies."""


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return LoadedModel(request.param)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("prefetch", ["best_effort", "wait_complete", "timeout"])
def test_no_combination_changes_a_token(loaded: LoadedModel, tmp_path: Path, policy: str, prefetch: str) -> None:
    wanted = [answer.first(TOKENS) for answer in answers(loaded.config.model) if len(answer.prompt_ids) <= 800]
    groups = len(loaded.preprocessor.card.plan.groups)
    block = loaded.preprocessor.card.layout.block_bytes * 16 // loaded.preprocessor.card.layout.block_size
    longest = max(len(answer.prompt_ids) for answer in wanted) // 16 + 6
    chance = random.Random(f"{policy} {prefetch}")
    sizes = list(product((3, 40, 1000), (1, 4), (True, False)))
    for host_blocks, device_requests, is_async in chance.sample(sizes, SAMPLED):
        engine, executor = loaded.engine(
            block_size=16,
            max_model_len=0,
            kv_cache=f"{longest * groups * device_requests * block}B",
            max_batched_tokens=128,
            host_cache=f"{host_blocks * block}B",
            write_policy=policy,
            storage=f"file://{tmp_path}?capacity=1GiB",
            prefetch=prefetch,
            async_scheduling=is_async,
        )
        for turn in range(ROUNDS):
            results: dict[str, GenerationResult] = {}
            waiting = chance.sample(wanted, len(wanted))
            aborted = set()
            while waiting or engine.has_work():
                if waiting and chance.random() < 0.3:
                    answer = waiting.pop()
                    name = f"{answer.name}/{turn}"
                    results[name] = GenerationResult(name)
                    engine.add(
                        loaded.preprocessor.prepare(
                            prompt=answer.prompt_ids, sampling=SHORT, request_id=name, priority=chance.randrange(2)
                        )
                    )
                    if chance.random() < 0.2:
                        aborted.add(name)
                if aborted and chance.random() < 0.1:
                    engine.abort(next(iter(aborted)))
                for delta in engine.step(None):
                    assert delta.error is None, delta.error
                    results[delta.request_id].add(delta)
            engine.cache.check_integrity()
            for answer in wanted:
                result = results[f"{answer.name}/{turn}"]
                if len(result.token_ids) == TOKENS:
                    assert_same(answer, result.token_ids)
                else:
                    assert f"{answer.name}/{turn}" in aborted
        executor.close()
        loaded.worker.close()
