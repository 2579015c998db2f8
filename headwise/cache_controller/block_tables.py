"""A worker's block tables: the contract, and the ones in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.radix_tree import NOWHERE

Array = Any


@dataclass(frozen=True)
class TableShape:
    """Sizes of block tables.

    max_rows:   sequences that may be in a batch
    groups:     head groups; a sequence has a table for each
    max_blocks: columns of a table
    block_size: tokens per block
    """

    max_rows: int
    groups: int
    max_blocks: int
    block_size: int

    @property
    def cells(self) -> tuple[int, int, int]:
        """The shape as an array has it."""
        return self.max_rows, self.groups, self.max_blocks

    def columns(self, tokens: int) -> int:
        """Those that ``tokens`` tokens reach into."""
        return -(-tokens // self.block_size)


class BlockTables(Protocol):
    """``int32 [max_rows, groups, max_blocks]``, a copy of the engine's, where the device computes.

    At first no row names a block. Calls take effect in their order, and between the steps they come between.
    """

    shape: TableShape

    def open_rows(self, rows: Iterable[int]) -> None:
        """Clear the tables of rows that change hands."""

    def apply(self, updates: NDArray[np.int32]) -> None:
        """Apply ``[k, 4]`` (row, group, block index, block id); a later update wins."""

    def in_any_order(self, updates: NDArray[np.int32]) -> NDArray[np.int32]:
        """The same updates, for `enter`."""

    def enter(self, updates: Array) -> None:
        """`apply` updates that are where the tables are. Only enqueues, so it may be captured.

        updates: what `in_any_order` made of them; those of row `NOWHERE` are padding
        """

    def gather(self, rows: Array, seq_lens: Array, columns: int) -> Array:
        """``int32 [len(rows) * groups, columns]``, the block tables of a batch, as attention kernels take them.

        Of each sequence only the columns that its tokens reach into mean anything: kernels read no others.

        rows:     ``int32 [batch]``, on the device
        seq_lens: tokens of each, likewise; 0 for padding
        """


class HostBlockTables:
    """`BlockTables` in host memory. array: the tables"""

    def __init__(self, shape: TableShape) -> None:
        self.shape = shape
        self.array: NDArray[np.int32] = np.full(shape.cells, NOWHERE, dtype=np.int32)

    def open_rows(self, rows: Iterable[int]) -> None:
        """See `BlockTables.open_rows`."""
        for row in rows:
            self.array[row] = NOWHERE

    def apply(self, updates: NDArray[np.int32]) -> None:
        """See `BlockTables.apply`."""
        row, group, index, block = updates.T
        self.array[row, group, index] = block

    def in_any_order(self, updates: NDArray[np.int32]) -> NDArray[np.int32]:
        """See `BlockTables.in_any_order`: they are entered in order."""
        return updates

    def enter(self, updates: NDArray[np.int32]) -> None:
        """See `BlockTables.enter`."""
        self.apply(updates[updates[:, 0] != NOWHERE])

    def gather(self, rows: NDArray[np.int32], seq_lens: NDArray[np.int32], columns: int) -> NDArray[np.int32]:
        """See `BlockTables.gather`."""
        return self.array[rows, :, :columns].reshape(-1, columns)
