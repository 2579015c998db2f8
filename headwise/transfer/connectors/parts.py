"""Runs cut into parts that one question, or one transfer, may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headwise.transfer.connectors.base import Runs


def parts_of(runs: Runs, max_bytes: int, max_runs: int) -> Iterator[Runs]:
    """``runs``, cut so that no part has more than so many bytes, or runs; in order."""
    # Cut the long ones first, then take as many as fit.
    pieces = np.maximum(1, -(-runs[:, 2] // max_bytes))
    index = np.repeat(np.arange(len(runs)), pieces)
    within = (np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_bytes
    cut = runs[index]
    cut[:, :2] += within[:, None]
    cut[:, 2] = np.minimum(cut[:, 2] - within, max_bytes)
    first, num_bytes = 0, 0
    for at, count in enumerate(cut[:, 2].tolist()):
        if at > first and (num_bytes + count > max_bytes or at - first == max_runs):
            yield cut[first:at]
            first, num_bytes = at, 0
        num_bytes += count
    if first < len(cut):
        yield cut[first:]
