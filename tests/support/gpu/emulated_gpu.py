"""A GPU on a CPU: its kernels run in Triton's interpreter and a host shim, on NumPy arrays, at a ten-thousandth of the
speed. All other code of the GPU path is the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.gpu.cuda_shim import LIBRARIES, ShimPrograms
from support.gpu.host_cublas import HostCublas, aligned
from support.gpu.host_driver import HostDriver
from support.gpu.host_ipc import HostGpu, host_sharing
from support.late_fetch import LateFetch

from headwise.cache_controller.block_tables import TableShape
from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.block_copy import BlockCopy
from headwise.kernels.cuda.block_copy import CudaBlockCopy
from headwise.kernels.cuda.block_tables import CudaBlockTables
from headwise.kernels.cuda.cublas import Cublas
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.kernels import CudaKernels
from headwise.kernels.cuda.launch import Grid, Kernel, Program
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.cuda.step_tokens import CudaStepTokens
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.ops.base import Between, Cut, KernelArray, StepUpload
from headwise.runtime.ops.comm import Collectives, Communicator, host_collectives
from headwise.runtime.ops.gpu_ops import GpuOps
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.stage_links import HostLink, LinkedStage, StageLinks, host_links, place_for
from headwise.runtime.worker.device_block_tables import DeviceBlockTables
from headwise.runtime.worker.device_sampler import DeviceSampler
from headwise.runtime.worker.last_sampled import DeviceLastSampled
from headwise.transfer.base import Stream
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.cuda_sharing import CudaSharing
from headwise.transfer.host_memory import HostArena

STREAM = 0x5000
NO_BLOCK = 0x7F000000
LARGE_BYTES = 1 << 20


class EmulatedOps(GpuOps):
    """On NumPy arrays. Does what NumPy does not need: keeps memory of its own, and steps' arrays at fixed places in it,
    and graphs, which do again what was recorded. As with CuPy, nothing of that may come from the host or go there."""

    name, products = "emulated", "NumPy"
    give_back_memory = NumpyOps.give_back_memory

    def __init__(self, dtype: str, programs: Programs, weights_dtype: str = "auto", own_products: bool = False) -> None:
        launcher = InterpreterLauncher(sm=90, sms=1)
        super().__init__(np, numpy_dtype(dtype), programs, launcher, weights_dtype, 64, own_products)
        self._cublas = Cublas(aligned, HostCublas(), lambda: STREAM)
        self.is_recorded = False
        self._fixed: list[FixedUpload] = []
        self.allocate: Callable[[int], NDArray[np.uint8]] | None = None

    def empty_bytes(self, num_bytes: int) -> NDArray[Any]:
        if self.allocate is None or num_bytes < LARGE_BYTES:
            return super().empty_bytes(num_bytes)
        return self.allocate(num_bytes)

    def matmul(self, x: NDArray[Any], weight: NDArray[Any]) -> NDArray[Any]:
        out = np.empty((x.shape[0], weight.shape[1]), self.dtype)
        assert self._cublas.product(x, weight, out), "CuPy's own product cannot be captured"
        return out

    def multiply_wide(self, x: NDArray[Any], weight: NDArray[Any], out: NDArray[Any]) -> None:
        assert self._cublas.product(x, weight, out)

    def multiply_heads(self, x: NDArray[Any], weights: NDArray[Any], out: NDArray[Any]) -> None:
        self._cublas.products_of_heads(x, weights, out)

    def empty_like(self, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        return poisoned_array(array.shape if shape is None else shape, array.dtype)

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        if any(fixed.has(array) for fixed in self._fixed):
            return array
        assert not self.is_recorded, "the current stream is capturing, so H2D transfers are disallowed"
        return array.copy()

    def host(self, array: NDArray[Any]) -> NDArray[Any]:
        assert not self.is_recorded, "the current stream is capturing, so D2H transfers are disallowed"
        return array.copy()

    def fetch(self, array: NDArray[Any]) -> LateFetch:
        return LateFetch(self.host(array))

    def numpy(self, tensor: NDArray[Any]) -> NDArray[Any]:
        return self.host(self._wide(tensor))

    def step_upload(self, capacity: int = 0) -> StepUpload:
        fixed = FixedUpload(capacity)
        self._fixed.append(fixed)

        def upload(*arrays: NDArray[np.int32]) -> list[NDArray[np.int32]]:
            assert not self.is_recorded, "the current stream is capturing, so H2D transfers are disallowed"
            return fixed(*arrays)

        return upload

    def capture(self, work: Callable[[], Sequence[KernelArray]]) -> Callable[[], Sequence[KernelArray]]:
        return lambda: self._again(work)

    def capture_pieces(
        self, work: Callable[[Cut], Sequence[KernelArray]]
    ) -> Callable[[Between], Sequence[KernelArray]]:
        def replay(between: Between) -> Sequence[KernelArray]:
            numbers = count()

            def cut() -> None:
                self.is_recorded = False
                if not between(next(numbers)):
                    raise _NoMorePieces
                self.is_recorded = True

            try:
                return self._again(lambda: work(cut))
            except _NoMorePieces:
                return ()

        return replay

    def _again(self, work: Callable[[], Sequence[KernelArray]]) -> Sequence[KernelArray]:
        self.is_recorded = True
        try:
            return work()
        finally:
            self.is_recorded = False

    def borrowed(self, array: NDArray[Any]) -> NDArray[Any]:
        return array


class _NoMorePieces(Exception):
    """Ends work that is not wanted any more."""


class FixedUpload:
    """A `StepUpload` whose arrays all lie in one buffer, which moves when it has to grow."""

    def __init__(self, capacity: int = 0) -> None:
        self._buffer: NDArray[np.int32] = np.empty(capacity, np.int32)

    def __call__(self, *arrays: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        size = sum(array.size for array in arrays)
        if size > len(self._buffer):
            self._buffer = np.empty(size, np.int32)
        self._buffer[:] = np.iinfo(np.int32).min
        parts = np.split(self._buffer[:size], np.cumsum([array.size for array in arrays])[:-1])
        views = [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]
        for view, array in zip(views, arrays, strict=True):
            view[...] = array
        return views

    def has(self, array: NDArray[Any]) -> bool:
        """Whether ``array`` lies in the buffer."""
        return np.may_share_memory(array, self._buffer)


class EmulatedGpu:
    """`Device` with what a GPU computes, in ``dtype``.

    libraries:    where the shim builds its own
    own_products: see `GpuOps`
    gpu:          whose memory other processes can read, arenas and all that is as large
    """

    name = "emulated GPU"
    products_per_s = 0.0

    def __init__(
        self,
        libraries: Path,
        dtype: str,
        weights_dtype: str = "auto",
        own_products: bool = False,
        gpu: HostGpu | None = None,
    ) -> None:
        self._dtype, self._libraries, self._gpu = dtype, libraries, gpu
        programs = SerialPrograms(libraries)
        self._tables = PoisonedTables(programs, threads=64)
        self._step_tokens = CudaStepTokens(programs, threads=64)
        self.ops = EmulatedOps(dtype, programs, weights_dtype, own_products)
        if gpu is not None:
            self.ops.allocate = gpu.empty
        self.sampler = DeviceSampler(self.ops, programs, numpy_dtype(dtype), threads=64)
        launcher = InterpreterLauncher(sm=90, sms=1)
        self.parts = GpuParts(launcher, programs, poisoned, poisoned_array, self.ops.multiply_heads)
        self.kernels: Any = CudaKernels(self.parts)

    def check(self, card: ModelCard, model_dir: Path) -> None:
        self.kernels = attention_of(card.config).gpu_kernels(self.parts, card.layouts, card.plan.tp_size, self._dtype)

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def collectives(self, comm: Communicator) -> Collectives:
        return host_collectives(self.ops, comm)

    def stage_links(self, link: HostLink, stage: LinkedStage) -> StageLinks:
        return host_links(self.ops, link, stage, place_for(self.ops, stage))

    def spare_bytes(self) -> int:
        return 2 << 20

    def block_tables(self, shape: TableShape) -> DeviceBlockTables:
        return DeviceBlockTables(self.ops, self._tables, shape)

    def last_sampled(self, max_rows: int) -> DeviceLastSampled:
        return DeviceLastSampled(self.ops, self._step_tokens, max_rows)

    def block_copy(self) -> BlockCopy:
        return FinishedCopy(self._libraries)

    def copy_stream(self, name: str) -> Stream:
        return CpuStream(name)

    def host_arena(self, num_bytes: int, is_shared: bool = False) -> HostArena:
        return HostArena(num_bytes, is_shared=is_shared)

    def sharing(self) -> CudaSharing | None:
        return None if self._gpu is None else host_sharing(self._gpu)


def open_emulated(config: EngineConfig, threads: int) -> EmulatedGpu:
    """As `open_device`: the emulated GPU of a configuration, in whatever process it is called."""
    return EmulatedGpu(LIBRARIES, config.dtype_name, config.weights_dtype, config.overlap_kernels)


class PoisonedTables(CudaBlockTables):
    """What no sequence reaches names a block far out of the arena's memory."""

    def gather(
        self,
        tables: NDArray[np.int32],
        shape: TableShape,
        rows: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        out: NDArray[np.int32],
    ) -> None:
        out[:] = NO_BLOCK
        super().gather(tables, shape, rows, seq_lens, out)


class FinishedCopy:
    """The block copy of a GPU that returns when the copies are done: the streams here are threads."""

    name = "emulated"
    piece_bytes = CudaBlockCopy.piece_bytes

    def __init__(self, libraries: Path) -> None:
        self._driver, self._lock = HostDriver(), threading.Lock()
        programs = self._driver.enqueued(SerialPrograms(libraries))
        self._copy = CudaBlockCopy(self._driver, programs, crossover_bytes=1 << 30)  # the kernel copies all it can

    def __call__(
        self, source: Any, target: Any, pairs: NDArray[np.int32], ranges: NDArray[np.int64], block_bytes: int
    ) -> None:
        with self._lock:
            self._copy(source, target, pairs, ranges, block_bytes)
            self._driver.finish()


class SerialPrograms(ShimPrograms):
    """Those of the shim, whose fibers are the process's: copies, on threads of their own, wait for the forward pass."""

    def __call__(self, source: str, defines: Defines) -> SerialProgram:
        return SerialProgram(super().__call__(source, defines))


class SerialProgram:
    """Launched one at a time in the process."""

    _launching = threading.Lock()

    def __init__(self, program: Program) -> None:
        self._program = program

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        kernel = self._program.kernel(name, threads, shared_bytes)

        def launch(grid: Grid, arguments: Sequence[Argument]) -> None:
            with self._launching:
                kernel(grid, arguments)

        return launch


def poisoned_array(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array in such memory, which begins where a GPU's would."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = poisoned(size + 16)
    start = -memory.ctypes.data % 16
    return memory[start : start + size].view(dtype).reshape(shape)


def poisoned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory in which every float is NaN."""
    return np.full(num_bytes, 0xFF, dtype=np.uint8)
