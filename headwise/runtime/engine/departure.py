"""What an engine does with its cache before it ends: storage, or other engines, get what only it has.

Who orders it to go says which: takers, or none. It serves both at once if there are both.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.hand_over import told_of
from headwise.runtime.engine.peers.base import Peers, Takers
from headwise.runtime.engine.peers.giving import Giving
from headwise.runtime.engine.peers.staging import Staging


class Departure:
    """hashes: of the token blocks to hand over, the most valuable first; None: all that is cached
    peers, takers: the other engines; None: nobody takes anything
    timeout_s: a taker that is silent for so long gets nothing more
    storable: how many of them, the first ones, storage gets; None: all
    """

    def __init__(
        self,
        cache: CacheManager,
        hashes: Sequence[bytes] | None,
        peers: Peers | None,
        takers: Takers | None,
        timeout_s: float,
        storable: int | None = None,
    ) -> None:
        self._cache = cache
        self._storing = cache.hand_over(hashes, storable)
        self._told = told_of(cache.tree, cache.pool)
        self._paths = cache.left_paths(hashes)
        self._giving: Giving | None = None
        if peers is not None and takers is not None and takers.evict and cache.host.is_there:
            me = takers.engine, takers.epoch
            self._giving = Giving(self._paths, peers, me, takers.evict, timeout_s, Staging(cache))
        self._is_last = False

    @property
    def is_over(self) -> bool:
        """Whether nobody has yet to get something."""
        return self._storing.is_over and (self._giving is None or self._giving.is_over)

    @property
    def given(self) -> int:
        """Token blocks that other engines have got."""
        return 0 if self._giving is None else self._giving.given

    def store(self, is_last: bool) -> None:
        """Start copies to storage: see `HandOver.advance`. Before each step."""
        self._storing.advance(is_last)

    def give(self, is_last: bool, now: float) -> None:
        """Go on with what others take. ``is_last``: nothing is computed any more, so that what was computed since the
        beginning can go, too. To be called also while there is nothing to do."""
        if self._giving is None:
            return
        if is_last and not self._is_last:
            self._is_last = True
            self._paths.extend([block for block in self._cache.tree.nodes if block not in self._told])
            self._giving.has_all()
        self._giving.advance(now)
