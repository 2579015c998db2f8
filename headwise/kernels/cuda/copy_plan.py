"""From pairs of blocks to pieces of memory: what is copied, before it is decided how. Pure NumPy, for 10,000s of pairs.

Pieces are one array ``int64 [3, n]``: where each begins in the source arena, where in the target arena, and its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.block_copy import bad_pair, check_ranges

Pieces = NDArray[np.int64]


def plan_pieces(
    pairs: NDArray[np.int32], ranges: NDArray[np.int64], block_bytes: int, source_bytes: int, target_bytes: int
) -> Pieces:
    """The pieces that a call of `BlockCopy` copies, in its order. Neighbours in both arenas are one piece.

    Raises:
        ValueError: as `BlockCopy`.
    """
    check_ranges(ranges, block_bytes)
    if not len(pairs):
        return np.empty((3, 0), dtype=np.int64)
    counts = (len(ranges), source_bytes // block_bytes, target_bytes // block_bytes)
    most = pairs.max(axis=0).tolist()
    if pairs.min() < 0 or any(largest >= count for largest, count in zip(most, counts, strict=True)):
        outside = ((pairs < 0) | (pairs >= counts)).any(axis=1)
        raise bad_pair(pairs, int(np.flatnonzero(outside)[0]), *counts)
    groups = pairs[:, 0]
    first, size = ranges[groups, 0], (ranges[:, 1] - ranges[:, 0])[groups]
    begins = np.multiply(pairs[:, 1:].T, block_bytes, dtype=np.int64, order="C") + first
    if not size.all():
        begins, size = begins[:, size > 0], size[size > 0]
    return _joined(begins, size)


def _joined(begins: NDArray[np.int64], size: NDArray[np.int64]) -> Pieces:
    """Pieces at ``begins [2, m]`` of ``size [m]`` bytes, those that continue the one before joined to it."""
    if not len(size):
        return np.empty((3, 0), dtype=np.int64)
    ends = begins[:, :-1] + size[:-1]
    breaks = np.flatnonzero((begins[0, 1:] != ends[0]) | (begins[1, 1:] != ends[1])) + 1
    if len(breaks) == len(size) - 1:
        return np.stack([*begins, size])
    starts = np.concatenate(([0], breaks))
    return np.stack([*begins[:, starts], np.add.reduceat(size, starts)])


@dataclass(frozen=True)
class Split:
    """Pieces by how they are copied: each by a call of its own, all at once by the copy engines, or by a kernel."""

    single: Pieces
    batch: Pieces
    kernel: Pieces


def split_pieces(pieces: Pieces, crossover_bytes: int, few: int) -> Split:
    """Pieces of at least ``crossover_bytes`` go to the copy engines, smaller ones to the kernel.

    Up to ``few`` on one side are copied by calls of their own: nothing is gained by gathering them.
    """
    none, large = pieces[:, :0], pieces[2] >= crossover_bytes
    count = int(large.sum())
    if pieces.shape[1] > few and count in (0, pieces.shape[1]):
        return Split(none, pieces, none) if count else Split(none, none, pieces)
    sides = pieces[:, large], pieces[:, ~large]
    single = np.concatenate([side for side in (none, *sides) if side.shape[1] <= few], axis=1)
    batch, kernel = (side if side.shape[1] > few else side[:, :0] for side in sides)
    return Split(single, batch, kernel)
