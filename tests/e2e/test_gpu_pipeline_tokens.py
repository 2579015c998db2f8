"""Stages of a pipeline on GPUs, emulated: by graphs, their tokens are those of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.drafting_checkpoints import drafting_checkpoint
from support.engine.given_guesses import GivenGuesses
from support.engine.loaded_model import GREEDY, serve
from support.engine.proposed_always import ProposedAlways
from support.engine.ranks import Ranks
from support.engine.watched_drafts import MOST, Watched, assert_as_torch, drafts_of_torch, the_answer
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.gpu.host_nccl import HostNccl, linked_by_nccl
from support.gpu.nccl_ranks import StagesByNccl
from support.reference import answers, assert_same
from support.tiny_checkpoints import checkpoint

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import with_pool
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.running_step import RunningStep
from headwise.runtime.worker.worker import ModelWorker

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

TOKENS = 4


@pytest.fixture
def nccl() -> Iterator[HostNccl]:
    with linked_by_nccl("nccl", "nccl_links") as nccl:
        yield nccl


def config_of(directory: Path, **changes: Any) -> EngineConfig:
    given = {"kv_cache": "16MiB", "max_model_len": 256, "max_num_seqs": 4, "pipeline_parallel_size": 2, **changes}
    return EngineConfig(model=str(directory), device="cuda", dtype="float32", **given)


def through_the_host(config: EngineConfig) -> Ranks:
    return Ranks(config, Path(config.model), device=lambda: EmulatedGpu(LIBRARIES, "float32"))


def replayed(workers: list[ModelWorker]) -> list[dict[str, int]]:
    """How often steps of each rank are graphs, from now on."""
    counts = [{"decode": 0, "prefill": 0} for _ in workers]

    def watch(owner: Any, name: str, count: dict[str, int], kind: str) -> None:
        original = getattr(owner, name)

        def watched(*given: Any, **more: Any) -> Any:
            count[kind] += 1
            return original(*given, **more)

        setattr(owner, name, watched)

    for worker, count in zip(workers, counts, strict=True):
        graphs, prefill = worker.served.runner.graphs, worker.served.prefill
        assert graphs is not None
        assert prefill is not None
        assert graphs.captured > 1
        for shape in graphs._replays:
            watch_entry(graphs._replays, shape, count)
        for each in prefill._recorded:
            watch(each, "forward", count, "prefill")
    return counts


def watch_entry(replays: dict[Any, Any], shape: Any, count: dict[str, int]) -> None:
    original = replays[shape]

    def watched() -> Any:
        count["decode"] += 1
        return original()

    replays[shape] = watched


def assert_says_the_reference_tokens(
    model: str, config: EngineConfig, worker: Ranks | StagesByNccl, prompts: int = 2
) -> None:
    """The shortest ones at once, chunked; most steps are graphs, on all ranks the same ones."""
    preprocessor, executor = Preprocessor.open(config), LocalExecutor(worker)
    card = with_pool(preprocessor.card, config, worker.num_blocks * preprocessor.card.layout.block_bytes)
    engine = EngineCore(config, card, preprocessor.tokenizer, executor)
    counts = replayed(worker.workers)
    wanted = sorted(answers(model), key=lambda answer: len(answer.prompt_ids))[:prompts]
    greedy = replace(GREEDY, max_tokens=TOKENS)
    results = serve(engine, preprocessor, wanted, {answer.name: greedy for answer in wanted})
    for answer in wanted:
        assert_same(answer.first(TOKENS), results[answer.name].token_ids)
    executor.close()
    worker.close()
    assert counts == [counts[0]] * len(counts)
    assert counts[0]["decode"] >= TOKENS - 1
    assert counts[0]["prefill"] >= 1


@pytest.mark.parametrize(
    "model",
    [
        "qwen3",
        "gpt-oss",  # windows
        "deepseek-v4",  # streams, entries
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("kimi-linear", "deepseek-v3", "gemma4", "qwen3-next", "nemotron-h")
        ),
    ],
)
def test_stages_say_the_reference_tokens_by_graphs(model: str) -> None:
    config = config_of(checkpoint(model))
    assert_says_the_reference_tokens(model, config, through_the_host(config))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tp_size": 2}),
        ("gemma2", {"pipeline_parallel_size": 3}),
        pytest.param("kimi-linear", {"tp_size": 2}, marks=pytest.mark.soak),
        pytest.param("gpt-oss", {"tp_size": 2}, marks=pytest.mark.soak),
    ],
)
def test_so_do_stages_that_reach_each_other_by_nccl(nccl: HostNccl, model: str, changes: dict[str, Any]) -> None:
    """Of a prompt of 90 tokens six chunks, which are on their way together."""
    config = config_of(checkpoint(model), prefill_graphs=32, max_batched_tokens=32, **changes)
    worker = StagesByNccl(nccl, config)
    stages = config.pipeline_parallel_size
    assert all(f"stages={stages} by nccl" in each.describe() for each in worker.workers)
    assert_says_the_reference_tokens(model, config, worker, prompts=4)
    launched = {launch[:2] for log in nccl.log.values() for launch in log}
    assert launched >= {("eager", "send"), ("eager", "recv")}
    assert config.tp_size > 1 or not any(how == "graph" for how, _ in launched), "streams are no part of graphs"


@pytest.mark.parametrize(("gpus", "name", "overlaps"), [(2, "nccl", True), (1, "host", False)])
def test_stages_begin_a_step_before_the_one_before_is_over_where_no_host_waits_for_another(
    nccl: HostNccl, gpus: int, name: str, overlaps: bool
) -> None:
    """And none tells of a step that its GPU has not computed."""
    config = config_of(checkpoint("qwen3"), prefill_graphs=16, max_batched_tokens=16)
    worker = StagesByNccl(nccl, config, gpus)
    over: list[list[bool]] = [[], []]

    def watch(rank: int) -> None:
        begin = worker.workers[rank].begin

        def watched(batch: BatchRequest) -> RunningStep:
            step = begin(batch)
            over[rank].append(step._result is not None)
            return step

        worker.workers[rank].begin = watched

    for rank in range(2):
        assert f"stages=2 by {name} " in worker.workers[rank].describe()
        watch(rank)
    assert_says_the_reference_tokens("qwen3", config, worker)
    assert [any(not each for each in of_rank) for of_rank in over] == [overlaps, overlaps]


def test_stages_that_slept_record_their_graphs_again(nccl: HostNccl) -> None:
    config = config_of(checkpoint("qwen3"), prefill_graphs=16, max_batched_tokens=16)
    worker, preprocessor = StagesByNccl(nccl, config), Preprocessor.open(config)
    executor = LocalExecutor(worker)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    for action in ("sleep", "wake"):
        operation = engine.operate(action)
        while not operation.is_done:
            engine.step(None)
    answer = next(answer for answer in answers("qwen3") if len(answer.prompt_ids) == 9)
    counts = replayed(worker.workers)
    results = serve(engine, preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=TOKENS)})
    assert_same(answer.first(TOKENS), results[answer.name].token_ids)
    executor.close()
    worker.close()
    assert counts == [counts[0]] * 2
    assert counts[0]["decode"] >= TOKENS - 1


def test_each_stage_has_the_blocks_that_its_card_has_room_for_and_the_engine_uses_the_fewest(nccl: HostNccl) -> None:
    config = config_of(checkpoint("qwen3"), prefill_graphs=16, max_batched_tokens=16, kv_cache="auto")
    worker = StagesByNccl(nccl, config, spare_mib=(8, 3))
    blocks = [each.num_blocks for each in worker.workers]
    block_bytes = worker.workers[0].card.layout.block_bytes
    assert blocks == [(mib << 20) // block_bytes for mib in (8, 3)]
    assert worker.num_blocks == blocks[1]
    assert_says_the_reference_tokens("qwen3", config, worker)


@pytest.mark.parametrize("model", ["deepseek-v3", pytest.param("qwen3-next", marks=pytest.mark.soak)])
@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_last_stage_drafts_behind_its_graphs_what_torch_drafts(nccl: HostNccl, model: str, tp_size: int) -> None:
    given = {"speculation": MOST, "block_size": 16, "max_num_seqs": 2, "tp_size": tp_size, "prefill_graphs": 64}
    config, answer = config_of(drafting_checkpoint(model), **given), the_answer(model, 8)
    worker, preprocessor = StagesByNccl(nccl, config), Preprocessor.open(config)
    executor = Watched(worker)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    engine.resources.speculator = ProposedAlways(MOST, config.most_drafts)
    counts = replayed(worker.workers)
    found = serve(engine, preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=8)})
    executor.close()
    worker.close()
    assert_same(answer, found[answer.name].token_ids)
    assert assert_as_torch(drafts_of_torch("drafts.json")[model], answer, executor.proposed) > 4
    assert counts == [counts[0]] * len(counts)
    assert sum(counts[0].values()) > 2


@pytest.mark.parametrize(
    "model",
    [
        "kimi-linear",
        pytest.param("qwen3", marks=pytest.mark.soak),
    ],
)
def test_guesses_change_no_token_of_stages(nccl: HostNccl, model: str) -> None:
    """Also where layers keep states, which must forget wrong ones on all stages."""
    wanted = sorted(answers(model), key=lambda answer: len(answer.prompt_ids))[:2]
    sampling = {answer.name: replace(GREEDY, max_tokens=9) for answer in wanted}
    config = config_of(checkpoint(model), speculation=3, prefill_graphs=64)
    worker, preprocessor = StagesByNccl(nccl, config), Preprocessor.open(config)
    executor = LocalExecutor(worker)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    known = {answer.name: answer.first(9).output_ids for answer in wanted}
    engine.resources.speculator = GivenGuesses(known, 3)
    counts = replayed(worker.workers)
    results = serve(engine, preprocessor, wanted, sampling)
    executor.close()
    worker.close()
    for answer in wanted:
        assert_same(answer.first(9), results[answer.name].token_ids)
    found = engine.stats()["speculation"]
    assert found["drafted"] > found["accepted"] > 0
    assert counts == [counts[0]] * len(counts)
    assert counts[0]["decode"] > 0
