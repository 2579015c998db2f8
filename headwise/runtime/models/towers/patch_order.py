"""The order in which Qwen's towers and ERNIE's take an image's patches: square by square, maybe window by window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.towers.dense_attention import Windows


@dataclass(frozen=True, eq=False)
class PatchOrder:
    """Patches of a square, which become one token, follow each other; so do squares of a window.

    rows, columns: of each patch, ``int64 [T]``
    squares:       the number of each square, counted row by row, ``int64 [T / merge ** 2]``
    windows:       as of `dense_attention`: those of one shape follow each other; empty where there are none
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    squares: NDArray[np.int64]
    windows: Windows

    @classmethod
    def of(cls, rows: int, columns: int, merge: int, window: int) -> PatchOrder:
        """Of ``rows * columns`` patches, multiples of ``merge``, the patches of a square's edge.

        window: squares of a window's edge; what is left at the right and below are smaller ones. 0: there are none
        """
        high, wide = rows // merge, columns // merge
        row, column = np.divmod(np.arange(high * wide), wide)
        windows: list[tuple[int, int]] = []
        if window:
            whole_rows, whole_columns = high // window, wide // window
            for down, height in ((whole_rows, window), (1, high % window)):
                for across, width in ((whole_columns, window), (1, wide % window)):
                    if down * across * height * width:
                        windows.append((down * across, height * width * merge**2))
            # Whole windows, those cut at the right, those cut below, and the one in the corner.
            by_row, by_column = row // window, column // window
            order = np.lexsort((column, row, by_column, by_row, by_column == whole_columns, by_row == whole_rows))
            row, column = row[order], column[order]
        within_row, within_column = np.divmod(np.arange(merge**2), merge)
        return cls(
            (row[:, None] * merge + within_row).reshape(-1),
            (column[:, None] * merge + within_column).reshape(-1),
            row * wide + column,
            windows,
        )

    def cut(self, pixels: NDArray[np.float32], patch: int) -> NDArray[np.float32]:
        """The patches of ``pixels [3, height, width]``, each ``patch`` pixels square: ``[T, 3 * patch ** 2]``."""
        rows, columns = (edge // patch for edge in pixels.shape[1:])
        grid = pixels.reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
        return np.ascontiguousarray(grid[self.rows, self.columns].reshape(len(self.rows), -1))

    def angles(self, head_dim: int, theta: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, ``float32 [T, 1, D / 2]``: half of the frequencies turn by the row, half by the column."""
        half = head_dim // 2
        frequencies = (1.0 / theta ** (np.arange(0, half, 2) / half)).astype(np.float32)
        turned = [each.astype(np.float32)[:, None] * frequencies for each in (self.rows, self.columns)]
        whole = np.concatenate(turned, axis=1)
        return np.cos(whole)[:, None], np.sin(whole)[:, None]
