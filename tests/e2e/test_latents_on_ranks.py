"""Latents are on every tensor-parallel rank, query heads on one each: the tokens are those of a single rank."""

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


@pytest.mark.parametrize(("name", "size"), [("deepseek-v2", 2), ("deepseek-v3", 4)])
def test_ranks_say_the_reference_tokens_whole_chunked_batched_and_cached_twice(name: str, size: int) -> None:
    directory = checkpoint(name)
    config = replace(BASE, model=str(directory), kv_cache="16MiB", tp_size=size, max_batched_tokens=256, cpu_threads=1)
    ranks, preprocessor = Ranks(config, directory), Preprocessor.open(config)
    card, executor = preprocessor.card, LocalExecutor(ranks)
    engine = EngineCore(config, card, preprocessor.tokenizer, executor, lookup=open_lookup(config, card))
    wanted, tokens = [answer.first(24) for answer in answers(name)], replace(GREEDY, max_tokens=24)
    for _ in range(2):
        results = serve(engine, preprocessor, wanted, {answer.name: tokens for answer in wanted})
        for answer in wanted:
            assert_same(answer, results[answer.name].token_ids)
    assert engine.stats()["cache"]["hit_tokens"] > 1000
    arenas = [worker._cache.arena.view(np.float32) for worker in ranks.workers]
    for arena in arenas[1:]:
        np.testing.assert_allclose(arena, arenas[0], rtol=0, atol=1e-5)  # and NaN where nothing was written
    executor.close()
