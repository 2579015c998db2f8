"""Learned positions of a grid, stretched over an image of other rows and columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_A = -0.75
"""Of the cubic convolution (Keys 1981): torch's."""


def stretched(grid: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """``float32 [rows, columns, N]`` of ``grid [height, width, N]``: bicubic, as torch's ``interpolate`` without
    aligned corners, and so without smoothing where it shrinks. A grid of that size is left as it is."""
    height, width, _ = grid.shape
    return _mixed(grid, _cubic_shares(rows, height), _cubic_shares(columns, width))


def spanned(grid: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """The same, bilinear and from corner to corner: an image's corners have the grid's."""
    height, width, _ = grid.shape
    return _mixed(grid, _linear_shares(rows, height), _linear_shares(columns, width))


def _mixed(
    grid: NDArray[np.float32], by_row: NDArray[np.float32], by_column: NDArray[np.float32]
) -> NDArray[np.float32]:
    """``[rows, columns, N]`` of ``grid [height, width, N]``, ``[rows, height]`` and ``[columns, width]``."""
    down = np.tensordot(by_row, grid, axes=1)  # [rows, width, N]
    return np.ascontiguousarray(np.matmul(by_column, down), np.float32)


def _linear_shares(size: int, given: int) -> NDArray[np.float32]:
    """``float32 [size, given]``: how much each of ``given`` numbers in a row counts for each of ``size``."""
    places = np.arange(size, dtype=np.float64) * (given - 1) / max(size - 1, 1)
    shares: NDArray[np.float64] = np.maximum(1 - np.abs(places[:, None] - np.arange(given)), 0)
    return shares.astype(np.float32)


def _cubic_shares(size: int, given: int) -> NDArray[np.float32]:
    """As `_linear_shares`; what lies beyond an edge is the number at it."""
    places = (np.arange(size, dtype=np.float64) + 0.5) * given / size - 0.5
    first = np.floor(places).astype(int)
    shares = np.zeros((size, given))
    for offset in range(-1, 3):
        at = np.clip(first + offset, 0, given - 1)
        np.add.at(shares, (np.arange(size), at), _weight(np.abs(places - first - offset)))
    return shares.astype(np.float32)


def _weight(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    near = ((_A + 2) * distance - (_A + 3)) * distance**2 + 1
    far = ((_A * distance - 5 * _A) * distance + 8 * _A) * distance - 4 * _A
    return np.where(distance <= 1, near, far)
