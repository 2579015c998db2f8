"""Tensor-parallel ranks of a model, each a real worker on a thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
from support.engine.dense_oracle import ThreadComm

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.running_step import DoneStep
from headwise.runtime.worker.worker import ModelWorker


class Ranks:
    """A `Worker` that is ``config.tp_size`` of them, without copies between tiers; their arenas begin as NaN."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        size = config.tp_size
        shared: list[Any] = [None] * size
        barrier = Barrier(size)
        self._threads = ThreadPoolExecutor(size)
        self.workers = [
            ModelWorker(config, directory, rank, ThreadComm(rank, size, shared, barrier)) for rank in range(size)
        ]
        self._on_all(ModelWorker.initialize_cache)
        for worker in self.workers:
            worker._cache.arena.view(np.float32)[:] = np.nan

    @property
    def num_blocks(self) -> int:
        return self.workers[0].num_blocks

    def begin(self, batch: BatchRequest) -> DoneStep:
        return DoneStep(self._on_all(lambda worker: worker.execute(batch))[0])

    def _on_all(self, call: Callable[[ModelWorker], Any]) -> list[Any]:
        return list(self._threads.map(call, self.workers, timeout=120))
