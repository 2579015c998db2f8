"""Ranks with GPUs that reach each other by NCCL: threads, emulated GPUs, and a stand-in for CuPy's binding of it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from support.engine.ranks import links_of
from support.gpu.cuda_shim import LIBRARIES, ShimPrograms
from support.gpu.emulated_gpu import EmulatedGpu, EmulatedOps, SerialPrograms
from support.gpu.host_ipc import HostGpu
from support.gpu.host_nccl import HostNccl, way
from support.waiting import PATIENCE_S

from headwise.kernels.cuda import all_reduce
from headwise.kernels.cuda.all_reduce import RankSums
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.launch import Grid, Variant
from headwise.kernels.cuda.programs import Defines
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.ops.base import Between, Cut
from headwise.runtime.ops.comm import Communicator, SingleRank
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.running_step import RunningStep
from headwise.runtime.worker.cuda_device import CudaDevice
from headwise.runtime.worker.shared_memory_comm import SharedMemoryComm
from headwise.runtime.worker.worker import ModelWorker
from headwise.transfer.cuda_sharing import CudaSharing


class Ranks:
    """A thread each, with a GPU and a stream of its own, and a host communicator: of all, or of each ``stage`` so many.

    gpus: that they have together
    """

    def __init__(self, nccl: HostNccl, size: int, gpus: int | None = None, stage: int | None = None) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        name, each = uuid.uuid4().hex, stage or size

        def start(rank: int) -> Communicator:
            nccl.thread.pci, nccl.thread.stream = {50: 0, 33: rank % (gpus or size), 34: 0}, 0x5000 + rank
            number, own = divmod(rank, each)
            if each == 1:
                return SingleRank()
            return SharedMemoryComm(f"{name}{number}", own, each, 1 << 16, timeout_s=PATIENCE_S, create=own == 0)

        self.comms = self.each(start)

    def tell(self, work: Callable[[int], Any]) -> list[Future[Any]]:
        return [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        return [future.result() for future in self.tell(work)]


class SerialLauncher(InterpreterLauncher):
    """The interpreter patches Triton while it runs: one rank at a time."""

    _launching = threading.Lock()

    def launch(self, variant: Variant, grid: Grid, arguments: Any) -> None:
        with self._launching:
            super().launch(variant, grid, arguments)


class RankPrograms(SerialPrograms):
    """A rank's: what waits for other ranks runs beside their launches, and as NCCL's, not where it is recorded."""

    def __init__(self, nccl: HostNccl, libraries: Path, apart: str) -> None:
        super().__init__(libraries)
        self._nccl, self._waiting = nccl, ShimPrograms(libraries, apart)

    def __call__(self, source: str, defines: Defines) -> Any:
        if source != all_reduce.SOURCE:
            return super().__call__(source, defines)
        program, nccl = self._waiting(source, defines), self._nccl

        class Enqueued:
            def kernel(self, name: str, threads: int) -> Callable[..., None]:
                kernel = program.kernel(name, threads)

                def launch(grid: Grid, arguments: Any) -> None:
                    nccl.log[int(arguments[9])].append((nccl.thread.way, name))
                    if nccl.thread.way != "recorded":
                        kernel(grid, arguments)

                return launch

        return Enqueued()


class RankGpu(EmulatedGpu):
    """One rank's: as `EmulatedGpu`, with `CudaDevice`'s choice of collectives and links, and graphs that are recorded
    first."""

    collectives, stage_links = CudaDevice.collectives, CudaDevice.stage_links
    _building = threading.Lock()

    def __init__(
        self, nccl: HostNccl, libraries: Path, config: EngineConfig, rank: int, gpu: HostGpu | None = None
    ) -> None:
        super().__init__(libraries, config.dtype_name, gpu=gpu)
        self._nccl, self._config = nccl, config
        self.ops.name, self.ops.capture = "cupy", self.record
        self.ops.capture_pieces = self.record_pieces
        programs = RankPrograms(nccl, libraries, f"rank{rank}")
        self.parts = replace(self.parts, launcher=SerialLauncher(sm=90, sms=1), programs=programs)

    def check(self, card: ModelCard, model_dir: Path) -> None:
        self.sums = RankSums(self._config.dtype_name, self._config.tp_size, card.config.hidden_size)
        with self._building:
            super().check(card, model_dir)

    def sharing(self) -> CudaSharing | None:
        with self._building:
            return super().sharing()

    def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        with way(self._nccl, "recorded"):
            work()

        def replay() -> Any:
            with way(self._nccl, "graph"):
                return work()

        return replay

    def record_pieces(self, work: Callable[[Cut], Any]) -> Callable[[Between], Any]:
        with way(self._nccl, "recorded"):
            work(lambda: None)
        replay = EmulatedOps.capture_pieces(self.ops, work)

        def launched(between: Between) -> Any:
            with way(self._nccl, "graph"):
                return replay(between)

        return launched

    def forget_to_record(self) -> None:
        """Fail in the middle of each recording."""

        def record_half(work: Callable[..., Any]) -> None:
            with way(self._nccl, "recorded"):
                work()
            raise MemoryError("out of memory")

        self.ops.capture = record_half
        self.ops.capture_pieces = lambda work: record_half(lambda: work(lambda: None))


@dataclass(frozen=True)
class _BegunStep:
    """The `RunningStep` of ranks that begin it each in its own time: the last one's."""

    ranks: Ranks
    steps: list[Future[RunningStep]]

    @property
    def is_done(self) -> bool:
        return all(step.done() and (step.exception() is not None or step.result().is_done) for step in self.steps)

    def result(self) -> StepResult:
        results = self.ranks.each(lambda rank: self.steps[rank].result().result())
        assert [result.error for result in results] == [None] * len(results)
        return replace(results[-1], rank=0)


class StagesByNccl:
    """A `Worker` that is the ranks of several stages, whose arenas begin as NaN.

    gpus: that they have together; None: one each
    spare_mib: that each has left for its blocks, where these are measured
    """

    exports = ()

    def __init__(
        self, nccl: HostNccl, config: EngineConfig, gpus: int | None = None, spare_mib: Sequence[int] = ()
    ) -> None:
        size, directory = config.ranks, Path(config.model)
        self._stage, self._returns_tokens = config.tp_size, config.returns_tokens
        self.ranks = Ranks(nccl, size, gpus, stage=config.tp_size)
        self._links = links_of(config.tp_size, config.pipeline_parallel_size)
        devices = [RankGpu(nccl, LIBRARIES, config, rank) for rank in range(size)]
        for device, mib in zip(devices, spare_mib, strict=False):
            device.spare_bytes = partial(int, mib << 20)

        def open_worker(rank: int) -> ModelWorker:
            return ModelWorker(config, directory, rank, self.ranks.comms[rank], devices[rank], link=self._links[rank])

        self.workers = self.ranks.each(open_worker)
        self.ranks.each(lambda rank: self.workers[rank].initialize_cache())
        for worker in self.workers:
            worker.served.runner.cache.arena.view(np.float32)[:] = np.nan

    @property
    def num_blocks(self) -> int:
        return min(worker.num_blocks for worker in self.workers)

    def begin(self, batch: BatchRequest) -> _BegunStep:
        return _BegunStep(self.ranks, self.ranks.tell(lambda rank: self._begin(rank, batch)))

    def _begin(self, rank: int, batch: BatchRequest) -> RunningStep:
        """On the rank's thread. Of the last stage a step is ended, too, where the first one waits for its tokens: its
        process looks for these by itself, and whoever calls this only once all ranks have begun the next step."""
        step = self.workers[rank].begin(batch)
        if self._returns_tokens and rank >= len(self.workers) - self._stage:
            step.result()
        return step

    def close(self) -> None:
        self.ranks.each(lambda rank: self.workers[rank].close())
        for link in self._links:
            link.close()
