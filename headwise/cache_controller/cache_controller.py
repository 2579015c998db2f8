"""The worker's view of one engine's cache: the arena and the block tables that steps refer to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.radix_tree import NOWHERE


class CacheController:
    """Owns one rank's memory. Holds no policy: it does what the batches of the engine say.

    arena:  ``uint8 [num_blocks * layout.block_bytes]``, on the device
    tables: ``int32 [max_rows, groups, max_blocks]``, a copy of the engine's
    """

    def __init__(self, layout: BlockLayout, arena: Any, *, groups: int, max_rows: int, max_blocks: int) -> None:
        self.layout = layout
        self.arena = arena
        self.tables: NDArray[np.int32] = np.full((max_rows, groups, max_blocks), NOWHERE, dtype=np.int32)

    def open_rows(self, rows: Iterable[int]) -> None:
        """Clear the tables of rows that change hands."""
        for row in rows:
            self.tables[row] = NOWHERE

    def apply(self, updates: NDArray[np.int32]) -> None:
        """Apply ``int32 [k, 4]`` (row, group, block index, block id); a later update wins."""
        row, group, index, block = updates.T
        self.tables[row, group, index] = block

    def block_tables(self, rows: NDArray[np.int32], max_tokens: int) -> NDArray[np.int32]:
        """``int32 [len(rows) * groups, columns]`` with the columns that ``max_tokens`` tokens reach into."""
        columns = -(-max_tokens // self.layout.block_size)
        tables = self.tables[rows, :, :columns]
        return tables.reshape(-1, columns)
