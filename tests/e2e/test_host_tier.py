"""Blocks that went to the host and came back give the same tokens as those that never left the device."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
from support.engine.loaded_model import CACHE_KINDS, GREEDY, MODELS, TINY_KINDS, LoadedModel, serve, tiny_cache_kinds
from support.reference import Answer, answers, assert_same
from support.waiting import PATIENCE_S

from headwise.errors import LayerSwapTimeoutError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult, SamplingParams

TOKENS = 8
"""Of a demo model; of a tiny one all 64 of the reference."""


@pytest.fixture(scope="module", params=CACHE_KINDS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return LoadedModel(request.param)


def run(engine: EngineCore, request: GenerateRequest) -> GenerationResult:
    """Serve one request, and see all copies through."""
    result = GenerationResult(request.request_id)
    engine.add(request)
    while engine.has_work():
        for delta in engine.step(None):
            assert delta.error is None, delta.error
            result.add(delta)
    engine.cache.check_integrity()
    return result


def long_prompt(loaded: LoadedModel) -> Answer:
    return next(answer for answer in answers(loaded.name) if answer.name == "long_700").first(loaded.tokens(TOKENS))


def as_long_as(answer: Answer) -> SamplingParams:
    return replace(GREEDY, max_tokens=len(answer.output_ids))


def again(wanted: list[Answer]) -> list[Answer]:
    return [replace(answer, name=f"{answer.name}/again") for answer in wanted]


@tiny_cache_kinds()
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_prefixes_come_back_from_the_host(loaded: LoadedModel, policy: str) -> None:
    if policy == "write_back" and loaded.name not in ("smollm2-135m", "qwen3"):
        pytest.skip("a pool this small cannot keep six groups' blocks until they are copied")
    if policy == "write_through" and loaded.name == "smollm2-135m":
        pytest.skip("what is written through to storage comes back by the host, too")
    answer = long_prompt(loaded)
    card = loaded.preprocessor.card
    engine, executor = loaded.engine(
        block_size=16,
        max_model_len=0,
        kv_cache=f"{70 * len(card.plan.groups) * card.layout.block_bytes * 16 // card.layout.block_size}B",
        max_batched_tokens=128,
        host_cache="256MiB",
        write_policy=policy,
        load_timeout_s=PATIENCE_S,
    )
    others = [[3 + (7 * i + other) % 250 for i in range(400)] for other in range(2)]
    for turn in range(2):
        for other in others if turn else ():  # what the cache held before leaves the device
            run(engine, loaded.preprocessor.prepare(prompt=other, sampling=replace(GREEDY, max_tokens=2)))
        request = loaded.preprocessor.prepare(prompt=answer.prompt_ids, sampling=as_long_as(answer))
        result = run(engine, request)
        assert_same(answer, result.token_ids)
        assert result.usage is not None
        assert (result.usage.cached_tokens > 500) == (turn == 1)
    executor.close()
    stats = engine.stats()
    assert stats["host"]["loaded_blocks"] > 0
    assert stats["host"]["failed_blocks"] == 0
    assert stats["cache"]["host_hit_tokens"] > 0
    assert engine.cache.host.pool.num_held == 0


@pytest.mark.parametrize(("kv_dtype", "kernels"), [("int8", "auto"), ("float8_e4m3fn", "auto"), ("int4", "auto")])
def test_a_quantised_cache_comes_back_from_the_host_as_it_was(kv_dtype: str, kernels: str) -> None:
    loaded = LoadedModel("qwen3", kv_dtype=kv_dtype, kernels=kernels)
    prompt = [3 + 7 * i % 250 for i in range(70)]
    greedy = replace(GREEDY, max_tokens=6)
    engine, executor = loaded.engine(block_size=16, host_cache="16MiB", write_policy="write_through")
    found = []
    for name in ("first", "again"):
        request = loaded.preprocessor.prepare(prompt=prompt, sampling=greedy, request_id=name)
        found.append(run(engine, request).token_ids)
        engine.cache.pool.evict_all()
    executor.close()
    plain, executor = loaded.engine(block_size=16)
    found.append(run(plain, loaded.preprocessor.prepare(prompt=prompt, sampling=greedy)).token_ids)
    executor.close()
    assert found[0] == found[1] == found[2]
    assert engine.stats()["host"]["loaded_blocks"] > 0


@tiny_cache_kinds()
def test_a_host_of_a_few_blocks_and_many_requests_at_once(loaded: LoadedModel) -> None:
    wanted = [a.first(loaded.tokens(TOKENS)) for a in answers(loaded.name) if len(a.prompt_ids) < 400][:5]
    sampling = {name: as_long_as(a) for a in wanted for name in (a.name, f"{a.name}/again")}
    card = loaded.preprocessor.card
    block = card.layout.block_bytes * 16 // card.layout.block_size
    engine, executor = loaded.engine(
        block_size=16,
        max_model_len=0,
        kv_cache=f"{70 * len(card.plan.groups) * block}B",
        max_batched_tokens=64,
        host_cache=f"{4 * block}B",
        write_policy="write_through",
    )
    for turn in (wanted, again(wanted)):
        results = serve(engine, loaded.preprocessor, turn, sampling)
        for answer in turn:
            assert_same(answer, results[answer.name].token_ids)
    executor.close()
    assert engine.stats()["host"]["evicted_blocks"] > 0


@pytest.mark.parametrize(
    "loaded",
    ["qwen3", *(pytest.param(name, marks=[pytest.mark.model, pytest.mark.soak]) for name in MODELS)],
    indirect=True,
)
def test_a_load_that_comes_too_late_is_computed_anew(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = long_prompt(loaded)
    engine, executor = loaded.engine(
        block_size=16, host_cache="256MiB", write_policy="write_through", load_timeout_s=1.0
    )
    request = loaded.preprocessor.prepare(prompt=answer.prompt_ids, sampling=as_long_as(answer))
    run(engine, request)
    engine.cache.pool.evict_all()
    manager, is_given_up = loaded.worker._copies._manager, threading.Event()
    copy, wait_layer = manager._copy, manager.wait_layer

    def late_copy(*args: object) -> None:
        assert is_given_up.wait(PATIENCE_S)
        copy(*args)

    def give_up(layer: int) -> None:
        try:
            wait_layer(layer)
        except LayerSwapTimeoutError:
            is_given_up.set()
            raise

    monkeypatch.setattr(manager, "_copy", late_copy)
    monkeypatch.setattr(manager, "wait_layer", give_up)
    result = run(engine, replace(request, request_id="again"))
    assert_same(answer, result.token_ids)
    stats = engine.stats()
    assert stats["host"]["failed_blocks"] > 0
    assert stats["requests"]["preemptions"] == 1
    executor.close()


@pytest.mark.parametrize("loaded", TINY_KINDS, indirect=True)  # costs decide it: what a model says plays no part
def test_what_is_slower_to_bring_than_to_compute_is_computed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = long_prompt(loaded)
    engine, executor = loaded.engine(block_size=16, host_cache="256MiB", write_policy="write_through")
    request = loaded.preprocessor.prepare(prompt=answer.prompt_ids, sampling=replace(GREEDY, max_tokens=2))
    run(engine, request)
    for load_s, cached in ((math.inf, 0), (1e-9, 600)):
        engine.cache.pool.evict_all()
        monkeypatch.setattr(engine.cache.costs, "_load_s", load_s)
        result = run(engine, replace(request, request_id=f"{load_s}"))
        assert result.usage is not None
        assert result.usage.cached_tokens >= cached
        assert (result.usage.cached_tokens > 0) == (cached > 0)
    executor.close()
