"""Stages of a pipeline: tokens stay those of a single rank, and each has its layers' part of weights and cache."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.drafting_checkpoints import drafting_checkpoint
from support.engine.given_guesses import GivenGuesses
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.proposed_always import ProposedAlways
from support.engine.ranks import Ranks
from support.reference import Answer, answers, assert_same
from support.tiny_checkpoints import checkpoint
from support.tiny_models import byte_level_tokenizer, write_tokenizer_directory

from headwise.runtime.config.block_storage import open_lookup, open_rank_storage
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.models.base import Model
from headwise.runtime.protocol.request import GenerationResult, SamplingParams

TOKENS = 12
FORM = "[a-f]{3}-[0-9]{2,4}"


def config_of(name: str, **changes: Any) -> EngineConfig:
    given = {
        "model": str(checkpoint(name)),
        "kv_cache": "24MiB",
        "pipeline_parallel_size": 2,
        "max_batched_tokens": 256,
        "cpu_threads": 1,
    }
    return replace(BASE, **{**given, **changes})


@contextmanager
def engine_of(config: EngineConfig) -> Iterator[tuple[EngineCore, Preprocessor, Ranks]]:
    ranks, preprocessor = Ranks(config, Path(config.model)), Preprocessor.open(config)
    executor = LocalExecutor(ranks)
    lookup = open_lookup(config, preprocessor.card)
    try:
        engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor, lookup=lookup)
        yield engine, preprocessor, ranks
    finally:
        executor.close()
        ranks.close()
        if lookup is not None:
            lookup.close()


def wanted_of(name: str) -> list[Answer]:
    return [answer.first(TOKENS) for answer in answers(name)]


def assert_serves(engine: EngineCore, preprocessor: Preprocessor, wanted: list[Answer]) -> None:
    sampling = {each.name: replace(GREEDY, max_tokens=TOKENS) for each in wanted}
    results = serve(engine, preprocessor, wanted, sampling)
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)


def assert_says_the_reference_tokens(
    name: str, config: EngineConfig, times: int = 2, speculator: Speculator | None = None
) -> tuple[EngineCore, Ranks]:
    """Served so many times, chunked and batched; the engine and its ranks, closed."""
    with engine_of(config) as (engine, preprocessor, ranks):
        engine.resources.speculator = speculator or engine.resources.speculator
        for _ in range(times):
            assert_serves(engine, preprocessor, wanted_of(name))
        assert times < 2 or engine.stats()["cache"]["hit_tokens"] > 1000
    return engine, ranks


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
        ("gemma2", {"pipeline_parallel_size": 3}),  # of two layers, one and one
        ("kimi-linear", {"pipeline_parallel_size": 5}),
        ("nemotron-h", {"pipeline_parallel_size": 6}),  # MLPs alone, and states alone
        ("deepseek-v3", {"tp_size": 2, "context_parallel_size": 2}),
        ("deepseek-v3.2", {"tp_size": 2, "context_parallel_size": 2, "pipeline_parallel_size": 3, "block_size": 8}),
        ("qwen3", {"max_batched_tokens": 5}),
        ("qwen3", {"async_scheduling": False}),
        pytest.param("qwen3.5-moe", {"pipeline_parallel_size": 4}, marks=pytest.mark.soak),
        ("mimo-v2", {}),  # layers of unlike heads
        ("laguna", {"tp_size": 2}),  # query heads by layer
        ("mistral4", {}),  # latents whose queries grow with their position
        pytest.param("minimax-m2", {"tp_size": 2}, marks=pytest.mark.soak),  # norms of all heads of a stage's ranks
        pytest.param("gemma4-moe", {"pipeline_parallel_size": 3}, marks=pytest.mark.soak),
        pytest.param("nemotron-h-moe", {"pipeline_parallel_size": 4}, marks=pytest.mark.soak),
        pytest.param("cohere2", {"pipeline_parallel_size": 4}, marks=pytest.mark.soak),  # attention beside MLPs
        pytest.param("glm5", {"tp_size": 2}, marks=pytest.mark.soak),
        ("glm5-shared", {"tp_size": 2}),  # each stage has an indexer, and keys of its own
        ("deepseek-v4", {"tp_size": 2}),  # streams, and entries side by side in each stage
        pytest.param("deepseek-v4", {"pipeline_parallel_size": 4}, marks=pytest.mark.soak),
        ("hunyuan4", {}),
    ],
)
def test_stages_say_the_reference_tokens_whole_chunked_batched_and_cached(name: str, changes: dict[str, Any]) -> None:
    assert_says_the_reference_tokens(name, config_of(name, **changes))


# ---- tiers ----


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen3-next",
        "kimi-linear",
        "gemma4",
        pytest.param("deepseek-v4", marks=pytest.mark.soak),
        pytest.param("deepseek-v3.2", marks=pytest.mark.soak),
        pytest.param("gpt-oss", marks=pytest.mark.soak),
        pytest.param("llama4", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("write_policy", ["write_through", pytest.param("write_back", marks=pytest.mark.soak)])
def test_parts_of_blocks_come_back_from_the_host_of_each_stage(name: str, write_policy: str) -> None:
    """Which the device has let go of, with all of its memory."""
    config = config_of(name, host_cache="64MiB", write_policy=write_policy, tp_size=2)
    with engine_of(config) as (engine, preprocessor, ranks):
        for _ in range(2):
            assert_serves(engine, preprocessor, wanted_of(name))
            for action in ("sleep", "wake"):
                operation = engine.operate(action)
                while not operation.is_done:
                    engine.step(None)
            for worker in ranks.workers:
                worker.served.runner.cache.arena.view(np.float32)[:] = np.nan
        assert engine.stats()["cache"]["hit_tokens"] > 500
        assert engine.stats()["host"]["loaded_blocks"] > 0
        assert engine.stats()["host"]["failed_blocks"] == 0


def test_blocks_that_a_small_pool_evicts_come_back_from_the_host() -> None:
    name, wanted = "qwen3", [answer for answer in wanted_of("qwen3") if len(answer.prompt_ids) <= 400]
    config = config_of(
        name, host_cache="64MiB", write_policy="write_through", kv_cache="1MiB", max_model_len=480, block_size=16
    )
    with engine_of(config) as (engine, preprocessor, _):
        for _ in range(3):
            for answer in wanted:  # one after the other: each needs what the others have
                assert_serves(engine, preprocessor, [answer])
        assert engine.stats()["host"]["loaded_blocks"] > 0
        assert engine.stats()["host"]["failed_blocks"] == 0


@pytest.mark.parametrize(("name", "stages"), [("deepseek-v3", 2), ("kimi-linear", 3), ("gemma2", 4)])
def test_parts_of_blocks_come_back_from_storage(name: str, stages: int, tmp_path: Path) -> None:
    storage = {"host_cache": "64MiB", "storage": f"file://{tmp_path}?capacity=1GiB", "write_policy": "write_through"}
    config = config_of(name, pipeline_parallel_size=stages, **storage)
    for begins_with in (False, True):
        engine, _ = assert_says_the_reference_tokens(name, config, times=1)
        assert (engine.stats()["cache"]["hit_tokens"] > 500) is begins_with


def test_what_storage_has_lost_of_one_stage_is_computed_by_all(tmp_path: Path) -> None:
    name = "gemma2"
    storage = {"host_cache": "64MiB", "storage": f"file://{tmp_path}?capacity=1GiB", "write_policy": "write_through"}
    config = config_of(name, **storage)
    assert_says_the_reference_tokens(name, config, times=1)
    of_last = open_rank_storage(config, Preprocessor.open(config).card, 1)
    assert of_last.stats().blocks > 0
    of_last.clear()
    of_last.close()
    for begins_with in (False, True):
        engine, _ = assert_says_the_reference_tokens(name, config, times=1)
        assert (engine.stats()["cache"]["hit_tokens"] > 500) is begins_with


def test_engines_of_other_stages_and_ranks_take_none_of_each_other_s_blocks_for_their_own(tmp_path: Path) -> None:
    """Blocks are as large in two stages as on two ranks, and there is one storage for all."""
    name = "gemma2"
    storage = {"host_cache": "64MiB", "storage": f"file://{tmp_path}?capacity=1GiB", "write_policy": "write_through"}
    sizes: set[int] = set()
    for stages, tp_size in ((2, 1), (1, 2), (1, 1), (4, 1), (2, 2)):
        config = config_of(name, pipeline_parallel_size=stages, tp_size=tp_size, block_size=16, **storage)
        for begins_with in (False, True):
            engine, _ = assert_says_the_reference_tokens(name, config, times=1)
            assert (engine.stats()["cache"]["hit_tokens"] > 500) is begins_with, (stages, tp_size)
        sizes.add(engine.card.layout.block_bytes)
    assert len(sizes) == 3


# ---- what requests may ask for ----


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {}),
        ("qwen3-next", {"pipeline_parallel_size": 3}),  # right guesses are computed once more
        ("gpt-oss", {"max_batched_tokens": 24}),
        pytest.param("deepseek-v3", {"tp_size": 2}, marks=pytest.mark.soak),
        pytest.param("kimi-linear", {}, marks=pytest.mark.soak),
    ],
)
def test_guesses_change_no_token(name: str, changes: dict[str, Any]) -> None:
    config = config_of(name, speculation=3, **changes)
    known = {answer.name: answer.output_ids for answer in wanted_of(name)}
    engine, _ = assert_says_the_reference_tokens(name, config, speculator=GivenGuesses(known, 3))
    told = engine.stats()["speculation"]
    assert told["drafted"] > told["accepted"] > 20


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek-v3", {}),
        ("deepseek-v3", {"pipeline_parallel_size": 3, "tp_size": 2, "context_parallel_size": 2}),
        ("qwen3-next", {"pipeline_parallel_size": 4}),
        pytest.param("glm4-moe", {}, marks=pytest.mark.soak),
        pytest.param("deepseek-v4", {}, marks=pytest.mark.soak),
    ],
)
def test_drafts_of_the_model_itself_change_no_token(name: str, changes: dict[str, Any]) -> None:
    """The last stage drafts, with an embedding of its own."""
    config = config_of(name, model=str(drafting_checkpoint(name)), speculation=3, **changes)
    engine, _ = assert_says_the_reference_tokens(name, config, speculator=ProposedAlways(3, config.most_drafts))
    told = engine.stats()["speculation"]
    assert told["drafted"] > told["accepted"]


def served(config: EngineConfig, prompts: Sequence[list[int]], params: SamplingParams) -> list[GenerationResult]:
    with engine_of(config) as (engine, preprocessor, _):
        results = {str(place): GenerationResult(str(place)) for place in range(len(prompts))}
        for name, prompt in zip(results, prompts, strict=True):
            engine.add(preprocessor.prepare(prompt=prompt, sampling=params, request_id=name))
        while engine.has_work():
            for delta in engine.step(None):
                assert delta.error is None, delta.error
                results[delta.request_id].add(delta)
        return list(results.values())


@pytest.mark.parametrize("name", ["qwen3", "gemma2", pytest.param("qwen3-next", marks=pytest.mark.soak)])
def test_log_probabilities_of_prompts_and_answers_are_those_of_one_stage(name: str) -> None:
    prompts = [answer.prompt_ids for answer in wanted_of(name) if 2 <= len(answer.prompt_ids) <= 300]
    params = replace(GREEDY, max_tokens=4, logprobs=2, prompt_logprobs=2)
    found, expected = (
        served(config_of(name, pipeline_parallel_size=stages, max_batched_tokens=48), prompts, params)
        for stages in (2, 1)
    )
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs) == len(prompt)
        assert ours.prompt_logprobs[0] is None
        for each, other in zip(
            [*ours.prompt_logprobs[1:], *ours.logprobs], [*theirs.prompt_logprobs[1:], *theirs.logprobs], strict=True
        ):
            assert each is not None
            assert other is not None
            assert each.chosen == pytest.approx(other.chosen, abs=1e-4)
            assert [value for _, value in each.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, temperature=0.9, seed=2),
        SamplingParams(max_tokens=12, temperature=0.7, seed=3, top_p=0.8, top_k=20, min_p=0.01),
        SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(max_tokens=12, temperature=0.9, seed=4, logit_bias={5: -100.0, 9: 3.0}),
        SamplingParams(max_tokens=12, temperature=0.9, seed=2, guided={"regex": FORM}),
    ],
    ids=["drawn", "filtered", "penalties", "bias", "form"],
)
def test_tokens_that_are_drawn_are_those_of_one_stage(params: SamplingParams, tmp_path: Path) -> None:
    name, directory = "qwen3", tmp_path / "ends"
    copytree(checkpoint(name), directory)
    write_tokenizer_directory(directory, byte_level_tokenizer(), {"eos_token": "<|im_end|>"})
    prompts = [answer.prompt_ids for answer in wanted_of(name) if len(answer.prompt_ids) <= 300]
    found, expected = (
        served(config_of(name, pipeline_parallel_size=stages, model=str(directory)), prompts, params)
        for stages in (3, 1)
    )
    assert not params.guided or all(re.fullmatch(FORM, each.text) for each in found)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.text for each in found] == [each.text for each in expected]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("qwen3", "int8"),
        ("deepseek-v3", "float8_e4m3fn"),
        ("gpt-oss", "int4"),
        pytest.param("qwen3-next", "int8", marks=pytest.mark.soak),
        pytest.param("gemma4", "int4", marks=pytest.mark.soak),
        pytest.param("deepseek-v4", "float8_e4m3fn", marks=pytest.mark.soak),
    ],
)
def test_quantised_caches_say_what_they_say_in_one_stage(name: str, kv_dtype: Any) -> None:
    prompts = [answer.prompt_ids for answer in wanted_of(name) if len(answer.prompt_ids) <= 300]
    params = replace(GREEDY, max_tokens=6)
    options = {"kv_dtype": kv_dtype, "max_batched_tokens": 4096, "max_num_seqs": 1}  # whole prompts: chunks round
    found, expected, kept = (
        served(config_of(name, pipeline_parallel_size=stages, **options, **more), prompts, params)
        for stages, more in ((2, {}), (1, {}), (2, {"host_cache": "16MiB"}))
    )
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.token_ids for each in kept] == [each.token_ids for each in expected]


# ---- what each stage has ----


def bytes_of(*parts: object) -> int:
    """Of the arrays that weights are made of, each once; some are views of a file that is mapped as a whole."""
    seen, left, arrays = set[int](), list(parts), dict[tuple[int, int], int]()
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, (type, ModuleType)) or callable(part):
            continue
        seen.add(id(part))
        if isinstance(part, np.ndarray):
            arrays[part.ctypes.data, part.nbytes] = part.nbytes
        else:
            left += gc.get_referents(part)
    return sum(arrays.values())


def weights_of(model: Any) -> tuple[int, int, int]:
    """Bytes of the embedding, the layers, and the LM head."""
    lm_head = getattr(model, "_lm_head", None)
    return bytes_of(model._embedding), bytes_of(*model._layers), bytes_of(lm_head)


@pytest.mark.parametrize(("name", "is_tied"), [("cohere2", True), ("gemma2", False)])
def test_each_stage_has_its_layers_part_of_the_weights(name: str, is_tied: bool) -> None:
    """And the first one the embedding, the last one the LM head, which may be that."""
    models: dict[int, list[Model]] = {}
    for stages in (1, 2, 4):
        config = config_of(name, pipeline_parallel_size=stages, tensor_ops="numpy", kernels="reference")
        with engine_of(config) as (_, _, ranks):
            models[stages] = [worker.served.model for worker in ranks.workers]
    (whole,) = (weights_of(model) for model in models[1])
    assert min(whole) > 1000
    for stages in (2, 4):
        found = [weights_of(model) for model in models[stages]]
        assert [layers for _, layers, _ in found] == [whole[1] // stages] * stages
        assert [embedding for embedding, *_ in found] == [
            whole[0],
            *[0] * (stages - 2),
            whole[0] if is_tied else 0,
        ]
        assert [lm_head for *_, lm_head in found] == [*[0] * (stages - 1), whole[2]]


def test_each_stage_has_its_layers_part_of_every_block_and_writes_nothing_else() -> None:
    name = "qwen3"  # three layers: two and one, whose blocks are half empty
    (answer,) = [answer for answer in wanted_of(name) if answer.name == "more"]
    written: dict[int, list[int]] = {}
    for stages in (1, 2, 3):
        with engine_of(config_of(name, pipeline_parallel_size=stages, block_size=16)) as (engine, preprocessor, ranks):
            assert_serves(engine, preprocessor, [answer])
            card = engine.card
            arenas = [worker.served.runner.cache.arena for worker in ranks.workers]
            assert {arena.nbytes for arena in arenas} == {card.spec.num_blocks * card.layout.block_bytes}
            assert [card.layout.block_bytes, card.layout.slots] == [
                [6 * card.layout.slot_bytes, 6],
                [4 * card.layout.slot_bytes, 4],
                [2 * card.layout.slot_bytes, 2],
            ][stages - 1]
            written[stages] = [int((~np.isnan(arena.view(np.float32))).sum()) for arena in arenas]
    (whole,) = written[1]
    assert written[2] == [whole // 3 * 2, whole // 3]
    assert written[3] == [whole // 3] * 3
