"""What `AttentionBatch.shared` comes to for kernels on a device: which decodes read which tokens together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

JOINT_ROWS = 64
"""Query heads over one KV head, of all sequences that one program reads for."""

JOINT_TOKENS = 128
"""What is read together are whole tiles, whatever their size: multiples of so many tokens."""

MOST_TOGETHER = 1024
"""Queries of a step, the first ones, among which some may read together: what these see is kept for each."""


def joint_of(shared: NDArray[np.int32], share: int, most: int = MOST_TOGETHER) -> NDArray[np.int32] | None:
    """`AttentionBatch.joint` of a step whose first sequences are those that ``shared [n]`` knows of, for as many query
    heads to a KV head as ``share`` at most; None: none reads anything with others."""
    fitting = JOINT_ROWS // share
    joint = np.zeros((3, len(shared)), np.int32)
    tokens = shared[:most] // JOINT_TOKENS * JOINT_TOKENS
    begins = np.flatnonzero(tokens == 0) if len(tokens) else tokens
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(tokens)], strict=True):
        pieces = -(-(end - begin) // fitting) if fitting > 1 else 0
        for piece in range(pieces):
            first, last = (begin + (end - begin) * at // pieces for at in (piece, piece + 1))
            if last - first > 1:
                joint[:2, first] = tokens[end - 1], last - first
                joint[2, first:last] = tokens[end - 1]
    return joint if joint.any() else None
