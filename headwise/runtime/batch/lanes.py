"""Deals an order of requests out to engines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Lanes:
    """One run of the order for each engine, so that engines are at different prefixes, and each has its own cached.

        order   a a a a b b c c c c c d d d d e
        lanes   0------->   1------->   2------>

    A lane that is through takes a part of the longest one that is left, cut where neighbours share least.

    order, shared: see `sharing_order`
    """

    def __init__(self, order: NDArray[np.int64], shared: NDArray[np.int64], lanes: int = 1) -> None:
        self._order, self._shared = order, shared
        self._left: dict[int, tuple[int, int]] = {0: (0, len(order))}
        for lane in range(1, lanes):
            self._take_over(lane)

    @property
    def num_left(self) -> int:
        """Requests that no lane has given out."""
        return sum(end - begin for begin, end in self._left.values())

    def take(self, lane: int) -> int | None:
        """The next request of a lane, which need not have had any; None: there is none left in any lane."""
        begin, end = self._left.get(lane, (0, 0))
        if begin == end:
            begin, end = self._take_over(lane)
        if begin == end:
            return None
        self._left[lane] = begin + 1, end
        return int(self._order[begin])

    def _take_over(self, lane: int) -> tuple[int, int]:
        """Give a lane the latter part of the longest one."""
        longest = max(self._left, key=lambda each: self._left[each][1] - self._left[each][0])
        begin, end = self._left[longest]
        cut = self._cut(begin, end)
        self._left[longest] = begin, cut
        self._left[lane] = cut, end
        return cut, end

    def _cut(self, begin: int, end: int) -> int:
        """Where to cut a run: between the quarters at its ends, where neighbours share least, near the middle."""
        if end - begin < 2:
            return begin
        quarter, middle = (end - begin) // 4, (begin + end) // 2
        places = np.arange(begin + max(quarter, 1), max(end - quarter, begin + 2))
        shared = self._shared[places]
        least = places[shared == shared.min()]
        return int(least[np.argmin(np.abs(least - middle))])
