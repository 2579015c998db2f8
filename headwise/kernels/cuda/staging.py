"""Tables for kernels, brought to the device without holding up the host."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.copy_driver import CopyDriver, CopyEvent

ALIGNMENT = 16


class StagingRing:
    """``num_bytes`` of pinned host memory, and as much of the device's, that tables pass through.

        | free | table, in flight | table, in flight | free    |
                ^ oldest                             ^ head

    A table's bytes are in use until the event that `release` records behind the kernels that read it. Only a ring full
    of tables in flight makes the host wait. Used by one thread at a time, whose stream may be another for each table.
    """

    def __init__(self, driver: CopyDriver, num_bytes: int) -> None:
        self._driver = driver
        self._memory = driver.allocate(num_bytes)
        self._head = 0
        self._in_flight: deque[tuple[int, int, CopyEvent]] = deque()

    @property
    def num_bytes(self) -> int:
        return len(self._memory.host)

    def stage(self, table: NDArray[np.int64]) -> int:
        """Enqueue the copy of ``table``, and return where on the device it will be. Then launch, then `release`."""
        size = -(-table.nbytes // ALIGNMENT) * ALIGNMENT
        assert size <= self.num_bytes, f"a table of {size} bytes in a ring of {self.num_bytes}"
        begin = self._head if self._head + size <= self.num_bytes else 0
        while any(first < begin + size and begin < last for first, last, _ in self._in_flight):
            self._in_flight.popleft()[2].synchronize()
        host, device = self._memory.host[begin : begin + table.nbytes], self._memory.device + begin
        host[:] = table.reshape(-1).view(np.uint8)
        self._driver.copy(device, host.ctypes.data, table.nbytes)
        self._begin, self._head = begin, begin + size
        return device

    def release(self) -> None:
        """All kernels that read the table staged last are enqueued on the current stream."""
        self._in_flight.append((self._begin, self._head, self._driver.record()))
