"""The parts of a worker that tests and simulations replace."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.runtime.loader.resolve import resolve_weights
from headwise.runtime.models.base import Model
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.weights import PreparedWeights
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.comm import Collectives
from headwise.runtime.protocol.weights import WeightsToLoad
from headwise.runtime.worker.kv_offload import KVOffload
from headwise.runtime.worker.model_loading import load_model
from headwise.runtime.worker.model_source import ModelSource, source_of


class LoadModel(Protocol):
    """See `load_model`."""

    def __call__(
        self,
        card: ModelCard,
        config: EngineConfig,
        directory: Path,
        ops: TensorOps,
        collectives: Collectives,
        shard: Shard,
        *,
        prepared: PreparedWeights,
    ) -> Model: ...


@dataclass(frozen=True)
class WorkerParts:
    """What a worker is made with.

    clock:   in seconds, to measure steps
    collect: has the garbage collector look for what is gone but for what holds each other
    """

    read_card: Callable[[EngineConfig, Path], ModelCard] = read_model_card
    load_model: LoadModel = load_model
    open_copies: Callable[..., KVOffload] = KVOffload
    find_weights: Callable[[str, Path], Path] = resolve_weights
    clock: Callable[[], float] = time.perf_counter
    collect: Callable[[], Any] = gc.collect

    def source_of(self, weights: WeightsToLoad, config: EngineConfig, card: ModelCard) -> ModelSource:
        """See `source_of`."""
        return source_of(weights, config, card, self.find_weights, self.read_card)
