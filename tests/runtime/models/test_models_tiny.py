"""Tiny random models of many architectures compute what transformers does: on all operations, on one rank or more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import run_rank, run_ranks
from support.engine.loaded_model import LIKE_ANOTHER_S
from support.reference import CLOSE, Answer, answers
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise.kernels.fused import is_gated
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import _MODELS, model_config
from headwise.runtime.models.rope import served_up_to
from headwise.runtime.models.shard import valid_tp_sizes
from headwise.runtime.ops.comm import SingleRank


def parsed(name: str) -> ModelConfig:
    config = model_config(TINY_CONFIGS[name])
    return served_up_to(config, config.max_position)


def everything(name: str) -> tuple[Answer, np.ndarray]:
    """An answer, and its prompt with all but the last token of its output."""
    answer = next(answer for answer in answers(name) if answer.name == "more")
    return answer, np.array(answer.prompt_ids + answer.output_ids[:-1], np.int32)


def assert_right(answer: Answer, logits: np.ndarray | None) -> None:
    assert logits is not None
    after_prompt = logits[len(answer.prompt_ids) - 1]
    np.testing.assert_allclose(after_prompt[answer.top_ids], answer.top_logits, atol=CLOSE, rtol=0)
    np.testing.assert_allclose(after_prompt[answer.sample_ids], answer.sample_logits, atol=CLOSE, rtol=0)
    likeliest = logits[len(answer.prompt_ids) - 1 :].argmax(axis=1).tolist()
    assert likeliest[: len(answer.judged)] == answer.judged


@pytest.mark.parametrize("ops_name", ["numpy", "numba", "paddle"])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, ops_name: str) -> None:
    if ops_name == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    answer, ids = everything(name)
    assert_right(answer, run_rank(parsed(name), Checkpoint(checkpoint(name)), SingleRank(), ids, ops_name))


@pytest.mark.parametrize(
    ("name", "as_published"),
    [
        ("dots1", {"scoring_func": "noaux_tc"}),
        ("exaone-moe", {"architectures": ["ExaoneMoEForCausalLM"]}),
        ("granite-hybrid-ssm", {"layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"]}),
        ("granite-hybrid-ssm", {"mamba_d_head": "auto", "time_step_limit": [0.0, float("inf")]}),
        ("nemotron-h-latent", {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"]}),
        ("nemotron-h-latent", {"time_step_limit": [{"__float__": "-Infinity"}, {"__float__": "Infinity"}]}),
    ],
)
def test_a_config_as_it_was_first_published_is_the_same_model(name: str, as_published: dict[str, Any]) -> None:
    assert model_config({**TINY_CONFIGS[name], **as_published}) == model_config(TINY_CONFIGS[name])


ONLY_TWO = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
"""Models whose delta-nets have two key heads; the others have four query heads, of which each rank has one at least."""


ONLY_POWERS = (
    "gemma4", "gemma4-moe", "granite-hybrid-ssm", "granite-hybrid-moe", "nemotron-h", "nemotron-h-moe",
    "nemotron-h-latent", "bamba", "kimi-linear",
)  # fmt: skip
"""Models with four KV heads in windowed layers, which three ranks neither divide nor exceed; or members of states."""


def sizes_of(name: str) -> list[int]:
    if name in ONLY_TWO:
        return [1, 2]
    return [1, 2, 4] if name in ONLY_POWERS else [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=pytest.mark.soak if name in LIKE_ANOTHER_S and size not in most else ())
        for name in TINY_CONFIGS
        for most in [(2, 4) if name in ONLY_POWERS else (2, 3)]  # ranks that are alike, and ones that are not
        for size in sizes_of(name)
        if size > 1
    ],
)
def test_ranks_together_compute_the_same(name: str, size: int) -> None:
    """Most have two KV heads, of which four ranks keep each twice, and three the first twice."""
    assert valid_tp_sizes(parsed(name)) == sizes_of(name)
    answer, ids = everything(name)
    assert_right(answer, run_ranks(parsed(name), Checkpoint(checkpoint(name)), size, ids)[0])


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_a_config_says_that_mlps_have_a_gate_where_their_activation_is_of_one(name: str) -> None:
    config = parsed(name)
    assert config.mlp_gate == is_gated(_MODELS[config.architecture].model_class().activation)
