"""Log-probabilities are the log-softmax of the model's own logits, whatever tokens are chosen by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine.dense_oracle import run_rank
from support.gpu.tiny_engine import PROMPT, TINY, configuration, write_model
from support.random_models import random_weights

from headwise import LocalEngine, SamplingParams
from headwise.runtime.models.registry import model_config
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.request import GenerationResult, TokenLogprobs

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
