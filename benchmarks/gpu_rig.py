"""What `gpu.py` measures on: a GPU. `gpu_emulated.py` has the other, which is for executing every line without one.

Nothing but these two classes differs between a real run and an emulated one, besides the sizes (`gpu_sizes.py`).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gpu_report import Recorder
from gpu_sizes import FULL, Sizes
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.base import AttentionKernels
from headwise.kernels.block_copy import BlockCopy
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.launch import address_of, driver_cuda
from headwise.kernels.cuda.programs import CudaPrograms, Programs
from headwise.runtime.config import EngineConfig
from headwise.runtime.device import Device
from headwise.transfer.base import Stream
from headwise.transfer.host_memory import HostArena

Array = Any
Mark = Any
Work = Callable[[], object]

FLUSH_BYTES = 1 << 30
"""Written between timed runs: more than any cache holds, and for longer than the host takes to enqueue a run."""


class Rig(Protocol):
    """work: a directory for compiled kernels and random checkpoints
    pins: whether host arenas are to be pinned
    """

    name: str
    sizes: Sizes
    pins: bool
    work: Path
    kernels: AttentionKernels
    programs: Programs
    target: Target

    def about(self) -> dict[str, str]:
        """Card and versions."""

    def current(self) -> AbstractContextManager[Any]:
        """Work of this thread goes to the compute stream; torch's, too, if torch was imported before."""

    def device(self, config: EngineConfig) -> Device:
        """A device of its own for an engine."""

    def block_copy(self) -> BlockCopy: ...

    def copy_stream(self, name: str) -> Stream: ...

    def host_arena(self, num_bytes: int) -> HostArena: ...

    def upload(self, array: NDArray[Any]) -> Array: ...

    def download(self, array: Array) -> NDArray[Any]: ...

    def empty(self, num_bytes: int) -> Array:
        """``uint8 [num_bytes]``."""

    def free_bytes(self) -> int:
        """Device memory that can still be had."""

    def copy(self, target: Array, source: Array) -> None:
        """Enqueue a plain copy of all of ``source`` on the current stream."""

    def copy_side_by_side(self, *pairs: tuple[Array, Array]) -> None:
        """Plain copies of (target, source) pairs, each on a stream of its own; returns when all are done."""

    def flush(self) -> None:
        """Enqueue a write of more memory than the caches hold."""

    def mark(self) -> Mark:
        """This point of the current stream."""

    def wait(self, mark: Mark) -> None:
        """Let the host wait until the stream has passed a point."""

    def seconds_between(self, first: Mark, last: Mark) -> float:
        """Time between two points that the stream has passed."""

    def synchronize(self) -> None:
        """Wait for everything."""


class CudaRig:
    """A GPU, by way of `CudaDevice`."""

    name = "GPU"
    sizes = FULL
    pins = True

    def __init__(self, work: Path) -> None:
        from headwise.runtime.cuda_device import CudaDevice

        config = EngineConfig(device="cuda", cache_dir=str(work))
        self._device = CudaDevice(config)  # says what is missing, before anything else is imported
        import cupy

        self._cupy, self._cuda, self.work = cupy, cupy.cuda, work
        self.kernels: AttentionKernels = self._device.kernels
        with self._device.current():
            self.programs: Programs = CudaPrograms(config.cache_path / "kernels")
            self.target = Target(int(cupy.cuda.Device().compute_capability), driver_cuda())
            self._sides = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def about(self) -> dict[str, str]:
        """See `Rig.about`."""
        runtime = self._cuda.runtime
        name, total = runtime.getDeviceProperties(0)["name"], runtime.memGetInfo()[1]
        return {
            "card": f"{name.decode() if isinstance(name, bytes) else name}, {total / 2**30:.0f} GiB",
            "driver": _driver(),
            "cuda": _dotted(runtime.runtimeGetVersion()),
            "driver_cuda": _dotted(runtime.driverGetVersion()),
            **versions("cupy", "triton", "torch", "numpy", "flashinfer"),
        }

    @contextmanager
    def current(self) -> Iterator[None]:
        """See `Rig.current`."""
        with self._device.current():
            torch = sys.modules.get("torch")
            if torch is None:
                yield
                return
            with torch.cuda.stream(torch.cuda.ExternalStream(self._cuda.get_current_stream().ptr)):
                yield

    def device(self, config: EngineConfig) -> Device:
        """See `Rig.device`."""
        from headwise.runtime.cuda_device import CudaDevice

        return CudaDevice(config)

    def block_copy(self) -> BlockCopy:
        return self._device.block_copy()

    def copy_stream(self, name: str) -> Stream:
        return self._device.copy_stream(name)

    def host_arena(self, num_bytes: int) -> HostArena:
        return self._device.host_arena(num_bytes)

    def upload(self, array: NDArray[Any]) -> Array:
        target = self.empty(array.nbytes)
        target.set(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return target.view(array.dtype).reshape(array.shape)

    def download(self, array: Array) -> NDArray[Any]:
        return self._cupy.asnumpy(array.reshape(-1).view(np.uint8)).view(array.dtype).reshape(array.shape)

    def empty(self, num_bytes: int) -> Array:
        return self._cupy.empty(num_bytes, dtype=np.uint8)

    def free_bytes(self) -> int:
        """See `Rig.free_bytes`."""
        pool = self._cupy.get_default_memory_pool()
        pool.free_all_blocks()
        if (torch := sys.modules.get("torch")) is not None:
            torch.cuda.empty_cache()
        return int(self._cuda.runtime.memGetInfo()[0])

    def copy(self, target: Array, source: Array) -> None:
        self._copy(target, source, self._cuda.get_current_stream())

    def copy_side_by_side(self, *pairs: tuple[Array, Array]) -> None:
        """See `Rig.copy_side_by_side`."""
        for stream, pair in zip(self._sides, pairs, strict=False):
            self._copy(*pair, stream)
        for stream in self._sides:
            stream.synchronize()

    def _copy(self, target: Array, source: Array, stream: Any) -> None:
        runtime = self._cuda.runtime
        runtime.memcpyAsync(address_of(target), address_of(source), source.nbytes, runtime.memcpyDefault, stream.ptr)

    @cached_property
    def _flushed(self) -> Array:
        return self.empty(FLUSH_BYTES)

    def flush(self) -> None:
        stream = self._cuda.get_current_stream()
        self._cuda.runtime.memsetAsync(address_of(self._flushed), 0, FLUSH_BYTES, stream.ptr)

    def mark(self) -> Mark:
        event = self._cuda.Event()
        event.record(self._cuda.get_current_stream())
        return event

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def seconds_between(self, first: Mark, last: Mark) -> float:
        return float(self._cuda.get_elapsed_time(first, last)) / 1e3

    def synchronize(self) -> None:
        self._cuda.runtime.deviceSynchronize()


def imported(name: str) -> Any | None:
    """A module if it can be had: torch and FlashInfer are compared with where they are."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def versions(*names: str) -> dict[str, str]:
    """Of modules, where they can be imported."""
    return {name: str(module.__version__) for name in names if (module := imported(name)) is not None}


def _driver() -> str:
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown: no nvidia-smi"
    return said[0] if said else "unknown"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


# ---- on either ----


@dataclass
class Bench:
    """What a section is handed.

    rows:    takes what it finds
    options: those of the command line
    """

    rig: Rig
    rows: Recorder
    options: argparse.Namespace

    @property
    def sizes(self) -> Sizes:
        return self.rig.sizes

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a plain copy within the device's memory."""
        rig, half = self.rig, self.sizes.copied_bytes
        source, target = fill(rig, rig.empty(half)), rig.empty(half)
        return 2 * half / self.seconds({"copy": lambda: rig.copy(target, source)})["copy"]

    def seconds(self, works: Mapping[str, Work], rounds: int | None = None) -> dict[str, float]:
        """Median time of each work on the current stream. They take turns, and find cold caches."""
        rig, times = self.rig, {name: [] for name in works}
        for work in works.values():
            work()
        for turn in range((rounds or self.sizes.rounds) + 1):
            marks = {}
            for name, work in works.items():
                rig.flush()
                begin = rig.mark()
                work()
                marks[name] = begin, rig.mark()
            rig.synchronize()
            for name, pair in marks.items() if turn else ():  # the first turn warms up
                times[name].append(rig.seconds_between(*pair))
        return {name: statistics.median(taken) for name, taken in times.items()}


RANDOM_BYTES = 32 << 20


def fill(rig: Rig, array: Array, dtype: str = "bfloat16", seed: int = 0) -> Array:
    """Fill flat uint8 ``array`` with normally distributed numbers of ``dtype``, repeated after `RANDOM_BYTES`."""
    size = min(RANDOM_BYTES, array.nbytes)
    drawn = np.random.default_rng(seed).standard_normal(size // numpy_dtype(dtype).itemsize, dtype=np.float32)
    chunk = rig.upload(drawn.astype(numpy_dtype(dtype)).view(np.uint8))
    for at in range(0, array.nbytes, size):
        part = array[at : at + size]
        rig.copy(part, chunk[: part.nbytes])
    rig.synchronize()  # before the chunk is freed
    return array


def random(rig: Rig, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Normally distributed numbers on the device."""
    count = int(np.prod(shape)) * numpy_dtype(dtype).itemsize
    return fill(rig, rig.empty(count), dtype, seed).view(numpy_dtype(dtype)).reshape(shape)
