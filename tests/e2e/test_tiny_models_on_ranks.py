"""The tokens of tensor-parallel ranks are those of a single one, where layers keep other things than KV heads.

Latents are on every rank, and query heads are dealt out; states are dealt out by key heads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.ranks import Ranks
from support.reference import answers, assert_same
from support.tiny_checkpoints import checkpoint

from headwise.runtime.config.block_storage import open_lookup
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor


def run_twice(name: str, size: int, **changes: object) -> list[np.ndarray]:
    """Serve the references' prompts twice, chunked and batched, compare tokens, and return the ranks' arenas."""
    directory = checkpoint(name)
    config = replace(
        BASE, model=str(directory), kv_cache="24MiB", tp_size=size, max_batched_tokens=256, cpu_threads=1, **changes
    )
    ranks, preprocessor = Ranks(config, directory), Preprocessor.open(config)
    card, executor = preprocessor.card, LocalExecutor(ranks)
    engine = EngineCore(config, card, preprocessor.tokenizer, executor, lookup=open_lookup(config, card))
    wanted, tokens = [answer.first(24) for answer in answers(name)], replace(GREEDY, max_tokens=24)
    for _ in range(2):
        results = serve(engine, preprocessor, wanted, {answer.name: tokens for answer in wanted})
        for answer in wanted:
            assert_same(answer, results[answer.name].token_ids)
    assert engine.stats()["cache"]["hit_tokens"] > 1000
    executor.close()
    return [worker._cache.arena.view(np.float32) for worker in ranks.workers]


@pytest.mark.parametrize(("name", "size"), [("deepseek-v2", 2), ("deepseek-v3", 4), ("deepseek-v3.2", 2)])
def test_ranks_say_the_reference_tokens_whole_chunked_batched_and_cached_twice(name: str, size: int) -> None:
    arenas = run_twice(name, size)
    for arena in arenas[1:]:
        np.testing.assert_allclose(arena, arenas[0], rtol=0, atol=1e-5)  # and NaN where nothing was written


@pytest.mark.parametrize(("name", "block_size"), [("qwen3-next", 16), ("qwen3.5", 64), ("qwen3.5-moe", 16)])
def test_ranks_that_share_states_out_say_the_reference_tokens(name: str, block_size: int) -> None:
    run_twice(name, 2, block_size=block_size)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-shared"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_ranks_with_heads_of_two_sizes_say_the_reference_tokens(name: str, block_size: int) -> None:
    run_twice(name, 2, block_size=block_size)


def test_ranks_that_see_chunks_say_the_reference_tokens() -> None:
    run_twice("llama4", 2, block_size=16)
