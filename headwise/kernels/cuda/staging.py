"""Tables for kernels, brought to the device without holding up the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.copy_driver import CopyDriver, CopyEvent

ALIGNMENT = 16


class StagingRing:
    """``num_bytes`` of pinned host memory, and as much of the device's, that tables pass through.

        | free | table, in flight | table, in flight | free    |
                ^ oldest                             ^ head

    A table's bytes are in use until the event that is recorded behind the kernels that read it, launched or not. Only a
    ring full of tables in flight makes the host wait. Used by one thread at a time, whose stream may be another for
    each table. Where the GPU has failed, bytes that it may still read are never used again: `staged` raises.
    """

    def __init__(self, driver: CopyDriver, num_bytes: int) -> None:
        self._driver = driver
        self._memory = driver.allocate(num_bytes)
        self._head = 0
        self._in_flight: deque[tuple[int, int, CopyEvent]] = deque()

    @property
    def num_bytes(self) -> int:
        return len(self._memory.host)

    @contextmanager
    def staged(self, table: NDArray[np.int64]) -> Iterator[int]:
        """Enqueue the copy of ``table``; where on the device it will be, for kernels that are launched within.

        Raises:
            Exception: the driver's, of a copy, or of what was enqueued before.
        """
        begin, end = self._room_for(table.nbytes)
        try:
            host, device = self._memory.host[begin : begin + table.nbytes], self._memory.device + begin
            host[:] = table.reshape(-1).view(np.uint8)
            self._driver.copy(device, host.ctypes.data, table.nbytes)
            yield device
        finally:  # a launch that failed leaves the copy under way
            self._keep(begin, end)

    def _room_for(self, num_bytes: int) -> tuple[int, int]:
        """The bytes ``[begin, end)``, which nothing on the device uses."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        assert size <= self.num_bytes, f"a table of {size} bytes in a ring of {self.num_bytes}"
        begin = self._head if self._head + size <= self.num_bytes else 0
        while self._in_flight and self._in_flight[0][2].done:  # few are left to look through
            self._in_flight.popleft()
        while any(first < begin + size and begin < last for first, last, _ in self._in_flight):
            self._in_flight[0][2].synchronize()
            self._in_flight.popleft()  # not before: of what cannot be waited for, the bytes stay taken
        self._head = begin + size
        return begin, self._head

    def _keep(self, begin: int, end: int) -> None:
        """Have ``[begin, end)`` in use until the current end of the current stream; for ever, if that has none."""
        try:
            event = self._driver.record()
        except Exception as error:
            self._in_flight.append((begin, end, _Never(error)))
            raise
        self._in_flight.append((begin, end, event))


class _Never:
    """The `CopyEvent` of a stream that failed before it could be recorded."""

    done = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def synchronize(self) -> None:
        raise self._error
