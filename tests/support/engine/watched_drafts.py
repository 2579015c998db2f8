"""Engines that propose as many tokens as they may in each step, and what they proposed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from support.engine.proposed_always import ProposedAlways
from support.engine.ranks import Ranks
from support.reference import CLOSE, Answer, answers

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


def worker_of(config: EngineConfig, device: Callable[[], Device] | None) -> ModelWorker | Ranks:
    """With an arena of NaN."""
    if config.ranks > 1:
        return Ranks(config, Path(config.model), device=device)
    worker = ModelWorker(config, Path(config.model), 0, SingleRank(), device() if device else None)
    worker.initialize_cache()
    worker.served.runner.cache.arena.view(np.float32)[:] = np.nan
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
def drafts_of_torch(file: str) -> dict[str, Any]:
    """By model, of that file of `tests/references`."""
    models: dict[str, Any] = json.loads((Path(__file__).parents[2] / "references" / file).read_text())["models"]
    return models


def the_answer(name: str, tokens: int) -> Answer:
    return next(answer for answer in answers(name) if answer.name == "more").first(tokens)


def assert_as_torch(reference: Mapping[str, Any], answer: Answer, proposed: Mapping[int, list[int]]) -> int:
    """Of how many tokens they are the same as in a ``reference``; the last of an answer has none."""
    first, second, begin = reference["first"], reference["second"], len(answer.prompt_ids)
    compared = 0
    for index in range(len(answer.judged) - 1):
        found = proposed.get(begin + index + 1, [])
        for place, (token, gap) in enumerate([first[index], second.get(str(index), (0, 0.0))][: len(found)]):
            if gap < CLOSE:
                break
            assert found[place] == token, (index, place)
            compared += 1
    return compared
