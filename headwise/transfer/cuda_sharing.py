"""CUDA IPC by CuPy: memory of this process' GPU for others, and theirs for it. Imports CuPy when one is made."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.copy_driver import Addresses, CupyCopyDriver
from headwise.kernels.cuda.launch import address_of
from headwise.transfer.connectors.base import Runs
from headwise.transfer.connectors.cuda_ipc import SharedPart


def allocation_of(address: int, library: str = "libcuda.so.1") -> int:
    """The first byte of the allocation in which a byte of the GPU lies: CuPy and Paddle cut arrays out of larger ones.

    Raises `OSError`: it lies in none that the driver knows.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    function = ctypes.CDLL(library).cuMemGetAddressRange_v2
    code = function(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if code:
        raise OSError(f"the driver knows no allocation of the device arena (CUresult {code})")
    return int(base.value)


class CudaSharing:
    """`DeviceSharing` of GPU ``device``, with a stream of its own for what is read.

    The handle of an allocation opens all of it: so the arena's neighbours there, if it has any, can be read, too.
    """

    def __init__(self, device: int, allocation_of: Callable[[int], int] = allocation_of) -> None:
        import cupy

        self._cuda, self.gpu = cupy.cuda, device
        self._allocation_of = allocation_of
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._copies = CupyCopyDriver()

    @property
    def _device(self) -> AbstractContextManager[Any]:
        """Makes the GPU that of this thread: several use it, and one such object is for one of them."""
        device: AbstractContextManager[Any] = self._cuda.Device(self.gpu)
        return device

    def share(self, arena: Any) -> SharedPart:
        """See `DeviceSharing.share`."""
        address = address_of(arena)
        with self._device:
            base = self._allocation_of(address)
            return SharedPart(bytes(self._cuda.runtime.ipcGetMemHandle(base)), address - base)

    def open(self, handle: bytes) -> int:
        """See `DeviceSharing.open`. Also of a GPU that this process does not see; peer access comes with it."""
        with self._device:
            return int(self._cuda.runtime.ipcOpenMemHandle(handle))

    def close(self, address: int) -> None:
        """See `DeviceSharing.close`."""
        with self._device:
            self._cuda.runtime.ipcCloseMemHandle(address)

    def read(self, address: int, runs: Runs, arena: NDArray[np.uint8]) -> None:
        """See `DeviceSharing.read`."""
        runs = runs[runs[:, 2] > 0]
        if not len(runs):
            return
        places = (runs + np.array([address, arena.ctypes.data, 0])).astype(np.uint64)
        with self._device:
            try:
                with self._stream:
                    self._enqueue(*places.T)
            finally:
                self._stream.synchronize()

    def _enqueue(self, sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        if not self._copies.copy_batch(targets, sources, sizes):
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self._copies.copy(target, source, size)
