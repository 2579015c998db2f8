"""Buffers that other processes of the same user, on the same machine, read by mapping them: nothing is sent."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.transfer.host_memory import MappedArena, SharedArena, create_shared, map_shared


@dataclass(frozen=True)
class Located:
    """Where an array lies: from byte ``start`` of a buffer on."""

    arena: SharedArena
    start: int


class SharedBuffers:
    """Those of this process. A buffer goes when no array of it is left, but stays where it is mapped. Safe to use from
    several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []  # by their addresses
        self._gone: deque[_Buffer] = deque()  # the garbage collector may free one while the lock is held

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """``[num_bytes]``; private memory where the system has no other."""
        arena = create_shared(max(1, num_bytes)) if num_bytes else None
        if arena is None:
            return np.empty(num_bytes, np.uint8)
        memory = mmap.mmap(arena.fd, num_bytes, flags=mmap.MAP_SHARED)
        array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        buffer = _Buffer(int(array.ctypes.data), num_bytes, arena)
        with self._lock:
            self._purge()
            insort(self._buffers, buffer, key=_address)
        weakref.finalize(memory, _free, buffer, self._gone)
        return array

    def find(self, array: NDArray[Any]) -> Located | None:
        """Where a contiguous array lies; None: in no buffer."""
        address = int(array.ctypes.data)
        with self._lock:
            self._purge()
            at = bisect_right(self._buffers, address, key=_address) - 1
            buffer = self._buffers[at] if at >= 0 else None
        if buffer is None or not array.flags.c_contiguous or address + array.nbytes > buffer.address + buffer.num_bytes:
            return None
        return Located(buffer.arena, address - buffer.address)

    def __len__(self) -> int:
        with self._lock:
            self._purge()
            return len(self._buffers)

    def _purge(self) -> None:
        while self._gone:
            self._buffers.remove(self._gone.popleft())


@dataclass(frozen=True)
class _Buffer:
    address: int
    num_bytes: int
    arena: SharedArena


_address = attrgetter("address")


def _free(buffer: _Buffer, gone: deque[_Buffer]) -> None:
    os.close(buffer.arena.fd)
    gone.append(buffer)


class MappedBuffers:
    """Those of other processes, mapped when they are first read, until their owners have let go of them."""

    def __init__(self) -> None:
        self._mapped: dict[str, MappedArena] = {}  # by name

    def array(self, arena: SharedArena, num_bytes: int) -> NDArray[np.uint8]:
        """``[num_bytes]`` or more, read-only. Raises `OSError` where there is nothing of so many bytes to map."""
        found = self._mapped.get(arena.name)
        if found is None:
            found = self._mapped[arena.name] = map_shared(arena, num_bytes)
        if found.array.size < num_bytes:
            raise OSError(f"process {arena.pid} shares {found.array.size} bytes, not {num_bytes}")
        return found.array

    def sweep(self) -> None:
        """Let go of those whose owners have: their memory is free once no array of them is left."""
        for name in [name for name, mapped in self._mapped.items() if not mapped.is_shared]:
            del self._mapped[name]

    def __len__(self) -> int:
        return len(self._mapped)
