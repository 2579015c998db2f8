"""What is to be asked for next of a path, given the room on the host: all that a hit needs, or a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Arrivals
from headwise.cache_controller.cache_manager import CacheManager

MIN_PART = 0.5
"""Share of what may be on its way that a further part has at least, unless it is the last: else others need the room.
"""


@dataclass(frozen=True, eq=False)
class Part:
    """What comes next.

    wanted: ``bool [n, groups]``, of as many of the path's blocks as it is about
    gained: tokens more that can be served then
    is_all: whether no further part is needed for what a hit needs
    """

    wanted: NDArray[np.bool_]
    gained: int
    is_all: bool = True


class Parts:
    def __init__(self, cache: CacheManager, arrivals: Arrivals) -> None:
        self._cache, self._arrivals = cache, arrivals
        self._is_full = np.array([policy.is_full for policy in cache.policies], dtype=np.bool_)

    @property
    def num_groups(self) -> int:
        return len(self._is_full)

    def to_compute(self, path: Sequence[bytes], asked: int, room: int, leased: int) -> Part | None:
        """The part of a prompt that another engine is to compute next, up to a depth at which it can be served.

        asked:  blocks of the parts before
        room:   blocks that may be asked for now
        leased: those that the other engine may lease at once
        """
        room = min(room, leased)
        most = min(room, self._arrivals.room_for_one(asked))
        wanted, gained = self._cache.lacking(path, self._everything(path), most)
        return Part(wanted, gained) if gained and (not asked or self._is_worth_it(wanted, room, leased)) else None

    def to_fetch(self, path: Sequence[bytes], asked: int, room: int, leased: int) -> Part | None:
        """The part that is to come next of what another engine has; None: there is none, or computing is faster.

        At which depths a path can be served that engine alone knows. What the deepest one needs comes in parts: first
        windows and states, without which the rest is of no use.
        """
        room = min(room, leased)
        wanted, gained = self._cache.lacking(path, self._everything(path), self._arrivals.room_for_one(asked))
        blocks = int(np.count_nonzero(wanted))
        if not gained or not self._cache.costs.is_worth_asking(blocks, gained):
            return None
        if blocks <= room:
            return Part(wanted, gained)
        if not room or (asked and not self._is_worth_it(wanted, room, leased)):
            return None
        first = self._first_of(wanted, room)
        return Part(first, self._cache.gain(path[: len(first)], first), is_all=False)

    def _everything(self, path: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.ones((len(path), self.num_groups), dtype=np.bool_)

    def _is_worth_it(self, wanted: NDArray[np.bool_], room: int, leased: int) -> bool:
        """Whether there is so much room that it is worth it to go on."""
        return room >= min(int(np.count_nonzero(wanted)), MIN_PART * min(self._arrivals.most, leased))

    def _first_of(self, wanted: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
        """So many of the blocks ``wanted [n, groups]``: windows and states first, then those of the first columns."""
        columns, groups = np.nonzero(wanted)
        order = np.lexsort((groups, columns, self._is_full[groups]))[:count]
        first = np.zeros_like(wanted)
        first[columns[order], groups[order]] = True
        return first
