"""Greedy tokens of all models equal those of Hugging Face transformers in fp32, whatever the engine does.

Sampled ones equal those of the same request alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engine.given_guesses import GivenGuesses
from support.engine.loaded_model import (
    ALL_MODELS,
    GREEDY,
    MODELS,
    LoadedModel,
    all_but,
    kinds_but,
    serve,
    tiny_cache_kinds,
)
from support.reference import CLOSE, Answer, answers, assert_same

from headwise.cache_controller.windows import GroupWindows
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.request import GenerationResult, SamplingParams
from headwise.runtime.worker import next_tokens
from headwise.runtime.worker.logit_editor import LogitEditor
from headwise.runtime.worker.logit_edits import LogitEdits
from headwise.runtime.worker.sampler import Draws, sample
from headwise.runtime.worker.worker import ModelWorker


@pytest.fixture(scope="module", params=ALL_MODELS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return LoadedModel(request.param)


def reference(loaded: LoadedModel, longest: int = 4096) -> list[Answer]:
    return [answer for answer in answers(loaded.name) if len(answer.prompt_ids) <= longest]


def test_references_cover_what_they_must() -> None:
    for model in MODELS:
        lengths = [len(answer.prompt_ids) for answer in answers(model)]
        assert len(lengths) >= 8
        assert max(lengths) > 2000
        assert sum(len(answer.judged) for answer in answers(model)) > 0.8 * 64 * len(lengths)


@pytest.mark.parametrize("longest", [800, pytest.param(4096, marks=pytest.mark.soak)])
def test_prefill_logits_agree(loaded: LoadedModel, longest: int) -> None:
    _, executor = loaded.engine(max_batched_tokens=4096)
    executor.close()
    worker = loaded.worker
    for answer in reference(loaded, longest):
        logits = prefill_logits(worker, answer.prompt_ids)
        np.testing.assert_allclose(logits[answer.top_ids], answer.top_logits, atol=1e-3, rtol=0)
        np.testing.assert_allclose(logits[answer.sample_ids], answer.sample_logits, atol=1e-3, rtol=0)


def prefill_logits(worker: ModelWorker, prompt: list[int]) -> np.ndarray:
    count, groups = len(prompt), len(worker.card.plan.groups)
    columns = -(-count // worker.card.layout.block_size)
    updates = [[0, group, i, i * groups + group] for i in range(columns) for group in range(groups)]
    batch = BatchRequest(
        step_id=1,
        rows=np.zeros(1, np.int32),
        starts=np.zeros(1, np.int32),
        query_lens=np.array([count], np.int32),
        token_ids=np.array(prompt, np.int32),
        sample=np.ones(1, np.bool_),
        table_updates=np.array(updates, np.int32),
    )
    worker.served.runner.cache.tables.apply(batch.table_updates)
    hidden = worker.served.runner.forward(batch)
    logits = worker.served.model.logits(worker._device.ops.take_rows(hidden, np.array([count - 1])))
    assert logits is not None
    return logits[0]


@kinds_but("smollm2-135m")
def test_prompts_one_by_one_and_whole(loaded: LoadedModel) -> None:
    engine, executor = loaded.engine(max_batched_tokens=4096)
    tokens = loaded.tokens(12)
    prompts = 2 if loaded.name in MODELS else 4  # the last one is the longest
    for answer in (answer.first(tokens) for answer in reference(loaded, longest=800)[-prompts:]):
        sampling = {answer.name: replace(GREEDY, max_tokens=tokens)}
        assert_same(answer, serve(engine, loaded.preprocessor, [answer], sampling)[answer.name].token_ids)
    executor.close()


def greedy(wanted: list[Answer], tokens: int) -> dict[str, SamplingParams]:
    return {answer.name: replace(GREEDY, max_tokens=tokens) for answer in wanted}


@all_but(*MODELS)
@pytest.mark.parametrize(("tokens", "longest"), [(20, 800), pytest.param(64, 1400, marks=pytest.mark.soak)])
def test_a_mixed_batch_chunked_at_64_without_prefix_caching(loaded: LoadedModel, tokens: int, longest: int) -> None:
    tokens = loaded.tokens(tokens)
    wanted = [answer.first(tokens) for answer in reference(loaded, longest)]
    block_size = 64 if loaded.name in MODELS else 16  # whole prompts are in blocks of 64
    changes = {"max_batched_tokens": 64, "prefix_caching": False, "block_size": block_size}
    results, engine = loaded.run(wanted, greedy(wanted, tokens), **changes)
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)
    assert engine.stats()["cache"]["hit_tokens"] == 0
    if loaded.name == "gemma3-270m":
        assert engine.stats()["cache"]["recycled_blocks"] > 0


@tiny_cache_kinds()
@pytest.mark.parametrize(("tokens", "longest"), [(6, 800), pytest.param(24, 1400, marks=pytest.mark.soak)])
def test_32_requests_at_once_with_prefixes_from_the_cache(loaded: LoadedModel, tokens: int, longest: int) -> None:
    tokens = loaded.tokens(tokens)
    wanted = [answer.first(tokens) for answer in reference(loaded, longest)]
    batch = [replace(wanted[i % len(wanted)], name=f"{wanted[i % len(wanted)].name}/{i}") for i in range(32)]
    changes = {"block_size": 16} if loaded.name in MODELS else {}  # few of their prompts fill a block of 64
    results, engine = loaded.run(batch, greedy(batch, tokens), max_num_seqs=32, cpu_threads=2, **changes)
    for answer in batch:
        assert_same(answer, results[answer.name].token_ids)
    assert engine.stats()["cache"]["hit_tokens"] > 0


def scarce(loaded: LoadedModel, wanted: list[Answer], max_tokens: int) -> dict[str, Any]:
    """A pool that holds the longest of the requests and little more."""
    tokens = max(len(answer.prompt_ids) for answer in wanted) + max_tokens
    settings = {"block_size": 16, "max_model_len": 0, "max_batched_tokens": 256}
    config = replace(loaded.config, **settings)
    card = read_model_card(config, resolve_model(config.model, config.cache_path), identify=False)
    spare = 2 * len(card.plan.groups)
    blocks = int(GroupWindows(card.kept, 16).peak_blocks(tokens, config.tokens_in_flight)) + spare
    return {"kv_cache": f"{blocks * card.layout.block_bytes}B", **settings}


@tiny_cache_kinds()
@pytest.mark.parametrize(("tokens", "longest_first"), [(32, True), pytest.param(64, False, marks=pytest.mark.soak)])
def test_a_pool_so_small_that_requests_are_preempted(loaded: LoadedModel, tokens: int, longest_first: bool) -> None:
    tokens = loaded.tokens(tokens, of_tiny=64)  # some grow while others come
    wanted = [answer.first(tokens) for answer in reference(loaded, longest=800)]
    wanted.sort(key=lambda answer: longest_first and -len(answer.prompt_ids))
    settings = scarce(loaded, wanted, tokens) | ({"prompt_order": "arrival"} if longest_first else {})
    results, engine = loaded.run(wanted, greedy(wanted, tokens), **settings)
    kinds = [group.policy.is_full for group in loaded.preprocessor.card.plan.groups]
    grows = 3 * sum(kinds) >= len(kinds)  # windows take few blocks, and what their chunks need at first is free later
    if grows and (longest_first or loaded.name in MODELS):  # the short ones of a tiny model are over soon
        assert engine.stats()["requests"]["preemptions"] > 0
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)


class DoubtfulDraws:
    """Samples, and notes (seed, position) of draws that other logits, at most `CLOSE` away, would turn."""

    def __init__(self) -> None:
        self.found: set[tuple[int, int]] = set()
        self.rows = 0
        self._noise = np.random.default_rng(0)

    def __call__(self, logits: np.ndarray, draws: Draws, edits: LogitEdits | None) -> np.ndarray:
        tokens = sample(logits, draws, edits)
        self.rows += len(tokens)
        for _ in range(4):
            moved = logits + self._noise.uniform(-CLOSE, CLOSE, logits.shape).astype(np.float32)
            turned = sample(moved, draws, edits) != tokens
            self.found.update(zip(draws.seeds[turned].tolist(), draws.positions[turned].tolist(), strict=True))
        return tokens


@pytest.mark.parametrize("tokens", [8, pytest.param(16, marks=pytest.mark.soak)])
@pytest.mark.model
@pytest.mark.parametrize("loaded", MODELS[:1], indirect=True)
def test_sampled_tokens_are_the_same_alone_in_a_batch_preempted_and_behind_those_of_a_lost_engine(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Of half of them the logits depend on the tokens before, too."""
    wanted = reference(loaded, longest=60)[:6]
    edited = {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": -0.3, "min_tokens": 4}
    sampling = {
        answer.name: SamplingParams(
            temperature=0.8, top_p=0.95, seed=seed, max_tokens=tokens, ignore_eos=True, **(edited if seed % 2 else {})
        )
        for seed, answer in enumerate(wanted, start=21)
    }
    doubtful = DoubtfulDraws()
    with monkeypatch.context() as patch:
        patch.setattr(next_tokens, "sample", doubtful)
        engine, executor = loaded.engine(kv_cache="64MiB", max_model_len=512)
        alone = {}
        for answer in wanted:
            alone |= serve(engine, loaded.preprocessor, [answer], sampling)
        executor.close()
    batched, _ = loaded.run(wanted, sampling, kv_cache="64MiB", max_model_len=512)
    preempted, engine = loaded.run(wanted, sampling, **scarce(loaded, wanted, tokens))
    assert engine.stats()["requests"]["preemptions"] > 0
    moved = continued(loaded, wanted, sampling, {name: result.token_ids[:3] for name, result in alone.items()})
    assert doubtful.rows == tokens * len(wanted)
    assert doubtful.found == set(), "rounding may decide these draws: choose other seeds"
    for answer in wanted:
        expected = alone[answer.name].token_ids
        assert len(expected) == tokens
        assert batched[answer.name].token_ids == expected, answer.name
        assert preempted[answer.name].token_ids == expected, answer.name
        assert moved[answer.name].token_ids == expected[3:], answer.name
    assert [alone[answer.name].token_ids for answer in wanted] != [answer.output_ids[:tokens] for answer in wanted]


def continued(
    loaded: LoadedModel, wanted: list[Answer], sampling: dict[str, SamplingParams], produced: dict[str, list[int]]
) -> dict[str, GenerationResult]:
    """What an engine says behind the tokens that another one has produced."""
    engine, executor = loaded.engine(kv_cache="64MiB", max_model_len=512)
    results = {answer.name: GenerationResult(answer.name) for answer in wanted}
    for answer in wanted:
        request = loaded.preprocessor.prepare(
            prompt=answer.prompt_ids, sampling=sampling[answer.name], request_id=answer.name
        )
        engine.add(replace(request, output_token_ids=tuple(produced[answer.name])))
    while engine.has_work():
        for delta in engine.step(None):
            results[delta.request_id].add(delta)
    executor.close()
    return results


@pytest.mark.parametrize("loaded", MODELS[:1], indirect=True)
def test_plain_greedy_requests_pay_nothing_for_what_others_may_ask_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept for them, nothing asked and nothing made."""

    def never(*arguments: Any) -> None:
        raise AssertionError("a greedy request was sampled")

    for part in ("edits", "sampled"):
        monkeypatch.setattr(LogitEditor, part, never)
    for part in ("sample", "Draws", "token_logprobs"):
        monkeypatch.setattr(next_tokens, part, never)
    wanted = [answer.first(4) for answer in reference(loaded, longest=60)[:3]]
    results, _ = loaded.run(wanted, greedy(wanted, 4))
    assert all(len(results[answer.name].token_ids) == 4 for answer in wanted)
    assert not loaded.worker.served.steps._tokens._editor._rows


@kinds_but(*MODELS)
def test_one_group_per_head_index_gives_the_same_tokens(loaded: LoadedModel) -> None:
    config = loaded.preprocessor.card.config
    if config.layer_heads or config.compressed is not None or loaded.preprocessor.card.has_states:
        pytest.skip("layers of unlike members have no index in common")
    by_index = replace(loaded.config, head_grouping="per_head_index")
    directory = resolve_model(by_index.model, by_index.cache_path)
    worker = ModelWorker(by_index, directory, 0, SingleRank())
    worker.initialize_cache()
    executor = LocalExecutor(worker)
    engine = EngineCore(by_index, worker.card, loaded.preprocessor.tokenizer, executor)
    for answer in (answer.first(24) for answer in reference(loaded, longest=800)[-2:]):
        sampling = {answer.name: replace(GREEDY, max_tokens=24)}
        assert_same(answer, serve(engine, loaded.preprocessor, [answer], sampling)[answer.name].token_ids)
    executor.close()


@kinds_but("gemma3-270m")
@pytest.mark.parametrize("tokens", [32, pytest.param(64, marks=pytest.mark.soak)])
def test_guesses_change_no_token(loaded: LoadedModel, tokens: int) -> None:
    """Of all prompts at once, some of which are computed beside the first guesses."""
    wanted = [answer.first(tokens) for answer in reference(loaded, longest=400)]
    changes = {"speculation": 6, "max_batched_tokens": 128, "block_size": 64 if loaded.name in MODELS else 16}
    engine, executor = loaded.engine(**changes)
    engine.resources.speculator = GivenGuesses({answer.name: answer.output_ids for answer in wanted}, 6)
    results = serve(engine, loaded.preprocessor, wanted, greedy(wanted, tokens))
    executor.close()
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)
    found = engine.stats()["speculation"]
    assert found["drafted"] > found["accepted"] > 0.4 * found["drafted"]


@pytest.mark.model
@pytest.mark.parametrize("weights_dtype", ["bfloat16", "gguf"])
def test_guesses_change_no_bit_of_narrow_numbers(weights_dtype: str) -> None:
    """Nor any drawn token, then."""
    loaded = LoadedModel("smollm2-135m", dtype="bfloat16", weights_dtype=weights_dtype)
    wanted = reference(loaded, longest=200)[:6]
    drawn = replace(GREEDY, max_tokens=40, temperature=0.9, seed=11)
    sampling = dict.fromkeys([answer.name for answer in wanted], drawn)
    expected, _ = loaded.run(wanted, sampling)
    tokens = {name: result.token_ids for name, result in expected.items()}
    engine, executor = loaded.engine(speculation=6)
    engine.resources.speculator = GivenGuesses(tokens, 6)
    results = serve(engine, loaded.preprocessor, wanted, sampling)
    executor.close()
    assert {name: result.token_ids for name, result in results.items()} == tokens
    assert engine.stats()["speculation"]["accepted"] > 40
