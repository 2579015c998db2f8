"""Where a step's tokens are, for models that give a token three positions: see `grids`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.models.position_config import AXES
from headwise.runtime.protocol.batch import NO_PLACES


def step_places(
    table: SequenceTable, rows: Index, starts: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int32]:
    """``[sum(counts), 3]``, of ``counts [n]`` tokens of each row, from ``starts [n]`` on; `NO_PLACES` where no item on
    a grid is among them or before them."""
    is_turned = table.grids_begin[rows] < starts + counts
    if not is_turned.any():
        return NO_PLACES
    begins = np.cumsum(counts) - counts
    is_behind = starts >= table.grids_end[rows]
    first = starts - np.where(is_behind, table.grids_saved[rows], 0)
    alike = np.arange(int(counts.sum())) + np.repeat(first - begins, counts)
    places = np.repeat(alike.astype(np.int32)[:, None], AXES, axis=1)
    among = (is_turned & ~is_behind).nonzero()[0]
    for index, grids in zip(among.tolist(), table.grids_of(rows[among]), strict=True):
        start, count, begin = int(starts[index]), int(counts[index]), int(begins[index])
        places[begin : begin + count] = grids.places(start, start + count)
    return places
