"""The worker's view of one engine's cache: the arena and the block tables that steps refer to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.cache_controller.block_tables import BlockTables
from headwise.cache_controller.layout import BlockLayout


@dataclass(frozen=True)
class CacheController:
    """One rank's memory, on the device. Holds no policy: what is where, the batches of the engine say.

    arena:  ``uint8 [num_blocks * layout.block_bytes]``
    tables: a copy of the engine's
    """

    layout: BlockLayout
    arena: Any
    tables: BlockTables
