"""Memory that steps read all of: weights side by side on huge pages, caches whose pages are there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

CACHE_LINE = 64
HUGE_PAGE = 2 << 20
SLAB_BYTES = 64 << 20
"""Of weights that lie side by side. NumPy asks the system for huge pages where an array is that large, and of most
weights it is not: a processor walks through many small pages as it reads them."""


class Slabs:
    """Arrays that lie side by side in large ones; these are freed with the last array that lies in them."""

    def __init__(self, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._guard = threading.Lock()
        self._slab: Any = lambda: None  # a weak reference: whoever holds an array keeps its slab
        self._end = 0

    def empty(self, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """An array of a dtype that begins where a cache line does."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self._guard:
            slab = self._slab()
            start = 0 if slab is None else self._end + -(slab.ctypes.data + self._end) % CACHE_LINE
            if slab is None or start + size > len(slab):
                slab = np.empty(max(size, self._slab_bytes) + HUGE_PAGE, np.uint8)
                self._slab, start = weakref.ref(slab), -slab.ctypes.data % HUGE_PAGE
            self._end = start + size
        array: NDArray[Any] = slab[start : start + size].view(dtype).reshape(shape)
        return array


def from_a_line_on(count: int, dtype: Any) -> NDArray[Any]:
    """``[count]`` of a dtype, with anything in it, from a cache line on: loads of as much as a line then take one."""
    size = count * np.dtype(dtype).itemsize
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    array: NDArray[Any] = memory[start : start + size].view(dtype)
    return array


def present(num_bytes: int) -> NDArray[np.uint8]:
    """``uint8 [num_bytes]`` with anything in it, whose pages are there: no step waits for the system to make them."""
    memory = np.empty(num_bytes, np.uint8)
    memory[:: 4 << 10] = 0
    return memory


class Scratch:
    """Room for one call at a time, kept for the next ones: new memory would have to be made page by page."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)
        self._place = 0

    def take(self, *counts: int) -> list[int]:
        """Addresses of room for so many numbers of 32 bits each, from a cache line on; until the next call."""
        sizes = [-(-4 * count // CACHE_LINE) * CACHE_LINE for count in counts]
        if sum(sizes) + CACHE_LINE > self._room.nbytes:
            self._room = np.empty(sum(sizes) + CACHE_LINE, np.uint8)
            place: int = self._room.ctypes.data
            self._place = place + -place % CACHE_LINE
        return [self._place + first for first in accumulate(sizes[:-1], initial=0)]


class ThreadScratch(threading.local):
    """A `Scratch` of each thread."""

    def __init__(self) -> None:
        self.take = Scratch().take
