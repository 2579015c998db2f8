"""An engine around a model of random geometry: see `mixed_model`."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.engine.mixed_model import NEVER_CAME, MixedModel, MixedOverCache, MixedTokenModel, mixed_card
from support.engine.simulated_engine import BLOCK, SOMEWHERE, engine_over, lookup_in
from support.engine.simulation import SimulatedExecutor, Storage

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.running_step import RunningStep
from headwise.runtime.worker.worker import ModelWorker
from headwise.runtime.worker.worker_parts import WorkerParts


class MixedExecutor(SimulatedExecutor):
    """A `SimulatedExecutor` whose model is a `MixedModel`."""

    def __init__(self, mixed: MixedModel, card: ModelCard, **options: Any) -> None:
        self._mixed = mixed
        super().__init__(card, **options)

    def _make_model(self) -> MixedTokenModel:
        self._attention = MixedOverCache(self._mixed, self.card, self._device.copies)
        return MixedTokenModel(self.card.config, self._attention)

    def _make_worker(self, parts: WorkerParts) -> ModelWorker:
        worker = super()._make_worker(parts)
        worker.served.attention = self._attention
        return worker

    def _begin(self, batch: BatchRequest) -> RunningStep:
        loads = batch.cache_swap_metadata.loads
        self._attention.asked.update(loads[:, 2].tolist())
        if not self.is_asleep:
            self._fill(loads[:, 2], NEVER_CAME)
            for group, _, block in loads.tolist():  # a load brings what layers keep, and no padding
                self._attention.fill_padding(self.worker.served.runner.cache.arena, group, np.array([block]))
        return super()._begin(batch)


def make_mixed_engine(
    mixed: MixedModel,
    *,
    longest: int = 44,
    max_rows: int = 4,
    host_blocks: int = 0,
    storage: Storage | None = None,
    eager: bool = True,
    is_late: bool = False,
    **options: Any,
) -> tuple[EngineCore, MixedExecutor]:
    """longest: tokens of a sequence; for the others see `make_engine`"""
    if storage is not None:
        options |= SOMEWHERE
    config = EngineConfig(block_size=BLOCK, **options)
    card = mixed_card(mixed, config, longest=longest, max_rows=max_rows, host_blocks=host_blocks)
    executor = MixedExecutor(mixed, card, eager=eager, storage=storage, is_late=is_late)
    return engine_over(executor, config, lookup_in(storage, card)), executor
