"""Models that draft for themselves: what they propose is what torch computes, and their tokens stay the same."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafting_checkpoints import DRAFTING, drafting_checkpoint
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.proposed_always import ProposedAlways
from support.engine.ranks import Ranks
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import CLOSE, Answer, answers, assert_same

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.worker.device import Device
from headwise.runtime.worker.worker import ModelWorker

MOST = 3
AS_OTHERS = ("deepseek-v3-bias", "glm5", "qwen3.5-moe")


class Watched(LocalExecutor):
    """proposed: of one sequence, by its length: the tokens that the model proposed behind it"""

    def __init__(self, worker: ModelWorker | Ranks) -> None:
        super().__init__(worker)
        self.worker = worker
        self._sent: deque[BatchRequest] = deque()
        self.proposed: dict[int, list[int]] = {}

    def submit(self, batch: BatchRequest) -> None:
        self._sent.append(batch)
        super().submit(batch)

    def poll(self, timeout_s: float | None) -> StepResult | None:
        result = super().poll(timeout_s)
        if result is not None:
            batch = self._sent.popleft()
            if len(result.proposed) and batch.sample[0]:
                drafts, accepted = (int(each[0]) if len(each) else 0 for each in (batch.drafts, result.accepted))
                length = int(batch.starts[0] + batch.query_lens[0]) - drafts + accepted + 1
                self.proposed[length] = [token for token in result.proposed[0].tolist() if token >= 0]
        return result


def config_of(name: str, **changes: Any) -> EngineConfig:
    given = {"model": str(drafting_checkpoint(name)), "kv_cache": "24MiB", "speculation": MOST, "block_size": 16}
    return replace(BASE, **{**given, **changes})


def worker_of(config: EngineConfig, device: Callable[[], Device] | None) -> ModelWorker | Ranks:
    """With an arena of NaN."""
    if config.tp_size > 1:
        return Ranks(config, Path(config.model), device=device)
    worker = ModelWorker(config, Path(config.model), 0, SingleRank(), device() if device else None)
    worker.initialize_cache()
    worker._runner.cache.arena.view(np.float32)[:] = np.nan
    return worker


@contextmanager
def engine_of(
    config: EngineConfig, device: Callable[[], Device] | None = None
) -> Iterator[tuple[EngineCore, Watched, Preprocessor]]:
    """An engine that proposes as many tokens as it may, in each step."""
    directory, preprocessor = Path(config.model), Preprocessor.open(config)
    worker = worker_of(config, device)
    executor = Watched(worker)
    engine = EngineCore(config, read_model_card(config, directory), preprocessor.tokenizer, executor)
    assert engine.resources.speculator is not None
    assert engine.resources.speculator.by_model
    engine.resources.speculator = ProposedAlways(MOST, config.most_drafts)
    try:
        yield engine, executor, preprocessor
    finally:
        executor.close()
        worker.close()


@cache
def references() -> dict[str, Any]:
    text = (Path(__file__).parents[1] / "references" / "drafts.json").read_text()
    models: dict[str, Any] = json.loads(text)["models"]
    return models


def the_answer(name: str, tokens: int) -> Answer:
    return next(answer for answer in answers(name) if answer.name == "more").first(tokens)


def assert_as_torch(name: str, answer: Answer, proposed: dict[int, list[int]]) -> int:
    """Of how many tokens they are the same; the last of an answer has none."""
    first, second, begin = references()[name]["first"], references()[name]["second"], len(answer.prompt_ids)
    compared = 0
    for index in range(len(answer.judged) - 1):
        found = proposed.get(begin + index + 1, [])
        for place, (token, gap) in enumerate([first[index], second.get(str(index), (0, 0.0))][: len(found)]):
            if gap < CLOSE:
                break
            assert found[place] == token, (index, place)
            compared += 1
    return compared


KINDS = [pytest.param(name, marks=[pytest.mark.soak] if name in AS_OTHERS else []) for name in DRAFTING]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("changes", [{}, {"max_batched_tokens": 32, "tensor_ops": "numpy"}, {"tp_size": 2}])
def test_proposals_are_those_of_torch(name: str, changes: dict[str, Any]) -> None:
    answer = the_answer(name, 40)
    with engine_of(config_of(name, **changes)) as (engine, executor, preprocessor):
        found = serve(engine, preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=40)})
    assert_same(answer, found[answer.name].token_ids)
    assert assert_as_torch(name, answer, executor.proposed) > 20


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
    assert assert_as_torch(name, answer, executor.proposed) > 10


@pytest.mark.parametrize(
    "name",
    ["glm4-moe", "deepseek-v3", "qwen3-next", pytest.param("deepseek-v3.2", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_so_are_they_on_a_gpu(name: str, tp_size: int) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    answer = the_answer(name, 8)
    config = config_of(name, device="cuda", tp_size=tp_size, max_model_len=256, max_num_seqs=2)
    with engine_of(config, device=lambda: EmulatedGpu(LIBRARIES, "float32")) as (engine, executor, preprocessor):
        found = serve(engine, preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=8)})
        if isinstance(executor.worker, ModelWorker):
            graphs = executor.worker._runner.graphs
            assert graphs is not None
            assert graphs.captured > 0, "they give hidden states, too"
    assert_same(answer, found[answer.name].token_ids)
    assert assert_as_torch(name, answer, executor.proposed) > 4
