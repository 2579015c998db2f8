"""What `gpu_checks.py` measures on: a GPU. `emulated.py` has the other, which is for executing every line without one.

Nothing but these two classes differs between a real run and an emulated one, besides the sizes (`sizes.py`).
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gpu.random_bytes import fill
from gpu.sizes import FULL, Sizes
from numpy.typing import NDArray

from headwise.kernels.base import AttentionKernels
from headwise.kernels.cuda.block_copy import CudaBlockCopy
from headwise.kernels.cuda.cubins import CubinCache, Target
from headwise.kernels.cuda.launch import CubinFile, Kernel, Variant, address_of, driver_cuda
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.programs import CudaPrograms, Programs
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.worker.device import Device, open_device
from headwise.transfer.base import Stream
from headwise.transfer.host_memory import HostArena

Array = Any
Mark = Any
Work = Callable[[], object]

FLUSH_BYTES = 1 << 30
"""Read before what is timed: more than any cache holds. It leaves no line that must be written back meanwhile."""

READ_SOURCE, READ_KERNEL = Path(__file__).with_name("read.cu"), "read_all"
READ_THREADS, READ_BLOCKS_PER_SM = 512, 4


class Rig(Protocol):
    """work: a directory for compiled kernels and random checkpoints
    seed: of all random inputs
    pins: whether host arenas are to be pinned
    """

    name: str
    sizes: Sizes
    pins: bool
    work: Path
    seed: int
    kernels: AttentionKernels
    parts: GpuParts
    programs: Programs
    target: Target

    def about(self) -> dict[str, str]:
        """Card and versions."""

    def current(self) -> AbstractContextManager[Any]:
        """Work of this thread goes to the compute stream; torch's, too, if torch was imported before."""

    def device(self, config: EngineConfig) -> Device:
        """A device of its own for an engine."""

    @property
    def open_device(self) -> Callable[[EngineConfig, int], Device]:
        """A function of a module that opens one in a worker's process."""

    def block_copy(self) -> CudaBlockCopy: ...

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

    def read(self, array: Array) -> None:
        """Enqueue a kernel that reads all of ``array``, whole vectors of 16 bytes, and writes nothing."""

    def flush(self) -> None:
        """Enqueue a read of more memory than the caches hold."""

    def mark(self) -> Mark:
        """This point of the current stream."""

    def wait(self, mark: Mark) -> None:
        """Let the host wait until the stream has passed a point."""

    def has_passed(self, mark: Mark) -> bool:
        """Whether the stream has passed a point. Never waits."""

    def seconds_between(self, first: Mark, last: Mark) -> float:
        """Time between two points that the stream has passed."""

    def synchronize(self) -> None:
        """Wait for everything."""

    def is_broken(self) -> bool:
        """Whether the GPU can be used no more by this process."""

    def peak_bandwidth(self) -> float | None:
        """Bytes per second by the memory's clock and bus, that no program gets; None where the driver tells neither."""

    def clocks(self) -> str:
        """Clocks, power and temperature while the GPU reads memory."""

    def machine_code(self, variant: Variant) -> CubinFile | None:
        """What is in the kernels' folder of ``work`` of a kernel; None: nothing."""


class CudaRig:
    """A GPU, by way of `CudaDevice`."""

    name = "GPU"
    sizes = FULL
    pins = True

    def __init__(self, work: Path, seed: int) -> None:
        from headwise.runtime.worker.cuda_device import CudaDevice

        config = EngineConfig(device="cuda", cache_dir=str(work))
        self._device = CudaDevice(config)  # says what is missing, before anything else is imported
        import cupy

        self._cupy, self._cuda, self.work, self.seed = cupy, cupy.cuda, work, seed
        self.kernels: AttentionKernels = self._device.kernels
        self.parts = self._device.parts
        with self._device.current():
            self.programs: Programs = CudaPrograms(config.cache_path / "kernels")
            self.target = Target(int(cupy.cuda.Device().compute_capability), driver_cuda())
            self._sides = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            self._blocks = READ_BLOCKS_PER_SM * int(cupy.cuda.Device().attributes["MultiProcessorCount"])

    def about(self) -> dict[str, str]:
        """See `Rig.about`."""
        runtime = self._cuda.runtime
        name, total = runtime.getDeviceProperties(0)["name"], runtime.memGetInfo()[1]
        return {
            "card": f"{name.decode() if isinstance(name, bytes) else name}, {total / 2**30:.0f} GiB",
            "driver": _asked("driver_version"),
            "cuda": _dotted(runtime.runtimeGetVersion()),
            "driver_cuda": _dotted(runtime.driverGetVersion()),
            "cupy": str(self._cupy.__version__),
            **versions("triton", "torch", "numpy", "flashinfer-python"),
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
        from headwise.runtime.worker.cuda_device import CudaDevice

        return CudaDevice(config)

    @property
    def open_device(self) -> Callable[[EngineConfig, int], Device]:
        """See `Rig.open_device`."""
        return open_device

    def block_copy(self) -> CudaBlockCopy:
        return self._device.block_copy()

    def copy_stream(self, name: str) -> Stream:
        return self._device.copy_stream(name)

    def host_arena(self, num_bytes: int) -> HostArena:
        return self._device.host_arena(num_bytes)

    def machine_code(self, variant: Variant) -> CubinFile | None:
        """See `Rig.machine_code`."""
        return CubinCache(self.work / "kernels", self.target).find(variant)

    def upload(self, array: NDArray[Any]) -> Array:
        target = self.empty(array.nbytes)
        target.set(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return target.view(array.dtype).reshape(array.shape)

    def download(self, array: Array) -> NDArray[Any]:
        found: NDArray[Any] = self._cupy.asnumpy(array.reshape(-1).view(np.uint8))
        shaped: NDArray[Any] = found.view(array.dtype).reshape(array.shape)
        return shaped

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

    def read(self, array: Array) -> None:
        """See `Rig.read`."""
        arguments = address_of(array), array.nbytes // 16, address_of(self._sink)
        self._reader((self._blocks, 1, 1), arguments)

    @cached_property
    def _reader(self) -> Kernel:
        return self.programs(str(READ_SOURCE), {}).kernel(READ_KERNEL, READ_THREADS)

    @cached_property
    def _sink(self) -> Array:
        return self.empty(16)

    @cached_property
    def _flushed(self) -> Array:
        return fill(self, self.empty(FLUSH_BYTES))

    def flush(self) -> None:
        self.read(self._flushed)

    def mark(self) -> Mark:
        event = self._cuda.Event()
        event.record(self._cuda.get_current_stream())
        return event

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def has_passed(self, mark: Mark) -> bool:
        return bool(mark.done)

    def seconds_between(self, first: Mark, last: Mark) -> float:
        return float(self._cuda.get_elapsed_time(first, last)) / 1e3

    def synchronize(self) -> None:
        self._cuda.runtime.deviceSynchronize()

    def is_broken(self) -> bool:
        """See `Rig.is_broken`."""
        try:
            self.synchronize()
        except RuntimeError:  # CuPy's are such: an illegal address, say, which all calls return from then on
            return True
        return False

    def peak_bandwidth(self) -> float | None:
        """See `Rig.peak_bandwidth`: two transfers a clock."""
        told = self._cuda.Device().attributes
        clock_khz, bus_bits = (int(told.get(name, 0)) for name in ("MemoryClockRate", "GlobalMemoryBusWidth"))
        return 2 * clock_khz * 1e3 * bus_bits / 8 or None

    def clocks(self) -> str:
        """See `Rig.clocks`."""
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(_asked, "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
            while not asked.done():
                self.flush()
        self.synchronize()
        return asked.result()


def imported(name: str) -> Any | None:
    """A module if it can be had: torch and FlashInfer are compared with where they are."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # not installed, or without a library that it needs
        return None


def versions(*names: str) -> dict[str, str]:
    """Of distributions that are installed. Nothing is imported: torch takes ten seconds."""
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _asked(*fields: str) -> str:
    """What nvidia-smi says of the first card."""
    query = ("nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi does not tell"
    return said or "unknown"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
