"""An engine whose cache memory is NaN wherever it holds nothing: whoever reads there answers nothing but NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.reference import Answer

from headwise.cache_controller.windows import GroupWindows
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.request import GenerationResult, SamplingParams
from headwise.runtime.worker.worker import ModelWorker


class PoisonedExecutor(LocalExecutor):
    """Poisons blocks when they are handed out, and what is free between two steps.

    Steps may be in flight meanwhile: none of them may touch what it does not hold.

    most_held: ``[groups]``, the most blocks that a sequence held at once
    """

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        layout = worker.card.layout
        self._block_size = layout.block_size
        self._blocks = worker.served.runner.cache.arena.view(np.float32).reshape(-1, layout.block_bytes // 4)
        self._blocks[:] = np.nan
        self._was_free = np.ones(len(self._blocks), dtype=np.bool_)
        self.most_held: NDArray[np.int64] = np.zeros(len(worker.card.plan.groups), dtype=np.int64)
        self.engine: EngineCore | None = None

    def submit(self, batch: BatchRequest) -> None:
        self._blocks[self._handed_out(batch)] = np.nan
        assert self.engine is not None
        held = (self.engine.cache.tables >= 0).sum(axis=2)
        self.most_held = np.maximum(self.most_held, held.max(axis=0))
        super().submit(batch)

    def _handed_out(self, batch: BatchRequest) -> NDArray[np.int32]:
        """The blocks whose first token the step itself computes; the others of its table are of a prefix."""
        row, _, column, block = batch.table_updates.T
        computed = dict(zip(batch.rows.tolist(), batch.starts.tolist(), strict=True))
        first_new = np.array([computed.get(r, np.iinfo(np.int64).max) for r in row.tolist()], dtype=np.int64)
        return block[(block >= 0) & (column * self._block_size >= first_new)]

    def poison_freed(self) -> None:
        """Poison what came free since the last call."""
        assert self.engine is not None
        free = np.zeros(len(self._blocks), dtype=np.bool_)
        free[self.engine.cache.pool.free_blocks] = True
        self._blocks[free & ~self._was_free] = np.nan
        self._was_free = free


@dataclass
class Run:
    """One engine serving requests: what it has said so far, and what can be asked of it."""

    engine: EngineCore
    executor: PoisonedExecutor
    preprocessor: Preprocessor
    results: dict[str, GenerationResult] = field(default_factory=dict)

    def add(self, answer: Answer, **options: Any) -> str:
        """Ask for as many tokens as the answer has; the request's id."""
        sampling = SamplingParams(temperature=0.0, max_tokens=len(answer.output_ids), ignore_eos=True)
        name = f"{answer.name}/{len(self.results)}"
        request = self.preprocessor.prepare(prompt=answer.prompt_ids, sampling=sampling, request_id=name, **options)
        self.engine.add(request)
        self.results[name] = GenerationResult(name)
        return name

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until that, or until all is said."""
        while self.engine.has_work() and not until():
            for delta in self.engine.step(None):
                assert delta.error is None, delta.error
                self.results[delta.request_id].add(delta)
            self.executor.poison_freed()

    def spoken(self, name: str, tokens: int) -> Callable[[], bool]:
        """Whether a request has said so many tokens."""
        return lambda: len(self.results[name].token_ids) >= tokens

    @property
    def cache(self) -> dict[str, int]:
        return self.engine.stats()["cache"]

    @property
    def preemptions(self) -> int:
        return self.engine.stats()["requests"]["preemptions"]

    def close(self) -> None:
        self.executor.close()
        assert self.engine.cache.pool.num_held == 0
        self.engine.cache.check_integrity()


class PoisonedModel:
    """One loaded model; engines of several configurations run on it one after the other."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.preprocessor = Preprocessor.open(config)
        self.worker = ModelWorker(config, resolve_model(config.model, config.cache_path), 0, SingleRank())

    def start(self, **changes: Any) -> Run:
        config, card = self._configured(**changes)
        served = self.worker.served
        served.source = replace(served.source, card=card)
        self.worker.initialize_cache()
        executor = PoisonedExecutor(self.worker)
        executor.engine = EngineCore(config, card, self.preprocessor.tokenizer, executor)
        return Run(executor.engine, executor, self.preprocessor)

    def pool_for(self, answer: Answer, **changes: Any) -> str:
        """``kv_cache`` in which the answer's request fits, and hardly another block."""
        config, card = self._configured(**changes)
        tokens = len(answer.prompt_ids) + len(answer.output_ids)
        blocks = GroupWindows(card.kept, card.layout.block_size).peak_blocks(tokens, config.tokens_in_flight)
        return f"{blocks * card.layout.block_bytes}B"

    def _configured(self, **changes: Any) -> tuple[EngineConfig, ModelCard]:
        config = replace(self.config, **changes)
        return config, read_model_card(config, resolve_model(config.model, config.cache_path))
