"""What the block copy asks of a GPU, as thin as can be: a contract that tests fulfil in host memory, and CuPy's side.

Sources: CUDA Driver API 12.8 and 13.0, "Memory Management" (`cuMemcpyBatchAsync`) and "Driver Entry Point Access"
(`cuGetProcAddress`); CUDA Runtime API, "Unified Addressing".
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]

log = logging.getLogger(__name__)


class CopyEvent(Protocol):
    """A point on a stream."""

    @property
    def done(self) -> bool:
        """Whether the stream has passed it. Never waits."""

    def synchronize(self) -> None:
        """Let the host wait until the stream is through with what was enqueued before this point."""


@dataclass(frozen=True)
class Staging:
    """Pinned host memory, and the address of as much device memory; both go with this object."""

    host: NDArray[np.uint8]
    device: int
    owners: tuple[Any, ...] = ()


class CopyDriver(Protocol):
    """Copies by address. All that is enqueued goes to the calling thread's current stream."""

    def device_address(self, address: int, num_bytes: int) -> int | None:
        """Where kernels find the memory at ``address``; None if they cannot reach all of it: it is not pinned."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue one copy. With host memory that is not pinned, the host may wait for it."""

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: NDArray[np.uint64]) -> bool:
        """Enqueue many copies at once, in no order; False, and nothing is done, where that cannot be had."""

    def allocate(self, num_bytes: int) -> Staging:
        """Memory that no stream is using."""

    def record(self) -> CopyEvent:
        """The current end of the current stream."""

    def seconds(self, work: Callable[[], None]) -> float:
        """Enqueue ``work``, wait for it, and return how long the GPU took."""


_STREAM_ORDER = 1
"""``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``. Any other lets a store read blocks before they are written."""

_OVERLAP_WITH_COMPUTE = 1
"""``CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE``: leave the multiprocessors to the forward pass."""

_BATCH_SINCE = 12080
"""The CUDA version that brought ``cuMemcpyBatchAsync``. Drivers serve the entry points of each version they support
as that version had them, so asking for this one gives one signature on all of them (CUDA 13 dropped ``failIdx``)."""


_UNREGISTERED = 0
"""``cudaMemoryTypeUnregistered``: host memory that CUDA knows nothing of."""


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``. The two locations are hints for managed memory alone."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CupyCopyDriver:
    """`CopyDriver` on CuPy's current device and stream."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._batch = BatchCopy()

    def device_address(self, address: int, num_bytes: int) -> int | None:
        """See `CopyDriver.device_address`."""
        first, last = (self._cuda.runtime.pointerGetAttributes(at) for at in (address, address + num_bytes - 1))
        # Where a GPU can reach any memory by page faults, memory that is not pinned has a device pointer, too.
        pinned = _UNREGISTERED not in (first.type, last.type) and first.devicePointer
        return (
            int(first.devicePointer) if pinned and last.devicePointer - first.devicePointer == num_bytes - 1 else None
        )

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """See `CopyDriver.copy`."""
        runtime = self._cuda.runtime
        runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDefault, self._cuda.get_current_stream().ptr)

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: NDArray[np.uint64]) -> bool:
        """See `CopyDriver.copy_batch`: not on the legacy default stream, and only with drivers of CUDA 12.8 on."""
        stream = self._cuda.get_current_stream().ptr
        return bool(stream) and self._batch(targets, sources, sizes, stream)

    def allocate(self, num_bytes: int) -> Staging:
        """See `CopyDriver.allocate`. Not from CuPy's pools, whose memory a stream may still be using."""
        device = self._cuda.Memory(num_bytes)
        host = self._cuda.PinnedMemoryPointer(self._cuda.PinnedMemory(num_bytes), 0)
        return Staging(np.frombuffer(host, dtype=np.uint8, count=num_bytes), int(device.ptr), (device, host))

    def record(self) -> CopyEvent:
        """See `CopyDriver.record`."""
        event: Any = self._cuda.Event(block=True, disable_timing=True)
        event.record(self._cuda.get_current_stream())
        return event  # type: ignore[no-any-return]

    def seconds(self, work: Callable[[], None]) -> float:
        """See `CopyDriver.seconds`."""
        before, after, stream = self._cuda.Event(), self._cuda.Event(), self._cuda.get_current_stream()
        before.record(stream)
        work()
        after.record(stream)
        after.synchronize()
        return float(self._cuda.get_elapsed_time(before, after)) / 1e3


class BatchCopy:
    """``cuMemcpyBatchAsync`` as CUDA 12.8 has it, where the driver has it."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._function = _entry_point(library)

    def __call__(self, targets: Addresses, sources: Addresses, sizes: NDArray[np.uint64], stream: int) -> bool:
        """Enqueue copies on ``stream``, not the legacy default one. False where the driver cannot, or will not: it is
        not asked again then, and any copy may be made once more."""
        if self._function is None:
            return False
        attributes = _Attributes(source_access_order=_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t()
        arrays = [np.ascontiguousarray(array, dtype=np.uint64) for array in (targets, sources, sizes)]
        code = self._function(
            *(array.ctypes.data for array in arrays), len(sizes), ctypes.addressof(attributes),
            ctypes.addressof(first), 1, ctypes.addressof(failed), stream,
        )  # fmt: skip
        if code:
            self._function = None
            log.warning(
                "cuMemcpyBatchAsync of %d pieces failed with CUresult %d at piece %d; from now on each piece is copied "
                "by a call of its own", len(sizes), code, failed.value,
            )  # fmt: skip
        return not code


def _entry_point(library: str) -> Any | None:
    try:
        get_address = ctypes.CDLL(library).cuGetProcAddress_v2
    except (OSError, AttributeError):  # no driver, or one older than CUDA 12
        return None
    function, status = ctypes.c_void_p(), ctypes.c_int()
    code = get_address(
        b"cuMemcpyBatchAsync", ctypes.byref(function), ctypes.c_int(_BATCH_SINCE), ctypes.c_uint64(0),
        ctypes.byref(status),
    )  # fmt: skip
    if code or not function.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
    return prototype(function.value)
