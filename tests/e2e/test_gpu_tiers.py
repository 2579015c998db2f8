"""Every kind of memory on an emulated GPU: preempted, and again from the host, requests say the references' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import GREEDY
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import Answer, answers, assert_same
from support.tiny_checkpoints import checkpoint, reference, write_checkpoint
from support.waiting import PATIENCE_S

from headwise import EngineConfig, LocalEngine
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

TOKENS, BLOCK = 2, 16
KINDS = ["gpt-oss", "deepseek-v3.2", "deepseek-v4", "qwen3.5"]
"""Windows and sinks of KV heads, latents with an indexer's keys, entries of several tokens, states beside attention."""


def wanted_of(name: str, *lengths: int) -> list[Answer]:
    return [answer.first(TOKENS) for answer in answers(name) if len(answer.prompt_ids) in lengths]


def of_whole_groups(name: str, directory: Path) -> Path:
    """A DeepSeek whose latents have two parts of whole groups of 32, as published ones do."""
    known = reference(name)
    config = {**known["config"], "kv_lora_rank": 64, "qk_rope_head_dim": 32}
    heads, plain, value = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    shapes = {
        "kv_a_layernorm": [64],
        "kv_a_proj_with_mqa": [64 + 32, config["hidden_size"]],
        "kv_b_proj": [heads * (plain + value), 64],
        "q_b_proj": [heads * (plain + 32), config["q_lora_rank"]],
    }
    found = {weight: shapes.get(weight.split(".")[-2], shape) for weight, shape in known["shapes"].items()}
    return write_checkpoint(directory, config, found)


def engine_of(model: str | Path, **changes: Any) -> LocalEngine:
    tiers = {"host_cache": "16MiB", "write_policy": "write_through", "load_timeout_s": PATIENCE_S}
    given = {
        "kv_cache": "8MiB",
        "max_model_len": 256,
        "block_size": BLOCK,
        "max_batched_tokens": 32,
        "max_num_seqs": 2,
        **tiers,
    }
    directory = checkpoint(model) if isinstance(model, str) else model
    config = EngineConfig(model=str(directory), device="cuda", dtype="float32", **{**given, **changes})
    return LocalEngine(config, EmulatedGpu(LIBRARIES, "float32"))


def on_a_cpu(model: Path, kv_dtype: str) -> LocalEngine:
    """By the reference kernels."""
    config = EngineConfig(
        model=str(model), dtype="float32", kv_dtype=kv_dtype, kv_cache="8MiB", max_model_len=256,
        block_size=BLOCK, max_batched_tokens=32, tensor_ops="numpy", kernels="reference", cpu_threads=1,
    )  # fmt: skip
    return LocalEngine(config)


def serve(engine: LocalEngine, wanted: list[Answer], preempted_at: Sequence[int] = ()) -> list[GenerationResult]:
    """What comes of the prompts beside each other; all of them are preempted before the steps of these numbers."""
    core, results = engine.core, [GenerationResult(answer.name) for answer in wanted]
    for answer in wanted:
        params = replace(GREEDY, max_tokens=TOKENS)
        core.add(GenerateRequest(answer.name, np.array(answer.prompt_ids, np.int32), params))
    by_name, steps = {result.request_id: result for result in results}, 0
    while core.has_work():
        if steps in preempted_at:
            assert core.resources.running
            core.resources.preempt_all()
        for delta in core.step(None):
            assert delta.error is None, delta.error
            by_name[delta.request_id].add(delta)
        steps += 1
    core.cache.check_integrity()
    return results


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("gpt-oss", (40,)),
        ("deepseek-v4", (40,)),
        *(pytest.param(name, (9, 40, 90), marks=pytest.mark.soak) for name in KINDS),
    ],
)
def test_preempted_within_prompt_and_answer_and_again_from_the_host(name: str, lengths: Sequence[int]) -> None:
    wanted = wanted_of(name, *lengths)
    with engine_of(name) as engine:
        for answer, result in zip(wanted, serve(engine, wanted, preempted_at=(1, 4)), strict=True):
            assert_same(answer, result.token_ids)
        assert engine.reset_cache("device") > 0
        for answer, result in zip(wanted, serve(engine, wanted), strict=True):
            assert_same(answer, result.token_ids)
        assert engine.stats()["cache"]["host_hit_tokens"] >= 2 * BLOCK


@pytest.mark.soak
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8", "int4"])
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
def test_latents_of_fewer_bits_say_what_they_do_on_a_cpu(name: str, kv_dtype: str, tmp_path: Path) -> None:
    """Preempted, and again from the host's tier, too, which keeps the same bytes."""
    wanted, model = wanted_of(name, 9, 40), checkpoint(name)
    if kv_dtype == "int4":
        model = of_whole_groups(name, tmp_path)
    with on_a_cpu(model, kv_dtype) as cpu, engine_of(model, kv_dtype=kv_dtype) as gpu:
        expected = [result.token_ids for result in serve(cpu, wanted)]
        assert [result.token_ids for result in serve(gpu, wanted, preempted_at=(2,))] == expected
        assert gpu.reset_cache("device") > 0
        assert [result.token_ids for result in serve(gpu, wanted)] == expected
        assert gpu.stats()["cache"]["host_hit_tokens"] >= 2 * BLOCK


@pytest.mark.parametrize(
    "kv_dtype", ["int8", *(pytest.param(dtype, marks=pytest.mark.soak) for dtype in ("float8_e4m3fn", "int4"))]
)
def test_an_indexer_chooses_by_keys_of_fewer_bits_as_on_a_cpu(kv_dtype: str, tmp_path: Path) -> None:
    name = "deepseek-v3.2"
    model = of_whole_groups(name, tmp_path) if kv_dtype == "int4" else checkpoint(name)
    prompt = wanted_of(name, 40)[0].prompt_ids[:27]  # of which the last see more than the 24 that are chosen
    params = replace(GREEDY, max_tokens=2, logprobs=0)
    few = {"host_cache": "0", "max_model_len": 32}
    with on_a_cpu(model, kv_dtype) as cpu, engine_of(model, kv_dtype=kv_dtype, **few) as gpu:
        expected, found = (engine.generate([prompt], params)[0] for engine in (cpu, gpu))
    assert found.token_ids == expected.token_ids
    of_tokens = ([entry.chosen for entry in result.logprobs] for result in (found, expected))
    np.testing.assert_allclose(*of_tokens, rtol=0, atol=1e-3)
