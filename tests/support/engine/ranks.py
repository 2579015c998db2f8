"""Ranks of a model, of one or several stages of a pipeline, each a real worker on a thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
from support.engine.dense_oracle import ThreadComm
from support.waiting import PATIENCE_S

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.ops.comm import Communicator, SingleRank
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.copies import MergedReports
from headwise.runtime.protocol.executor import exports_of_all
from headwise.runtime.protocol.running_step import DoneStep
from headwise.runtime.worker.device import Device
from headwise.runtime.worker.network_link import NetworkLink
from headwise.runtime.worker.worker import ModelWorker
from headwise.transfer.connectors.select import PeerAccess


class Ranks:
    """A `Worker` that is ``config.ranks`` of them; their arenas begin as NaN.

    peers:  how they reach the host caches of others; None: not at all
    device: makes each one's; as configured if None
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        peers: PeerAccess | None = None,
        device: Callable[[], Device] | None = None,
    ) -> None:
        size, stages = config.ranks, config.pipeline_parallel_size
        comms = [comm for _ in range(stages) for comm in _stage(config.tp_size)]
        self._links = links_of(config.tp_size, stages)
        self._threads = ThreadPoolExecutor(size)
        self._sampling = size - config.tp_size
        try:
            self.workers = [
                ModelWorker(config, directory, rank, comm, device() if device else None, peers=peers, link=link)
                for rank, (comm, link) in enumerate(zip(comms, self._links or [None] * size, strict=True))
            ]
        except BaseException:
            self._close_links()
            raise
        self._reports = MergedReports(size)
        self._on_all(ModelWorker.initialize_cache)
        for worker in self.workers:
            worker.served.runner.cache.arena.view(np.float32)[:] = np.nan

    @property
    def num_blocks(self) -> int:
        return self.workers[0].num_blocks

    def begin(self, batch: BatchRequest) -> DoneStep:
        results = self._on_all(lambda worker: worker.execute(batch))
        copies = self._reports.merge([result.copies for result in results])
        return DoneStep(replace(results[self._sampling], rank=0, copies=copies))

    def close(self) -> None:
        self._on_all(ModelWorker.close)
        self._close_links()

    def _close_links(self) -> None:
        for link in self._links:
            link.close()

    def _on_all(self, call: Callable[[ModelWorker], Any]) -> list[Any]:
        return list(self._threads.map(call, self.workers, timeout=120))


def _stage(size: int) -> list[Communicator]:
    if size == 1:
        return [SingleRank()]
    shared: list[Any] = [None] * size
    barrier = Barrier(size)
    return [ThreadComm(rank, size, shared, barrier) for rank in range(size)]


def links_of(size: int, stages: int) -> list[NetworkLink]:
    """Of the ranks of several stages, in a ring; none for one stage."""
    if stages == 1:
        return []
    links = [NetworkLink(PATIENCE_S) for _ in range(size * stages)]
    for rank, link in enumerate(links):
        link.listen("tcp://127.0.0.1:*", None)
        links[rank - size].connect(link.endpoint, None)
    return links


class RanksExecutor(LocalExecutor):
    """Of `Ranks`, whose host caches others can read."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._ranks = ranks

    @property
    def exports(self) -> tuple[tuple[bytes, ...], ...]:
        return exports_of_all([worker.exports for worker in self._ranks.workers])
