"""What running rows have given back, and will release together with the rest: where another request may resume."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.radix_tree import NOWHERE, Residency

Index = NDArray[Any]


class LeftBehind:
    """Per row, its recycled blocks of windows and checkpoints, as long as they hold what they did then.

    Of windows, and of checkpoints that are worth blocks, all are noted; of other checkpoints the latest.
    """

    def __init__(self, device: Residency) -> None:
        self._device = device
        # Group, column, block, generation of each.
        self._kept: dict[int, list[NDArray[np.int64]]] = {}
        self._latest: dict[int, NDArray[np.int64]] = {}

    def note(self, rows: Index, groups: Index, columns: Index, blocks: NDArray[np.int32]) -> None:
        """Rows have given back these ``[n]`` blocks of theirs."""
        for row, left in self._by_row(rows, groups, columns, blocks).items():
            self._kept.setdefault(row, []).append(left)

    def note_latest(self, rows: Index, groups: Index, columns: Index, blocks: NDArray[np.int32]) -> None:
        """The same of checkpoints that take the place of the ones before them."""
        self._latest |= self._by_row(rows, groups, columns, blocks)

    def take(self, row: int) -> tuple[Index, Index, NDArray[np.int32]]:
        """Group, column and block of what a row has left and is still there; it is forgotten here."""
        left = self._kept.pop(row, [])
        if row in self._latest:
            left = [*left, self._latest.pop(row)]
        if not left:
            return _NOTHING, _NOTHING, _NO_BLOCKS
        group, column, block, generation = np.concatenate(left, axis=1)
        blocks = block.astype(np.int32)
        same = (generation != NOWHERE) & (self._device.generations(blocks) == generation)
        return group[same], column[same], blocks[same]

    def _by_row(
        self, rows: Index, groups: Index, columns: Index, blocks: NDArray[np.int32]
    ) -> dict[int, NDArray[np.int64]]:
        left = np.stack([groups, columns, blocks, self._device.generations(blocks)])
        return {row: left[:, rows == row] for row in np.unique(rows).tolist()}


_NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)
_NO_BLOCKS: NDArray[np.int32] = np.empty(0, dtype=np.int32)
