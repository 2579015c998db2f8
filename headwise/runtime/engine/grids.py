"""Where tokens are that have three positions each: in time, in rows and in columns (M-RoPE).

Of text all three are alike and count on. An item on a grid stands at one time; rows and columns of its tokens count
from there on, and what comes behind it goes on behind its longer side (Wang et al., arXiv 2409.12191, section 2.1):

    tokens    a  b | 2 rows of 3 columns  | c  d
    time      0  1 | 2  2  2   2  2  2    | 5  6
    row       0  1 | 2  2  2   3  3  3    | 5  6
    column    0  1 | 2  3  4   2  3  4    | 5  6

Items of a video that go on with each other's grid (`ExtraKey.later`) have the rows and columns of the first one, each
at a later time, and what comes behind them goes on behind the last time, where that is more.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.runtime.models.position_config import AXES


class Grids:
    """Of a sequence's items, one behind the other, those that lie on a grid.

    begin, end: the first of their tokens, and behind the last one; 0: there are none
    saved:      positions that a token behind them all has less than tokens are before it
    """

    def __init__(self, items: Iterable[ExtraKey]) -> None:
        grids = [each for each in items if each.columns]
        corners = np.array([(each.start, each.end, each.columns) for each in grids], np.int64).reshape(-1, 3)
        self._starts, self._ends, self._columns = corners.T
        origins: list[int] = []  # where rows and columns count from
        times: list[int] = []
        saved = [0]
        behind = 0  # the position behind all so far
        for before, grid in zip((None, *grids), grids, strict=False):
            if grid.later < 0 or before is None:
                origins.append(grid.start - saved[-1])
                times.append(origins[-1])
            else:
                origins.append(origins[-1])
                times.append(times[-1] + grid.later)
            rows = (grid.end - grid.start) // grid.columns
            behind = max(behind, times[-1] + 1, origins[-1] + max(rows, grid.columns))
            saved.append(grid.end - behind)
        self._origins, self._times, self._saved = (np.array(each, np.int64) for each in (origins, times, saved))
        self.begin, self.end = (grids[0].start, grids[-1].end) if grids else (0, 0)
        self.saved = saved[-1]

    def places(self, start: int, end: int) -> NDArray[np.int32]:
        """``[end - start, 3]``: of the sequence's tokens ``[start, end)``."""
        tokens = np.arange(start, end, dtype=np.int64)
        begun = np.searchsorted(self._starts, tokens, "right")  # grids that begin at the token or before
        places = np.repeat((tokens - self._saved[begun])[:, None], AXES, axis=1)
        among = ((begun > 0) & (tokens < np.append(0, self._ends)[begun])).nonzero()[0]
        grid = begun[among] - 1
        rows, columns = np.divmod(tokens[among] - self._starts[grid], self._columns[grid])
        origins = self._origins[grid]
        places[among] = np.stack([self._times[grid], origins + rows, origins + columns], axis=1)
        return places.astype(np.int32)
