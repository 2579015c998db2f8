"""What a leaving engine has in storage of its own alone, on its way to its host, from where others read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Fetch
from headwise.cache_controller.cache_manager import CacheManager

MAX_STAGED = 0.5
"""Share of the host's blocks that may come for paths that are not given yet, at most for one of them if that is larger:
what came first has to be there still when it is read."""


@dataclass(eq=False)
class _Staged:
    """fetch: the path's last one
    come: blocks that were fetched for it
    """

    fetch: Fetch
    come: int


class Staging:
    """Nothing moves but by `is_here` and the engine's steps. Where there is no storage, all is here.

    Paths that are asked for first come first. One that was asked for has to be given, or given up, by `end`.
    """

    def __init__(self, cache: CacheManager) -> None:
        host = cache.host.stats()
        self._cache, self._storage = cache, cache.host.storage
        self._most = 0 if host is None else int(MAX_STAGED * host.total_blocks)
        self._staged: dict[bytes, _Staged] = {}  # by a path's last block
        self._here: set[bytes] = set()

    def is_here(self, path: Sequence[bytes]) -> bool:
        """Whether as much of a path is in memory as is to be, so that it can be offered. If storage has more of it,
        that is fetched. To be asked again until it is so.
        """
        name = path[-1]
        if name in self._here:
            return True
        if self._storage.is_there and self._waits_for(path):
            return False
        self._here.add(name)
        return True

    def is_coming(self, path: Sequence[bytes]) -> bool:
        """Whether it has begun to come."""
        return path[-1] in self._staged

    def end(self, path: Sequence[bytes]) -> None:
        """The path was given, or is not to be."""
        self._staged.pop(path[-1], None)

    def _waits_for(self, path: Sequence[bytes]) -> bool:
        staged = self._staged.get(path[-1])
        stats = self._storage.stats()
        if stats is None or stats.is_stalled:
            return False  # it would not come
        if staged is not None and staged.fetch.left:
            return True
        if staged is not None and staged.fetch.missed:
            return False
        come = 0 if staged is None else staged.come
        if come >= self._most:
            return False
        stored = self._stored(path)
        if not stored.any() or not self._cache.gain(path, stored):
            return False
        if staged is None and self._staged and self._num_come + stored.size > self._most:
            return True  # it would take the place of what came for others
        fetch = self._cache.fetch(path, stored)
        if fetch is None:  # it is not worth that; or there is no room, until others have come
            return any(other.fetch.left for other in self._staged.values())
        self._staged[path[-1]] = _Staged(fetch, come + fetch.left)
        return True

    @property
    def _num_come(self) -> int:
        return sum(staged.come for staged in self._staged.values())

    def _stored(self, path: Sequence[bytes]) -> NDArray[np.bool_]:
        """``[n, groups]``: which blocks of a path storage is known to have."""
        tree = self._cache.tree
        nodes = tree.find(path)
        stored = np.zeros((len(path), tree.device.num_groups), dtype=np.bool_)
        stored[: len(nodes)] = tree.storage.has(nodes)
        return stored
