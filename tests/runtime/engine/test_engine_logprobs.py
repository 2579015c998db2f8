"""Log-probabilities are the log-softmax of the model's own logits, whatever tokens are chosen by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine.dense_oracle import run_rank
from support.engine.ranks import Ranks
from support.gpu.tiny_engine import PROMPT, TINY, configuration, write_model
from support.random_models import random_weights

from headwise import LocalEngine, SamplingParams
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.models.registry import model_config
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult, OutputDelta, TokenLogprobs
from headwise.runtime.worker.sampler import NOT_FINITE

CLOSE = 1e-3
"""What rounding may make of a log-probability."""
PLAIN = {"device": "cpu", "tensor_ops": "numpy", "kernels": "reference"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LocalEngine]:
    with LocalEngine(configuration(model, **PLAIN)) as engine:
        yield engine


def log_softmax(tokens: list[int]) -> NDArray[np.float64]:
    """``[n, vocab]`` of what the model says behind each token, computed at once and without a cache."""
    config = model_config(TINY)
    logits = run_rank(config, random_weights(config), SingleRank(), np.array(tokens, np.int32))
    assert logits is not None
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)


def assert_right(told: TokenLogprobs, token: int, expected: NDArray[np.float64], count: int) -> None:
    assert told.chosen == pytest.approx(expected[token], abs=CLOSE)
    assert len(told.top) == count
    likeliest = np.sort(expected)[::-1][:count]
    assert [value for _, value in told.top] == pytest.approx(likeliest.tolist(), abs=CLOSE)
    assert [value for _, value in told.top] == pytest.approx([expected[token] for token, _ in told.top], abs=CLOSE)


def assert_all_right(result: GenerationResult, prompt: list[int], count: int) -> None:
    expected = log_softmax([*prompt, *result.token_ids])[len(prompt) - 1 :]
    assert len(result.logprobs) == len(result.token_ids) > 0
    for told, token, row in zip(result.logprobs, result.token_ids, expected, strict=False):
        assert_right(told, token, row, count)


SAMPLINGS = {
    "greedy": {"temperature": 0.0, "logprobs": 5},
    "drawn": {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "logprobs": 20},
    "only the chosen": {"logprobs": 0},
    "with penalties": {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0, "logprobs": 3},
    "with biases": {"temperature": 0.0, "logit_bias": {7: 100.0}, "min_tokens": 5, "logprobs": 3},
    "with a form": {"guided": {"regex": "[a-f]{9}"}, "ignore_eos": False, "logprobs": 3},
}


@pytest.mark.parametrize("how", SAMPLINGS)
def test_logprobs_are_the_models_before_anything_is_done_to_them(tmp_path: Path, engine: LocalEngine, how: str) -> None:
    params = {"max_tokens": 6, "seed": 3, "ignore_eos": True, **SAMPLINGS[how]}
    if how == "with a form":
        with LocalEngine(configuration(write_model(tmp_path, eos_token_id=2), **PLAIN)) as other:
            result = other.generate([PROMPT[:20]], SamplingParams(**params))[0]
    else:
        result = engine.generate([PROMPT[:20]], SamplingParams(**params))[0]
    assert_all_right(result, PROMPT[:20], params["logprobs"])


def test_each_of_n_samples_has_its_own(engine: LocalEngine) -> None:
    results = engine.generate([PROMPT[:20]], SamplingParams(n=3, max_tokens=5, seed=1, ignore_eos=True, logprobs=2))
    assert len({tuple(result.token_ids) for result in results}) > 1
    for result in results:
        assert_all_right(result, PROMPT[:20], 2)


def test_our_own_kernels_give_the_same(model: Path) -> None:
    with LocalEngine(configuration(model, device="cpu", dtype="float32")) as engine:
        result = engine.generate([PROMPT], SamplingParams(max_tokens=4, seed=1, ignore_eos=True, logprobs=20))[0]
    assert_all_right(result, PROMPT, 20)


def test_preempted_requests_tell_each_token_once(model: Path) -> None:
    """The pool has no room for all at once."""
    prompts = [PROMPT[at : at + 24] for at in (0, 10, 20, 30)]
    params = SamplingParams(max_tokens=24, seed=1, ignore_eos=True, logprobs=2)
    with LocalEngine(configuration(model, **PLAIN, kv_cache="320KiB", max_model_len=64)) as engine:
        results = engine.generate(prompts, params)
        assert engine.stats()["requests"]["preemptions"] > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert_all_right(result, prompt, 2)


# ---- of prompts ----


def assert_prompt_right(result: GenerationResult, prompt: list[int], count: int) -> None:
    expected = log_softmax(prompt)
    assert result.prompt_token_ids == prompt
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(prompt)
    for told, token, row in zip(result.prompt_logprobs[1:], prompt[1:], expected, strict=False):
        assert told is not None
        assert_right(told, token, row, count)


ASKED = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=3)


@pytest.mark.parametrize("length", [1, 2, 8, 70])
@pytest.mark.parametrize("cached", [False, True], ids=["new", "cached"])
def test_a_prompts_logprobs_are_the_models_whether_it_is_cached_or_not(
    engine: LocalEngine, length: int, cached: bool
) -> None:
    engine.reset_cache()
    prompt = PROMPT[:length]
    plain = replace(ASKED, prompt_logprobs=None)
    expected = engine.generate([prompt], plain)[0] if cached else None
    result = engine.generate([prompt], ASKED)[0]
    assert_prompt_right(result, prompt, 3)
    assert result.usage.cached_tokens == 0
    again = engine.generate([prompt], plain)[0]
    assert again.token_ids == result.token_ids
    assert expected is None or expected.token_ids == result.token_ids
    assert again.usage.cached_tokens == (length - 1) // 8 * 8, "what it computed is cached for others"
    assert again.prompt_logprobs == []


def test_prompts_of_many_chunks_beside_others_and_n_samples(model: Path) -> None:
    params = [replace(ASKED, logprobs=2), replace(ASKED, prompt_logprobs=None), replace(ASKED, prompt_logprobs=0, n=2)]
    with LocalEngine(configuration(model, **PLAIN, max_batched_tokens=10)) as engine:
        first, plain, *samples = engine.generate([PROMPT, PROMPT[:30], PROMPT[3:40]], params)
    assert_prompt_right(first, PROMPT, 3)
    assert_all_right(first, PROMPT, 2)
    assert (plain.prompt_logprobs, plain.prompt_token_ids) == ([], [])
    for sample in samples:
        assert_prompt_right(sample, PROMPT[3:40], 0)


def test_of_a_prompt_nobody_asks_about_the_one_row_is_computed_that_is_sampled_from(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk of at most 10 tokens, and then of a decode; of who asks, all rows are."""
    with LocalEngine(configuration(model, **PLAIN, max_batched_tokens=10, prefix_caching=False)) as engine:
        real, rows = engine._worker.served.model.forward, list[int]()
        monkeypatch.setattr(
            engine._worker.served.model, "forward", lambda *step: rows.append(len(hidden := real(*step))) or hidden
        )
        engine.generate([PROMPT[:25]], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        assert rows == [*[0] * (len(rows) - 2), 1, 1]
        assert len(rows) >= 4
        rows.clear()
        engine.generate([PROMPT[:25]], replace(ASKED, max_tokens=1))
        assert sum(rows) == 25


def test_our_own_kernels_give_the_same_of_prompts(model: Path) -> None:
    with LocalEngine(configuration(model, device="cpu", dtype="float32")) as engine:
        assert_prompt_right(engine.generate([PROMPT], ASKED)[0], PROMPT, 3)


def test_never_more_than_some_rows_of_logits_are_there_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    with LocalEngine(configuration(model, **PLAIN, max_num_seqs=4)) as engine:
        served = engine._worker.served
        real = served.model.scores
        monkeypatch.setattr(served.model, "scores", lambda hidden: rows.append(len(hidden)) or real(hidden))
        assert_prompt_right(engine.generate([PROMPT], ASKED)[0], PROMPT, 3)
    assert max(rows) == 4


@pytest.mark.parametrize("tiers", [{}, {"host_cache": "1MiB", "write_policy": "write_through"}], ids=["", "host"])
def test_preempted_prompts_tell_each_token_once(model: Path, tiers: dict[str, str]) -> None:
    prompts = [PROMPT[at : at + 24] for at in (0, 10, 20, 30)]
    params = replace(ASKED, max_tokens=24)
    sizes = {"kv_cache": "320KiB", "max_model_len": 64, "max_batched_tokens": 16}
    with LocalEngine(configuration(model, **PLAIN, **sizes, **tiers)) as engine:
        results = engine.generate(prompts, params)
        assert engine.stats()["requests"]["preemptions"] > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert_prompt_right(result, prompt, 3)


@pytest.mark.parametrize("cut", range(12))
def test_a_request_that_lost_its_engine_goes_on_with_the_prompts_next_token(model: Path, cut: int) -> None:
    """Cut at every delta: within the prompt, at its end, and in the output."""
    with LocalEngine(configuration(model, **PLAIN, max_batched_tokens=8)) as engine:
        request = engine.preprocessor.prepare(prompt=PROMPT[:26], sampling=ASKED)
        deltas = deltas_of(engine, request)
        assert len(deltas) == 11
        told = GenerationResult("r")
        for delta in deltas[: min(cut, len(deltas) - 1)]:
            told.add(delta)
        rest = replace(request, prompt_told=len(told.prompt_logprobs), output_token_ids=tuple(told.token_ids))
        for delta in deltas_of(engine, rest):
            told.add(delta)
    assert_prompt_right(told, PROMPT[:26], 3)
    assert told.token_ids == [token for delta in deltas for token in delta.token_ids]


def deltas_of(engine: LocalEngine, request: GenerateRequest) -> list[OutputDelta]:
    engine.core.add(request)
    found = []
    while engine.core.has_work():
        found += engine.core.step(None)
    return found


def test_a_prompt_without_usable_logits_fails_its_request_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEngine(configuration(model, **PLAIN, max_batched_tokens=16)) as engine:
        capped = engine._worker.served.model.capped
        monkeypatch.setattr(
            engine._worker.served.model, "capped", lambda scores: capped(scores) * (np.nan if len(scores) == 7 else 1)
        )
        asked = engine.preprocessor.prepare(prompt=PROMPT[:8], sampling=ASKED)
        other = engine.preprocessor.prepare(prompt=PROMPT[:6], sampling=ASKED)
        engine.core.add(other)
        deltas = deltas_of(engine, asked)
    errors = {delta.request_id: delta.error for delta in deltas if delta.finish_reason is not None}
    assert errors == {asked.request_id: NOT_FINITE, other.request_id: None}


def test_ranks_give_the_same_of_prompts(model: Path) -> None:
    config = configuration(model, **PLAIN, tp_size=2, kv_cache="1MiB", max_batched_tokens=32)
    ranks = Ranks(config, model)
    tokenizer = Tokenizer.from_directory(model)
    engine = EngineCore(config, ranks.workers[0].card, tokenizer, LocalExecutor(ranks))
    params = replace(ASKED, logprobs=2)
    engine.add(Preprocessor(ranks.workers[0].card, tokenizer).prepare(prompt=PROMPT, sampling=params))
    result = GenerationResult("r")
    while engine.has_work():
        for delta in engine.step(None):
            result.add(delta)
    assert_prompt_right(result, PROMPT, 3)
    assert_all_right(result, PROMPT, 2)
