"""Uploads a step's arrays to a GPU, all in one copy from pinned memory, which the host does not wait for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cupy
import cupyx
import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = 4
ALIGNMENT = 64
"""In elements of int32: every array begins at a multiple of 256 bytes, as if it had been allocated by itself."""

MOST_ARRAYS = 8
"""Most arrays of a call for which ``capacity`` is sure to be enough: a gap may follow each."""

SLOTS = 4
"""Pinned buffers, used in rotation. A buffer is written to again four steps later, when its copy is long done."""


class PinnedUpload:
    """The `StepUpload` of a GPU: copies int32 arrays to one buffer on the device.

    The copy is enqueued on the current stream, behind the kernels that read what was in the buffer before.

    capacity: in elements, see `TensorOps.step_upload`; the buffer is replaced by a larger one if it is not enough
    buffers:  gives a device array ``int32 [elements]``; CuPy's allocator by default
    """

    def __init__(self, capacity: int = 0, buffers: Callable[[int], Any] | None = None) -> None:
        self._buffers = buffers or (lambda size: cupy.empty(size, dtype=np.int32))
        self._device = self._buffers(capacity + MOST_ARRAYS * ALIGNMENT if capacity else 0)
        self._pinned: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)] * SLOTS
        self._copied = [cupy.cuda.Event(disable_timing=True) for _ in range(SLOTS)]
        self._addresses = [0] * SLOTS  # of the pinned buffers
        self._current = 0
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._starts = [0]  # of arrays of such shapes
        self._views: list[Any] = []
        self._pinned_views: list[list[NDArray[np.int32]]] = [[]] * SLOTS  # the same of each pinned buffer

    def __call__(self, *arrays: NDArray[np.int32]) -> list[Any]:
        """See `StepUpload`."""
        shapes = tuple([array.shape for array in arrays])
        if shapes != self._shapes:
            self._shapes, self._views, self._starts, self._pinned_views = shapes, [], [0], [[]] * SLOTS
            for array in arrays:
                self._starts.append(self._starts[-1] + -(-array.size // ALIGNMENT) * ALIGNMENT)
        starts = self._starts
        slot = self._slot(starts[-1])
        views = self._pinned_views[slot] = self._pinned_views[slot] or self._parts_of(self._pinned[slot])
        for view, array in zip(views, arrays, strict=True):
            view[...] = array
        stream, runtime = cupy.cuda.get_current_stream(), cupy.cuda.runtime
        target, source, num_bytes = self._device.data.ptr, self._addresses[slot], starts[-1] * ITEM_BYTES
        runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyHostToDevice, stream.ptr)
        self._copied[slot].record(stream)
        if not self._views:
            self._views = self._parts_of(self._device)
        return self._views

    def _parts_of(self, buffer: Any) -> list[Any]:
        """Where the arrays lie in it."""
        return [
            buffer[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(self._starts, self._shapes, strict=False)
        ]

    def _slot(self, size: int) -> int:
        """Which pinned buffer no copy reads from any more. It and the device's buffer then have room for ``size``
        elements.
        """
        self._current = (self._current + 1) % SLOTS
        self._copied[self._current].synchronize()
        if self._device.size < size:
            self._device, self._views = self._buffers(2 * size), []
        if self._pinned[self._current].size < size:
            self._pinned[self._current] = cupyx.empty_pinned(2 * size, dtype=np.int32)
            self._addresses[self._current] = self._pinned[self._current].ctypes.data
            self._pinned_views[self._current] = []
        return self._current
