"""A GPU for `gpu_checks.py --emulate`: kernels run in Triton's interpreter and a host shim, on NumPy arrays.

Every line of the benchmark is executed, at sizes that a CPU gets through; the numbers mean nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from gpu.rig import READ_KERNEL, READ_SOURCE, READ_THREADS, Array, Mark, versions
from gpu.sizes import TINY
from numpy.typing import NDArray

from headwise.kernels.cuda.block_copy import CudaBlockCopy
from headwise.kernels.cuda.cubins import CubinCache, Target
from headwise.kernels.cuda.launch import CubinFile, Grid, Kernel, Program, Variant, address_of
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.worker.device import Device
from headwise.transfer.base import Stream
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.host_memory import HostArena

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.gpu.cuda_shim import LIBRARIES, ShimPrograms
from support.gpu.emulated_gpu import EmulatedGpu, open_emulated
from support.gpu.host_driver import HostDriver
from support.gpu.host_ipc import HostGpu as HostGpu
from support.gpu.host_ipc import host_sharing as host_sharing


class AtOnceDriver(HostDriver):
    """A `HostDriver` whose stream runs what is enqueued at once."""

    def _enqueue(self, work: Callable[[], Any]) -> None:
        work()


class OneAtATime:
    """`Programs` whose kernels wait for each other: the shim's threads are the process's."""

    def __init__(self, programs: Programs) -> None:
        self._programs, self._lock = programs, threading.Lock()

    def __call__(self, source: str, defines: Defines) -> Program:
        return _Locked(self._programs(source, defines), self._lock)


class _Locked:
    def __init__(self, program: Program, lock: threading.Lock) -> None:
        self._program, self._lock = program, lock

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        kernel = self._program.kernel(name, threads, shared_bytes)

        def launch(grid: Grid, arguments: Sequence[Argument]) -> None:
            with self._lock:
                kernel(grid, arguments)

        return launch


class _Gpu(EmulatedGpu):
    def __init__(
        self, libraries: Path, dtype: str, programs: Programs, weights_dtype: str = "auto", own_products: bool = False
    ) -> None:
        super().__init__(libraries, dtype, weights_dtype, own_products)
        self._programs = programs

    def block_copy(self) -> CudaBlockCopy:
        return CudaBlockCopy(AtOnceDriver(), self._programs, crossover_bytes=1 << 10)


class EmulatedRig:
    """`Rig` in host memory."""

    name = "emulated GPU"
    sizes = TINY
    pins = False
    target = Target(90, 12)

    def __init__(self, work: Path, seed: int) -> None:
        self.work, self.seed = work, seed
        self._libraries = LIBRARIES
        self.programs: Programs = OneAtATime(ShimPrograms())
        self._gpu = _Gpu(self._libraries, "bfloat16", self.programs)
        self.kernels = self._gpu.kernels
        self.parts = self._gpu.parts

    def about(self) -> dict[str, str]:
        return {"card": "emulated, numbers mean nothing", **versions("triton", "torch", "numpy")}

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def device(self, config: EngineConfig) -> Device:
        return _Gpu(self._libraries, config.dtype_name, self.programs, config.weights_dtype, config.overlap_kernels)

    @property
    def open_device(self) -> Callable[[EngineConfig, int], Device]:
        opening: Callable[[EngineConfig, int], Device] = open_emulated
        return opening

    def block_copy(self) -> CudaBlockCopy:
        return self._gpu.block_copy()

    def copy_stream(self, name: str) -> Stream:
        return CpuStream(name)

    def host_arena(self, num_bytes: int, is_shared: bool = False) -> HostArena:
        return HostArena(num_bytes, is_shared=is_shared)

    def machine_code(self, variant: Variant) -> CubinFile | None:
        return CubinCache(self.work / "kernels", self.target).find(variant)

    def upload(self, array: NDArray[Any]) -> Array:
        return np.array(array)

    def download(self, array: Array) -> NDArray[Any]:
        return np.array(array)

    def empty(self, num_bytes: int) -> Array:
        return np.full(num_bytes, 0xFF, np.uint8)

    def free_bytes(self) -> int:
        return 1 << 40

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def copy_side_by_side(self, *pairs: tuple[Array, Array]) -> None:
        for target, source in pairs:
            target[...] = source

    def read(self, array: Array) -> None:
        sink = np.empty(4, np.uint32)
        arguments = address_of(array), array.nbytes // 16, address_of(sink)
        self.programs(str(READ_SOURCE), {}).kernel(READ_KERNEL, READ_THREADS)((1, 1, 1), arguments)

    def flush(self) -> None:
        pass

    def mark(self) -> Mark:
        return time.perf_counter()

    def wait(self, mark: Mark) -> None:
        pass

    def has_passed(self, mark: Mark) -> bool:
        return False

    def seconds_between(self, first: Mark, last: Mark) -> float:
        return max(float(last - first), 1e-9)

    def synchronize(self) -> None:
        pass

    def is_broken(self) -> bool:
        return False

    def peak_bandwidth(self) -> float | None:
        return 1e12

    def clocks(self) -> str:
        return "none"
