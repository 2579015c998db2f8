"""Ranks that keep latents together: tokens stay those of a single one, and each has its part of the cache alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafting_checkpoints import drafting_checkpoint
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.proposed_always import ProposedAlways
from support.engine.ranks import Ranks
from support.reference import answers, assert_same
from support.tiny_checkpoints import checkpoint

from headwise.runtime.config.block_storage import open_lookup
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor

TOKENS = 12


def config_of(name: str, tp_size: int, **changes: Any) -> EngineConfig:
    """Ranks that keep all latents together, unless another number is given."""
    given = {
        "model": str(checkpoint(name)),
        "kv_cache": "24MiB",
        "tp_size": tp_size,
        "context_parallel_size": tp_size,
        "max_batched_tokens": 256,
        "cpu_threads": 1,
    }
    return replace(BASE, **{**given, **changes})


def assert_says_the_reference_tokens(name: str, config: EngineConfig, times: int = 2, drafts: int = 0) -> Ranks:
    """Served so many times, chunked and batched; the ranks, closed."""
    ranks, preprocessor = Ranks(config, Path(config.model)), Preprocessor.open(config)
    executor = LocalExecutor(ranks)
    lookup = open_lookup(config, preprocessor.card)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor, lookup=lookup)
    if drafts:
        engine.resources.speculator = ProposedAlways(drafts, config.most_drafts)
    wanted = [answer.first(TOKENS) for answer in answers(name)]
    for _ in range(times):
        results = serve(
            engine, preprocessor, wanted, {each.name: replace(GREEDY, max_tokens=TOKENS) for each in wanted}
        )
        for answer in wanted:
            assert_same(answer, results[answer.name].token_ids)
    assert times < 2 or engine.stats()["cache"]["hit_tokens"] > 1000
    executor.close()
    return ranks


@pytest.mark.parametrize(
    ("name", "tp_size", "changes"),
    [
        ("deepseek-v2", 2, {"block_size": 8}),
        ("deepseek-v3", 4, {"tensor_ops": "numpy"}),
        pytest.param(
            "deepseek-v3",
            4,
            {"context_parallel_size": 2, "kernels": "reference", "max_batched_tokens": 64},
            marks=pytest.mark.soak,
        ),
        ("glm4-moe-lite", 2, {"block_size": 2}),
        ("kimi-linear", 2, {"block_size": 32}),
        ("kimi-linear", 4, {}),
        ("deepseek-v3.2", 2, {"block_size": 8}),  # the best tokens of all ranks'
        pytest.param(  # of few queries at a time
            "deepseek-v3.2", 4, {"context_parallel_size": 2, "max_batched_tokens": 24}, marks=pytest.mark.soak
        ),
        ("hunyuan4", 2, {"block_size": 8}),  # sinks beside them
        ("mistral4", 2, {"block_size": 8}),  # queries that grow with their position
        pytest.param("glm5", 2, {}, marks=pytest.mark.soak),
        ("glm5-shared", 4, {"context_parallel_size": 2, "block_size": 16}),  # keys apart from latents
        ("qwen3", 4, {"context_parallel_size": 2}),  # two KV heads, normed queries and keys
        ("gpt-oss", 4, {"context_parallel_size": 2}),  # of layers without a window alone; learned sinks, biases
        ("gemma4", 4, {"context_parallel_size": 2, "block_size": 16}),  # heads of two sizes, half of them on two ranks
        ("mimo-v2", 4, {"context_parallel_size": 4}),  # values smaller than keys, windows beside
        ("laguna", 4, {"context_parallel_size": 2}),  # query heads by layer
        ("nemotron-h", 4, {"context_parallel_size": 2}),  # beside states, which are dealt out
        pytest.param("granite-hybrid", 4, {"context_parallel_size": 2}, marks=pytest.mark.soak),
        pytest.param("gemma2", 4, {"context_parallel_size": 2}, marks=pytest.mark.soak),  # softcaps
        pytest.param("gemma4-shared", 4, {"context_parallel_size": 2}, marks=pytest.mark.soak),
        pytest.param("minimax-m2", 4, {"context_parallel_size": 2}, marks=pytest.mark.soak),  # norms of all heads
        pytest.param("deepseek-v2", 4, {}, marks=pytest.mark.soak),
        pytest.param("deepseek-v3", 2, {"tensor_ops": "paddle"}, marks=pytest.mark.soak),
    ],
)
def test_ranks_say_the_reference_tokens_whole_chunked_batched_and_cached(
    name: str, tp_size: int, changes: dict[str, Any]
) -> None:
    assert_says_the_reference_tokens(name, config_of(name, tp_size, **changes))


def test_drafts_of_the_model_itself_change_no_token() -> None:
    name = "deepseek-v3"
    config = config_of(name, 2, model=str(drafting_checkpoint(name)), speculation=3)
    assert_says_the_reference_tokens(name, config, drafts=3)


def test_a_rank_has_its_part_of_each_block_and_as_many_times_the_blocks_fit() -> None:
    def served(parts: int) -> Ranks:
        return assert_says_the_reference_tokens(
            "deepseek-v2", config_of("deepseek-v2", 2, context_parallel_size=parts, block_size=16), times=1
        )

    whole, shared = served(1), served(2)
    assert shared.num_blocks == 2 * whole.num_blocks
    written = [~np.isnan(worker.served.runner.cache.arena.view(np.float32)) for worker in shared.workers]
    of_whole = ~np.isnan(whole.workers[0].served.runner.cache.arena.view(np.float32))
    assert sum(each.sum() for each in written) == of_whole.sum()
    first, second = (worker.served.runner.cache.arena.view(np.float32) for worker in shared.workers)
    assert not np.allclose(first, second, equal_nan=True, atol=1e-2)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-linear"])
def test_parts_of_blocks_come_back_from_the_host_and_from_storage(name: str, tmp_path: Path) -> None:
    config = config_of(
        name, 2, host_cache="64MiB", storage=f"file://{tmp_path}?capacity=1GiB", write_policy="write_through"
    )
    assert_says_the_reference_tokens(name, config, times=1)
    preprocessor = Preprocessor.open(config)
    ranks = Ranks(config, Path(config.model))
    executor = LocalExecutor(ranks)
    engine = EngineCore(
        config, preprocessor.card, preprocessor.tokenizer, executor, lookup=open_lookup(config, preprocessor.card)
    )
    wanted = [answer.first(TOKENS) for answer in answers(name)]
    results = serve(engine, preprocessor, wanted, {each.name: replace(GREEDY, max_tokens=TOKENS) for each in wanted})
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)
    assert engine.stats()["cache"]["hit_tokens"] > 500
    executor.close()
