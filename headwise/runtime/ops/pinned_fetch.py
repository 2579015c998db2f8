"""Brings arrays from a GPU into pinned memory, which the host does not wait for until it wants them."""

from __future__ import annotations

from typing import Any

import cupy
import cupyx
import numpy as np
from numpy.typing import NDArray

from headwise.transfer.gpu_failure import is_over, told_as_failure


class _Landing:
    """Pinned memory for one array, and the event behind its copy."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.host: NDArray[Any] = cupyx.empty_pinned(shape, dtype)
        self.address = self.host.ctypes.data
        self.copied = cupy.cuda.Event(disable_timing=True)


class PinnedFetches:
    """Makes the `Fetch`es of a GPU. Memory and event of one that was taken serve the next array of its shape: to make
    them takes longer than to use them, and a decode step fetches the same number of tokens as the last one."""

    def __init__(self) -> None:
        self._free: dict[tuple[tuple[int, ...], np.dtype[Any]], list[_Landing]] = {}

    def __call__(self, array: Any) -> PinnedFetch:
        """A copy on the current stream, behind what writes to ``array``, a C-contiguous CuPy array.

        The array's memory may be given up at once, where that is given to work on the same stream only.
        """
        free = self._free.setdefault((array.shape, array.dtype), [])
        landing = free.pop() if free else _Landing(array.shape, array.dtype)
        stream, runtime = cupy.cuda.get_current_stream(), cupy.cuda.runtime
        runtime.memcpyAsync(landing.address, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        landing.copied.record(stream)
        return PinnedFetch(landing, free)


class PinnedFetch:
    """The `Fetch` of one array. free: takes its place in pinned memory back, once the host has the array"""

    def __init__(self, landing: _Landing, free: list[_Landing]) -> None:
        self._landing: _Landing | None = landing
        self._free = free
        self._array: NDArray[Any]

    @property
    def is_done(self) -> bool:
        """See `Fetch.is_done`.

        Raises:
            GpuFailedError: the copy will never be done.
        """
        return self._landing is None or is_over(cupy.cuda.runtime, self._landing.copied)

    def get(self) -> NDArray[Any]:
        """See `Fetch.get`. Where the GPU has failed, what is in the host's memory is not read: it may be older.

        Raises:
            GpuFailedError: instead.
        """
        landing = self._landing
        if landing is not None:
            with told_as_failure(cupy.cuda.runtime):
                landing.copied.synchronize()
            self._array, self._landing = np.array(landing.host), None
            self._free.append(landing)
        return self._array
