"""What an engine that is about to end leaves to others' hosts, path by path, and who gets which.

Decisions only: who sends what to whom, and when, is `headwise.runtime.engine.peers.giving`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence


class LeftPaths:
    """The paths to give away, those first whose blocks are worth most.

    hashes:    of token blocks, the most valuable first; neighbours of a path are mostly together, the first one first
    parent_of: the hash of the block before one; None: it is the first of its path, or it is not cached any more
    served:    how many of a path's blocks are there so that a request can go on right behind them
    shorter:   at which depths before its end a path has to be given, too: see `PrefixFinder.shorter`
    """

    def __init__(
        self,
        hashes: Iterable[bytes],
        parent_of: Callable[[bytes], bytes | None],
        served: Callable[[Sequence[bytes]], int],
        shorter: Callable[[Sequence[bytes]], list[int]] = lambda path: [],
    ) -> None:
        self._queue = deque(hashes)
        self._parent_of, self._served, self._shorter = parent_of, served, shorter
        self._covered: set[bytes] = set()
        self._again = deque[list[bytes]]()  # prefixes of a path that was taken

    def __len__(self) -> int:
        """Token blocks that were not looked at yet, and paths that are to be given up to other depths."""
        return len(self._queue) + len(self._again)

    def extend(self, hashes: Iterable[bytes]) -> None:
        """More blocks are to be given, after all others."""
        self._queue.extend(hashes)

    def take(self) -> list[bytes]:
        """The path, from its first block on, to which the next blocks belong; empty: it is given already, or is of no
        use to anybody.

        Raises IndexError if there are no more.
        """
        if self._again:
            return self._again.popleft()
        last = self._queue.popleft()
        while self._queue and self._parent_of(self._queue[0]) == last:
            last = self._queue.popleft()
        if last in self._covered:
            return []
        path = [last]
        while (parent := self._parent_of(path[-1])) is not None:
            path.append(parent)
        path.reverse()
        path = path[: self._served(path)]
        if not path or path[-1] in self._covered:
            return []
        self._covered.update(path)
        self._again += [path[:depth] for depth in self._shorter(path)]
        return path


class Dealer:
    """Gives each path to whoever has what is before it already; else to whoever has the most room.

    room: token blocks that each taker would still take
    """

    def __init__(self, room: Mapping[str, int]) -> None:
        self.room = dict(room)
        self._given: dict[bytes, str] = {}

    def choose(self, path: Sequence[bytes]) -> str | None:
        """Who gets a path; None: nobody has room for any of it."""
        with_room = [name for name, room in self.room.items() if room > 0]
        if not with_room:
            return None
        before = next((depth for depth in range(len(path), 0, -1) if path[depth - 1] in self._given), 0)
        taker = self._given[path[before - 1]] if before else ""
        if self.room.get(taker, 0) <= 0:
            taker, before = max(with_room, key=lambda name: self.room[name]), 0
        self.room[taker] -= len(path) - before
        self._given.update(dict.fromkeys(path, taker))
        return taker

    def lose(self, taker: str) -> None:
        """It takes nothing any more."""
        self.room.pop(taker, None)
        self._given = {block: name for block, name in self._given.items() if name != taker}
