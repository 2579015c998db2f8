"""Embeddings in place of tokens, and items that the cache tells apart, with real weights.

The placeholder tokens' own embeddings give exactly what their ids give; so any embeddings are computed with rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import BASE, GREEDY, LoadedModel
from support.engine.ranks import Ranks
from support.reference import Answer, answers, assert_same
from support.tiny_checkpoints import checkpoint

from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.protocol.prompt_items import PromptItem
from headwise.runtime.protocol.request import GenerationResult, OutputDelta

SMOLLM2 = pytest.param("smollm2-135m", marks=[pytest.mark.model, pytest.mark.soak])
NAMES = [SMOLLM2, "gemma2", "deepseek-v3", "qwen3-next"]
"""Embeddings as they are, scaled (Gemma), with latents, with states."""
PLACEHOLDER = 5
SAMPLING = replace(GREEDY, max_tokens=16)


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return LoadedModel(request.param)


def embedding_of(model: Any, ids: list[int]) -> np.ndarray:
    """As the model's layers take them."""
    return model.ops.numpy(model.embedded(model.ops.upload(np.array(ids, np.int32)), None)).copy()


def with_items(model: Any, prompt: list[int], *cuts: int) -> tuple[list[int], list[PromptItem]]:
    """A prompt in which every other stretch between cuts stands for the embeddings of what was there."""
    ids, items = list(prompt), []
    for first, last in list(pairwise(cuts))[::2]:
        items.append(PromptItem(first, last - first, embeds=embedding_of(model, prompt[first:last])))
        ids[first:last] = [PLACEHOLDER] * (last - first)
    return ids, items


def serve(
    engine: EngineCore,
    preprocessor: Preprocessor,
    asked: dict[str, Any],
    step: Callable[[], list[OutputDelta]] | None = None,
) -> dict[str, GenerationResult]:
    results = {name: GenerationResult(name) for name in asked}
    for name, (ids, items) in asked.items():
        engine.add(preprocessor.prepare(prompt=ids, sampling=SAMPLING, request_id=name, items=items))
    while engine.has_work():
        for delta in engine.step(None) if step is None else step():
            assert delta.error is None, delta.error
            results[delta.request_id].add(delta)
    engine.cache.check_integrity()
    return results


def wanted(name: str) -> list[Answer]:
    """References' two shortest prompts of 100 tokens and more."""
    longer = [answer.first(12) for answer in answers(name) if len(answer.prompt_ids) >= 100]
    return sorted(longer, key=lambda answer: len(answer.prompt_ids))[:2]


def cuts_of(answer: Answer) -> tuple[int, ...]:
    """Stretches that begin and end at blocks' edges and within, and reach the prompt's end."""
    length = len(answer.prompt_ids)
    return 0, 3, 64, 70, length - 20, length


@pytest.mark.parametrize("max_batched_tokens", [1024, 48])
def test_own_embeddings_give_the_reference_tokens_whole_chunked_batched_and_cached(
    loaded: LoadedModel, max_batched_tokens: int
) -> None:
    engine, executor = loaded.engine(max_batched_tokens=max_batched_tokens)
    model = loaded.worker.served.model
    asked = {answer.name: with_items(model, answer.prompt_ids, *cuts_of(answer)) for answer in wanted(loaded.name)}
    first, again = (serve(engine, loaded.preprocessor, asked) for _ in range(2))
    for answer in wanted(loaded.name):
        for results in (first, again):
            assert_same(answer, results[answer.name].token_ids)
        assert again[answer.name].usage.cached_tokens >= 64
        request = loaded.preprocessor.prepare(
            prompt=asked[answer.name][0], sampling=SAMPLING, items=asked[answer.name][1]
        )
        hashes = loaded.preprocessor.hashes(request)  # as the scheduler routes by
        assert hashes
        assert all(each in engine.cache.tree.nodes for each in hashes)
    executor.close()


def test_other_embeddings_are_never_served_from_the_cache_and_change_the_answer(loaded: LoadedModel) -> None:
    engine, executor = loaded.engine(max_batched_tokens=1024)
    (answer, *_), model = wanted(loaded.name), loaded.worker.served.model
    size = len(answer.prompt_ids)
    ids, (item,) = with_items(model, answer.prompt_ids, 64, size - 1)
    other = PromptItem(item.offset, item.length, embeds=item.embeds[::-1])
    cases = {"ids": (answer.prompt_ids, []), "placeholders": (ids, []), "own": (ids, [item]), "other": (ids, [other])}
    results = {name: serve(engine, loaded.preprocessor, {name: case})[name] for name, case in cases.items()}
    assert_same(answer, results["ids"].token_ids)
    assert_same(answer, results["own"].token_ids)
    assert results["own"].token_ids != results["other"].token_ids
    for result in results.values():
        assert result.usage.cached_tokens <= 64  # at most what is before the item
    executor.close()


@pytest.mark.parametrize(
    "loaded",
    ["deepseek-v3", pytest.param("smollm2-135m", marks=[pytest.mark.model, pytest.mark.soak])],
    indirect=True,
)
def test_preempted_requests_are_computed_again_with_their_embeddings(loaded: LoadedModel) -> None:
    engine, executor = loaded.engine(max_batched_tokens=128, prefix_caching=False)
    model, computed = loaded.worker.served.model, 0
    asked = {answer.name: with_items(model, answer.prompt_ids, *cuts_of(answer)) for answer in wanted(loaded.name)}

    def step() -> list[OutputDelta]:
        nonlocal computed
        computed += 1
        if computed in (4, 12):  # within a prompt, and within the answers
            engine.resources.preempt_all()
        return engine.step(None)

    results = serve(engine, loaded.preprocessor, asked, step)
    for answer in wanted(loaded.name):
        assert_same(answer, results[answer.name].token_ids)
    executor.close()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"tp_size": 2}),
        ("qwen3", {"pipeline_parallel_size": 3}),
        ("gemma2", {"pipeline_parallel_size": 2, "tp_size": 2}),
        ("deepseek-v3", {"pipeline_parallel_size": 2, "tensor_ops": "numpy"}),
    ],
)
def test_ranks_compute_with_the_same_embeddings(name: str, changes: dict[str, Any]) -> None:
    directory = checkpoint(name)
    config = replace(BASE, model=str(directory), kv_cache="24MiB", max_batched_tokens=96, cpu_threads=1, **changes)
    ranks, preprocessor = Ranks(config, directory), Preprocessor.open(config)
    executor = LocalExecutor(ranks)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    model = ranks.workers[config.tp_size - 1].served.model
    asked = {answer.name: with_items(model, answer.prompt_ids, *cuts_of(answer)) for answer in wanted(name)}
    results = serve(engine, preprocessor, asked)
    for answer in wanted(name):
        assert_same(answer, results[answer.name].token_ids)
    executor.close()
    ranks.close()
