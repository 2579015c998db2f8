"""What a load copies at a time: a layer of each block, or a few where a layer of a block is too little to copy fast."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LoadPieces:
    """Layers that are copied together, in order. Each piece is needed from its first layer on.

    first_layers: ``int64 [pieces]``, ascending
    ranges:       ``int64 [pieces, groups, 2]``, the bytes ``[first, last)`` of each piece within a block of each group;
                  empty where a group has no member in its layers
    """

    first_layers: NDArray[np.int64]
    ranges: NDArray[np.int64]


def load_pieces(layer_ranges: NDArray[np.int64], least_bytes: int) -> LoadPieces:
    """Join layers until some group's part of a block has ``least_bytes``; 0: each layer is a piece.

    A piece has no more layers than come before it, so that it can arrive while these are computed: 1, 1, 2, 4, and so
    on; and no more than a quarter of all, which are computed when the last piece is there. Layers whose bytes are not
    side by side in a block are not joined.

    layer_ranges: ``int64 [layers, groups, 2]``, as `LoadPieces.ranges`, by layer
    """
    firsts, pieces, most = list[int](), list[NDArray[np.int64]](), len(layer_ranges) // 4
    for layer, ranges in enumerate(layer_ranges):
        if pieces and layer - firsts[-1] < min(firsts[-1], most) and _largest(pieces[-1]) < least_bytes:
            joined = _joined(pieces[-1], ranges)
            if joined is not None:
                pieces[-1] = joined
                continue
        firsts.append(layer)
        pieces.append(ranges)
    return LoadPieces(np.array(firsts, np.int64), np.array(pieces, np.int64).reshape(-1, *layer_ranges.shape[1:]))


def _largest(ranges: NDArray[np.int64]) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).max(initial=0))


def _joined(before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """``[groups, 2]`` of both; None where they are not side by side."""
    none_before, none_after = (ranges[:, 0] == ranges[:, 1] for ranges in (before, after))
    if not (none_before | none_after | (before[:, 1] == after[:, 0])).all():
        return None
    first = np.where(none_before, after[:, 0], before[:, 0])
    last = np.where(none_after, before[:, 1], after[:, 1])
    return np.stack([first, last], axis=1)
