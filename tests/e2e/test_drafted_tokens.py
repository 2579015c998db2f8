"""Models that draft for themselves: what they propose is what torch computes, and their tokens stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.drafting_checkpoints import DRAFTING, drafting_checkpoint
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.watched_drafts import MOST, assert_as_torch, drafts_of_torch, engine_of, the_answer
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import assert_same

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol.prompt_items import PromptItem
from headwise.runtime.worker.worker import ModelWorker

AS_OTHERS = ("deepseek-v3-bias", "glm5", "glm5-shared", "qwen3.5-moe")


def config_of(name: str, **changes: Any) -> EngineConfig:
    given = {"model": str(drafting_checkpoint(name)), "kv_cache": "24MiB", "speculation": MOST, "block_size": 16}
    return replace(BASE, **{**given, **changes})


KINDS = [pytest.param(name, marks=[pytest.mark.soak] if name in AS_OTHERS else []) for name in DRAFTING]


IN_PARTS_TOO = ("deepseek-v3", "qwen3.5", "mimo-v2", "glm4-moe")
"""Layers that draft with latents, beside states, with windows, with experts: of the others, parts and ranks are for the
soak."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(pytest.param(*kind.values, {}, marks=kind.marks) for kind in KINDS),
        *(
            pytest.param(*kind.values, changes, marks=() if kind.values[0] in IN_PARTS_TOO else pytest.mark.soak)
            for changes in ({"max_batched_tokens": 32, "tensor_ops": "numpy"}, {"tp_size": 2})
            for kind in KINDS
        ),
    ],
)
def test_proposals_are_those_of_torch(name: str, changes: dict[str, Any]) -> None:
    assert_proposals_of_torch(name, changes)


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind.values != ("deepseek-v4",)])
def test_so_are_those_of_stages(name: str) -> None:
    """But of DeepSeek-V4, whose layers are not dealt to any."""
    assert_proposals_of_torch(name, {"pipeline_parallel_size": 2})


def assert_proposals_of_torch(name: str, changes: dict[str, Any]) -> None:
    answer = the_answer(name, 40)
    with engine_of(config_of(name, **changes)) as (engine, executor, preprocessor):
        found = serve(engine, preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=40)})
    assert_same(answer, found[answer.name].token_ids)
    assert assert_as_torch(drafts_of_torch("drafts.json")[name], answer, executor.proposed) > 20


@pytest.mark.parametrize("name", KINDS)
def test_so_are_they_behind_a_cached_prefix(name: str) -> None:
    """Of which the last token's place is of the request that was first."""
    answer = the_answer(name, 20)
    sampling = {answer.name: replace(GREEDY, max_tokens=20)}
    with engine_of(config_of(name)) as (engine, executor, preprocessor):
        for _ in range(2):
            executor.proposed.clear()
            found = serve(engine, preprocessor, [answer], sampling)
            assert_same(answer, found[answer.name].token_ids)
        assert engine.stats()["cache"]["hit_tokens"] > 0
    assert assert_as_torch(drafts_of_torch("drafts.json")[name], answer, executor.proposed) > 10


@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-v3"])
def test_so_are_they_of_a_prompt_that_is_given_as_embeddings(name: str) -> None:
    """The layer is given those of the tokens that come next, too."""
    answer, sampling = the_answer(name, 20), replace(GREEDY, max_tokens=20)
    with engine_of(config_of(name, tensor_ops="numpy")) as (engine, executor, preprocessor):
        model, ids = executor.worker.served.model, np.array(answer.prompt_ids, np.int32)
        own = model.ops.numpy(model.embedded(model.ops.upload(ids), None)).copy()
        cut = len(ids) // 3
        items = [PromptItem(cut, cut, embeds=own[cut : 2 * cut])]
        prompt = [*answer.prompt_ids[:cut], *[5] * cut, *answer.prompt_ids[2 * cut :]]
        engine.add(preprocessor.prepare(prompt=prompt, sampling=sampling, request_id="r", items=items))
        found = [token for _ in range(60) for delta in engine.step(None) for token in delta.token_ids]
        assert not engine.has_work()
    assert_same(answer, found)
    assert assert_as_torch(drafts_of_torch("drafts.json")[name], answer, executor.proposed) > 10


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        "qwen3-next",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("glm4-moe", "deepseek-v3.2", "deepseek-v4")),
    ],
)
@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_so_are_they_on_a_gpu(name: str, tp_size: int) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    answer = the_answer(name, 8)
    config = config_of(name, device="cuda", tp_size=tp_size, max_model_len=256, max_num_seqs=2)
    with engine_of(config, device=lambda: EmulatedGpu(LIBRARIES, "float32")) as (engine, executor, preprocessor):
        found = serve(engine, preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=8)})
        if isinstance(executor.worker, ModelWorker):
            graphs = executor.worker.served.runner.graphs
            assert graphs is not None
            assert graphs.captured > 0, "they give hidden states, too"
    assert_same(answer, found[answer.name].token_ids)
    assert assert_as_torch(drafts_of_torch("drafts.json")[name], answer, executor.proposed) > 4
