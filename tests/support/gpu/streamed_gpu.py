"""An emulated GPU whose copies and tokens come by CUDA's streams and events: steps are computed at once, but what they
and copies give is known only when an event says so. One that fails on the way does so as a GPU does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu, SerialPrograms
from support.gpu.host_driver import HostDriver
from support.gpu.host_streams import HostCuda, HostEvent

from headwise.kernels.block_copy import BlockCopy
from headwise.kernels.cuda.block_copy import CudaBlockCopy
from headwise.runtime.config.engine_config import EngineConfig
from headwise.transfer.cuda_stream import CudaStream

FAILING_FETCH = 6
"""The step of an engine's life whose tokens a failing GPU does not bring, counted from the start."""


class StreamDriver(HostDriver):
    """`CopyDriver` on the current stream of a `HostCuda`."""

    def __init__(self, cuda: HostCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def record(self) -> HostEvent:
        event = HostEvent(self._cuda)
        event.record(self._cuda.get_current_stream())
        return event

    def _enqueue(self, work: Any) -> None:
        self._cuda.launch(work)


class _DeviceArray(np.ndarray):
    """NumPy's, that tells its address as CuPy's does."""

    @property
    def data(self) -> Any:
        return type("Pointer", (), {"ptr": self.ctypes.data})


class StreamedGpu(EmulatedGpu):
    """cuda: what CuPy gives, in this process; to be put in its place before"""

    def __init__(self, cuda: HostCuda, dtype: str, failing_fetch: int = 0) -> None:
        super().__init__(LIBRARIES, dtype)
        self._cuda, self._failing_fetch = cuda, failing_fetch
        self._fetched: list[NDArray[Any]] = []  # a device's memory is not freed under a copy
        self.ops.fetch = self._fetch
        self._fetches = import_module("headwise.runtime.ops.pinned_fetch").PinnedFetches()

    def _fetch(self, array: NDArray[Any]) -> Any:
        self._fetched.append(array.copy())
        if len(self._fetched) == self._failing_fetch:
            self._cuda.launch(self._cuda.faults.fault)  # as a kernel of this step does
        return self._fetches(self._fetched[-1].view(_DeviceArray))

    def block_copy(self) -> BlockCopy:
        driver = StreamDriver(self._cuda)
        programs = driver.enqueued(SerialPrograms(LIBRARIES))
        return CudaBlockCopy(driver, programs, crossover_bytes=1 << 30)

    def copy_stream(self, name: str) -> CudaStream:
        return CudaStream(device=0)


def open_failing(config: EngineConfig, threads: int) -> StreamedGpu:
    """As `open_device`, in a process of its own: it fails while it serves."""
    return _open(config, FAILING_FETCH)


def open_streamed(config: EngineConfig, threads: int) -> StreamedGpu:
    """The same without a failure."""
    return _open(config, 0)


def _open(config: EngineConfig, failing_fetch: int) -> StreamedGpu:
    cuda = HostCuda()
    cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
    cupy.cuda, cupyx.empty_pinned = cuda, np.empty
    sys.modules.update(cupy=cupy, cupyx=cupyx)
    return StreamedGpu(cuda, config.dtype_name, failing_fetch)
