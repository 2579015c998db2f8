"""Block tables where the device reads them: only what changes travels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_tables import TableShape
from headwise.runtime.ops.base import KernelArray, TensorOps

if TYPE_CHECKING:
    from headwise.kernels.cuda.block_tables import CudaBlockTables


class DeviceBlockTables:
    """`BlockTables` in the memory of a GPU.

    All calls enqueue on the compute stream, as steps do. So a change waits for the steps in flight that read what was
    there before, the next step waits for the change, and the host for neither.
    """

    def __init__(self, ops: TensorOps, kernel: CudaBlockTables, shape: TableShape) -> None:
        self.shape = shape
        self._ops, self._kernel = ops, kernel
        self._upload = ops.step_upload()
        cells = int(np.prod(shape.cells, dtype=np.int64))
        self._tables = ops.empty_bytes(4 * cells).view(np.int32)
        # By cell, what was written there last; of use for the cells of one call only. The system gives memory to the
        # pages that were ever written.
        self._latest = np.empty(cells, dtype=np.int32)
        self.open_rows(range(shape.max_rows))

    def open_rows(self, rows: Iterable[int]) -> None:
        """See `BlockTables.open_rows`."""
        opened = np.fromiter(rows, dtype=np.int32)
        if len(opened):
            (on_device,) = self._upload(opened)
            self._kernel.clear(self._tables, self.shape, on_device)

    def apply(self, updates: NDArray[np.int32]) -> None:
        """See `BlockTables.apply`."""
        if len(updates):
            (on_device,) = self._upload(self.in_any_order(updates))
            self.enter(on_device)

    def enter(self, updates: KernelArray) -> None:
        """See `BlockTables.enter`."""
        self._kernel.apply(self._tables, self.shape, updates)

    def in_any_order(self, updates: NDArray[np.int32]) -> NDArray[np.int32]:
        """The updates, each with the block of the last one of its cell: threads write in no order.

        Raises:
            ValueError: one is of a cell that there is not; on the device it would be some other memory.
        """
        cells = np.ravel_multi_index((updates[:, 0], updates[:, 1], updates[:, 2]), self.shape.cells)
        self._latest[cells] = updates[:, 3]  # in order
        final = updates.copy()
        final[:, 3] = self._latest[cells]
        return final

    def gather(self, rows: KernelArray, seq_lens: KernelArray, columns: int) -> KernelArray:
        """See `BlockTables.gather`. Only enqueues, so it may be captured; what it returns is the caller's."""
        out = self._ops.empty_bytes(4 * len(rows) * self.shape.groups * columns).view(np.int32).reshape(-1, columns)
        self._kernel.gather(self._tables, self.shape, rows, seq_lens, out)
        return out
