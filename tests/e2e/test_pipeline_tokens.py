"""Stages of a pipeline: tokens stay those of a single rank, and each has its layers' part of weights and cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.ranks import Ranks
from support.reference import answers, assert_same
from support.tiny_checkpoints import checkpoint

from headwise.runtime.config.block_storage import open_lookup
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor

TOKENS = 12


def config_of(name: str, **changes: Any) -> EngineConfig:
    given = {
        "model": str(checkpoint(name)),
        "kv_cache": "24MiB",
        "pipeline_parallel_size": 2,
        "max_batched_tokens": 256,
        "cpu_threads": 1,
    }
    return replace(BASE, **{**given, **changes})


def assert_says_the_reference_tokens(name: str, config: EngineConfig, times: int = 2) -> Ranks:
    """Served so many times, chunked and batched; the ranks, closed."""
    ranks, preprocessor = Ranks(config, Path(config.model)), Preprocessor.open(config)
    executor = LocalExecutor(ranks)
    lookup = open_lookup(config, preprocessor.card)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor, lookup=lookup)
    wanted = [answer.first(TOKENS) for answer in answers(name)]
    for _ in range(times):
        results = serve(
            engine, preprocessor, wanted, {each.name: replace(GREEDY, max_tokens=TOKENS) for each in wanted}
        )
        for answer in wanted:
            assert_same(answer, results[answer.name].token_ids)
    assert times < 2 or engine.stats()["cache"]["hit_tokens"] > 1000
    executor.close()
    ranks.close()
    return ranks


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tensor_ops": "numpy", "kernels": "reference", "max_batched_tokens": 64}),
        ("gemma2", {"tp_size": 2}),
        ("deepseek-v3", {"tp_size": 2}),
        ("qwen3-next", {}),
        ("kimi-linear", {}),
        ("llama4", {}),
        ("gemma4", {}),
        ("gpt-oss", {}),
        ("granite-hybrid", {}),
    ],
)
def test_stages_say_the_reference_tokens_whole_chunked_batched_and_cached(name: str, changes: dict[str, Any]) -> None:
    assert_says_the_reference_tokens(name, config_of(name, **changes))
