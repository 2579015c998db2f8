"""EAGLE-3 heads: what they propose is what torch computes, and tokens stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.eagle_checkpoints import HEADS, head_checkpoint
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.proposed_always import ProposedBehindGuesses
from support.engine.watched_drafts import MOST, assert_as_torch, drafts_of_torch, engine_of, the_answer
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import answers, assert_same
from support.tiny_checkpoints import checkpoint

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.worker.worker import ModelWorker


def config_of(name: str, **changes: Any) -> EngineConfig:
    given = {
        "model": str(checkpoint(name)),
        "draft_model": str(head_checkpoint(name)),
        "kv_cache": "24MiB",
        "speculation": MOST,
        "block_size": 16,
    }
    return replace(BASE, **{**given, **changes})


REFERENCES = "eagle.json"
KINDS = [pytest.param(name, marks=[pytest.mark.soak] if name == "qwen3-moe" else []) for name in HEADS]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("changes", [{}, {"max_batched_tokens": 32, "tensor_ops": "numpy"}, {"tp_size": 2}])
def test_proposals_are_those_of_torch(name: str, changes: dict[str, Any]) -> None:
    answer = the_answer(name, 40)
    with engine_of(config_of(name, **changes)) as (engine, executor, preprocessor):
        found = serve(engine, preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=40)})
    assert_same(answer, found[answer.name].token_ids)
    assert assert_as_torch(drafts_of_torch(REFERENCES)[name], answer, executor.proposed) > 20


@pytest.mark.parametrize("name", KINDS)
def test_so_are_they_behind_a_cached_prefix(name: str) -> None:
    answer = the_answer(name, 20)
    sampling = {answer.name: replace(GREEDY, max_tokens=20)}
    with engine_of(config_of(name)) as (engine, executor, preprocessor):
        for _ in range(2):
            executor.proposed.clear()
            found = serve(engine, preprocessor, [answer], sampling)
            assert_same(answer, found[answer.name].token_ids)
        assert engine.stats()["cache"]["hit_tokens"] > 0
    assert assert_as_torch(drafts_of_torch(REFERENCES)[name], answer, executor.proposed) > 10


@pytest.mark.parametrize("count", [1, 5])
def test_so_are_they_behind_steps_with_drafts(count: int) -> None:
    """And all tokens stay the same, of several sequences, too."""
    some = [the_answer("qwen3", 40), *answers("qwen3")[:3], *answers("qwen3")[4:5]][:count]
    with engine_of(config_of("qwen3", max_batched_tokens=64)) as (engine, executor, preprocessor):
        engine.resources.speculator = ProposedBehindGuesses({each.name: each.output_ids for each in some}, MOST)
        found = serve(engine, preprocessor, some, {each.name: replace(GREEDY, max_tokens=40) for each in some})
        counts = engine.stats()["speculation"]
    assert counts["drafted"] > counts["accepted"] > 10 * count
    for answer in some:
        assert_same(answer.first(40), found[answer.name].token_ids)
    if count == 1:
        assert assert_as_torch(drafts_of_torch(REFERENCES)["qwen3"], some[0], executor.proposed) > 10


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt-oss", marks=pytest.mark.soak)])
@pytest.mark.parametrize("changes", [{}, {"prefill_graphs": 0}, pytest.param({"tp_size": 2}, marks=pytest.mark.soak)])
def test_so_are_they_on_a_gpu(name: str, changes: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    answer = the_answer(name, 8)
    config = config_of(name, **{"device": "cuda", "max_model_len": 256, "max_num_seqs": 2, **changes})
    with engine_of(config, device=lambda: EmulatedGpu(LIBRARIES, "float32")) as (engine, executor, preprocessor):
        found = serve(engine, preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=8)})
        if isinstance(executor.worker, ModelWorker):
            runner = executor.worker.served.runner
            assert runner.graphs is not None
            assert runner.graphs.captured > 0, "they give what drafts are made of, too"
            assert (runner.prefill is None) == ("prefill_graphs" in changes)
    assert_same(answer, found[answer.name].token_ids)
    assert assert_as_torch(drafts_of_torch(REFERENCES)[name], answer, executor.proposed) > 4
