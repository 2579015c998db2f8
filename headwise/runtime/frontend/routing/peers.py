"""Which engines could serve others a prefix, how much of it, and which one is asked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.frontend.routing.engines import Column, EngineTable
from headwise.runtime.protocol.request import PeerHint


def lent(table: EngineTable, depths: NDArray[np.float64], expected: Column | None, now: float) -> Column | None:
    """Blocks of a prefix that each engine could serve to others, from device or host; None: none has any.

    depths:   ``[engines, 3]``, what the index knows, as `Estimate.served`
    expected: blocks of what was sent there lately; it counts once all that was sent there must have been computed
    """
    blocks = depths[:, 1]
    if expected is not None:
        blocks = np.maximum(blocks, expected * (table.ready_at <= now))
    blocks = blocks * (table.lends * table.alive(now))
    return blocks if blocks.any() else None


def of_others(lent: Column) -> Column:
    """For each engine the most that another one could serve it."""
    deepest = int(lent.argmax())
    most = np.full(len(lent), lent[deepest])
    most[deepest] = max(lent[:deepest].max(initial=0.0), lent[deepest + 1 :].max(initial=0.0))
    return most


def hint(table: EngineTable, row: int, lent: Column) -> PeerHint:
    """Whom the engine of this row is to ask: who could serve most, and of those the one with the fewest requests."""
    by_others = lent.copy()
    by_others[row] = 0.0
    deepest = np.flatnonzero(by_others == by_others.max())
    owner = int(deepest[np.argmin(table.requests[deepest] + table.reserved[deepest])])
    return PeerHint(table.names[owner], table.engines[owner].status.epoch, int(by_others[owner]))
