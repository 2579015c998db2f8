"""A GPU's memory that other processes map by CUDA IPC, on host memory: CuPy's runtime calls over files in memory.

A handle names a process and its file, as the driver's names a process and its allocation. As with the driver, a mapping
outlives the process that it came from, a process cannot open its own handles, and what was freed is not opened.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.transfer.cuda_sharing import CudaSharing

_HANDLE = struct.Struct("<qqq32s8x")
OFFSET = 512
"""Bytes in front of an array in its allocation: CuPy's pool cuts arrays out of larger ones."""


class CudaError(Exception):
    """`cupy.cuda.runtime.CUDARuntimeError`."""


class HostGpu:
    """A GPU of this process. may_open_own: two workers of a test are one process

    opened: addresses of what is mapped of others
    """

    memcpyDefault = 4  # noqa: N815
    memcpyHostToDevice = 1  # noqa: N815

    def __init__(self, may_open_own: bool = False) -> None:
        self._may_open_own = may_open_own
        self._allocations: dict[int, tuple[int, str, mmap.mmap]] = {}  # descriptor, name, memory, by address
        self.opened: dict[int, mmap.mmap] = {}

    # ---- memory ----

    def empty(self, num_bytes: int) -> NDArray[np.uint8]:
        """A flat array within an allocation of its own, which `free` frees."""
        name = secrets.token_hex(16)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, OFFSET + num_bytes)
        memory = mmap.mmap(fd, OFFSET + num_bytes)
        whole = np.frombuffer(memory, dtype=np.uint8)
        self._allocations[whole.ctypes.data] = fd, name, memory
        return whole[OFFSET:]

    def upload(self, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        array = self.empty(content.size)
        array[:] = content
        return array

    def free(self, array: NDArray[np.uint8]) -> None:
        os.close(self._allocations.pop(array.ctypes.data - OFFSET)[0])

    def allocation_of(self, address: int) -> int:
        """See `headwise.transfer.cuda_sharing.allocation_of`."""
        for base, (_, _, memory) in self._allocations.items():
            if base <= address < base + len(memory):
                return base
        raise OSError("the driver knows no allocation of the device arena (CUresult 1)")

    # ---- cupy.cuda.runtime ----

    def ipcGetMemHandle(self, address: int) -> bytes:  # noqa: N802
        fd, name, memory = self._allocations[address]
        return _HANDLE.pack(os.getpid(), fd, len(memory), name.encode())

    def ipcOpenMemHandle(self, handle: bytes) -> int:  # noqa: N802
        pid, fd, size, name = _HANDLE.unpack(handle)
        if pid == os.getpid() and not self._may_open_own:
            raise CudaError("cudaErrorDeviceUninitialized: invalid device context")
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            is_it = os.readlink(f"/proc/self/fd/{opened}").startswith(f"/memfd:{name.decode()} ")
            memory = mmap.mmap(opened, size, flags=mmap.MAP_SHARED)
            os.close(opened)
        except (OSError, ValueError) as error:
            raise CudaError(f"cudaErrorInvalidValue: invalid argument ({error})") from None
        if not is_it:
            raise CudaError("cudaErrorInvalidValue: invalid argument")
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        self.opened[address] = memory
        return int(address)

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        if address not in self.opened:
            raise CudaError("cudaErrorInvalidValue: invalid argument")
        del self.opened[address]

    def memcpyAsync(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:  # noqa: N802
        assert kind == self.memcpyDefault
        ctypes.memmove(target, source, num_bytes)


class _Stream:
    ptr = 0x5001

    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def host_sharing(gpu: HostGpu) -> CudaSharing:
    """The real one, over this GPU in place of CuPy's."""
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        runtime=gpu, Device=_device, Stream=_Stream, get_current_stream=lambda: _Stream(non_blocking=True)
    )
    installed: Any = sys.modules.get("cupy")
    sys.modules["cupy"] = cupy
    try:
        sharing = CudaSharing(0, gpu.allocation_of)
        sharing.gpu = -1  # libraries that know of GPUs read its memory as the host's
        return sharing
    finally:
        if installed is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = installed


def _device(number: int) -> AbstractContextManager[None]:
    return nullcontext()
