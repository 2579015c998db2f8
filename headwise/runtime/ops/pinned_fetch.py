"""Brings arrays from a GPU into pinned memory, which the host does not wait for until it wants them."""

from __future__ import annotations

from typing import Any

import cupy
import cupyx
import numpy as np
from numpy.typing import NDArray

from headwise.transfer.gpu_failure import is_over, told_as_failure


class PinnedFetch:
    """The `Fetch` of a GPU: a copy on the current stream, behind what writes to ``array``, a C-contiguous CuPy array.

    The array's memory may be given up at once, where that is given to work on the same stream only.
    """

    def __init__(self, array: Any) -> None:
        self._host: NDArray[Any] = cupyx.empty_pinned(array.shape, array.dtype)
        self._copied = cupy.cuda.Event(disable_timing=True)
        stream, runtime = cupy.cuda.get_current_stream(), cupy.cuda.runtime
        target = self._host.ctypes.data
        runtime.memcpyAsync(target, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        self._copied.record(stream)

    @property
    def is_done(self) -> bool:
        """See `Fetch.is_done`.

        Raises:
            GpuFailedError: the copy will never be done.
        """
        return is_over(cupy.cuda.runtime, self._copied)

    def get(self) -> NDArray[Any]:
        """See `Fetch.get`. Where the GPU has failed, what is in the host's memory is not read: it may be older.

        Raises:
            GpuFailedError: instead.
        """
        with told_as_failure(cupy.cuda.runtime):
            self._copied.synchronize()
        return np.array(self._host)  # the pinned memory goes back to its pool
