"""The receiver's side of a hand-over: takes what an engine that leaves offers into this one's host.

A path comes like a request's prefix: what device and host lack of it, for a hit at its end, is leased and copied. It
takes what is free there, and of what is cached no more than the offer allows. Requests' own loads go first: only half
of the room for what is on its way is taken.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from headwise.cache_controller.arrivals import Fetch
from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.cache_manager import CacheManager
from headwise.errors import InvalidRequestError
from headwise.runtime.engine.peers.base import Peers, hashes_of
from headwise.runtime.engine.peers.loads import PeerLoads
from headwise.runtime.protocol.lease_messages import Offer, Taken
from headwise.storage.index.messages import HASH_BYTES

log = logging.getLogger(__name__)

OFFER_BYTES = 16
MAX_PATHS = 64
"""Most paths of an offer."""
MAX_OFFERS = 16
"""Most offers that blocks are taken of at a time: of as many engines that leave."""
MAX_REMEMBERED = 256
"""Offers that are over of which it is known how they ended: who did not hear it asks again."""
MAX_TRIES = 4
"""How often a path is asked for of which something does not come, each time when nothing else is under way."""
UNDER_WAY = 8
"""Most paths of an offer that come at a time."""
REFUSED = -1
"""Free blocks of an engine that takes nothing."""


@dataclass(frozen=True, eq=False)
class _Coming:
    """A path under way, and the token blocks of it that will be served then."""

    path: list[bytes]
    fetch: Fetch
    blocks: int


@dataclass(eq=False)
class _Offered:
    """An offer: who made it, and how far it is.

    heard:  when its engine last spoke
    queue:  paths to be taken
    coming: those under way
    tries:  of paths, by their last block, how often something did not come
    evict:  blocks that may be evicted yet
    taken:  token blocks that have come
    evicted: blocks of room that were made
    """

    reader: bytes
    offer: Offer
    heard: float
    queue: deque[list[bytes]]
    evict: int
    coming: list[_Coming] = field(default_factory=list)
    tries: Counter[bytes] = field(default_factory=Counter)
    taken: int = 0
    evicted: int = 0
    is_over: bool = False


class Taking:
    """pool: the host's
    timeout_s: an engine that is silent for so long is believed to be no more
    """

    def __init__(self, cache: CacheManager, pool: BlockPool, loads: PeerLoads, peers: Peers, timeout_s: float) -> None:
        self._cache, self._pool, self._loads, self._peers = cache, pool, loads, peers
        self._groups = len(cache.policies)
        self._timeout_s = timeout_s
        self._offers: OrderedDict[bytes, _Offered] = OrderedDict()
        self.blocks = 0

    def stats(self) -> dict[str, int]:
        """taken_blocks: token blocks that came of what leaving engines had offered; offers: not over yet"""
        return {"taken_blocks": self.blocks, "offers": len(self._active)}

    def take(self, reader: bytes, offer: Offer, now: float) -> None:
        """An engine offers blocks, maybe not for the first time; it is told how far that is.

        Raises:
            InvalidRequestError: the message makes no sense here.
        """
        known = self._offers.get(offer.offer)
        if known is not None:
            known.reader, known.heard = reader, now
            self._tell(known)
            return
        paths, is_of_use = self._paths(offer), self._loads.takes_from(offer.engine, offer.engine_epoch)
        if len(self._active) >= MAX_OFFERS or not is_of_use:
            self.refuse(reader, offer)
            return
        offered = _Offered(reader, offer, now, deque(paths), max(0, offer.evict) * self._groups)
        self._offers[offer.offer] = offered
        while len(self._offers) > MAX_REMEMBERED:
            self._offers.popitem(last=False)
        self._advance(offered, now)
        if not offered.is_over:
            self._tell(offered)

    def refuse(self, reader: bytes, offer: Offer) -> None:
        """Say that nothing is taken here."""
        self._peers.answer(reader, Taken(offer.offer, offer.epoch, 0, 0, REFUSED, is_over=True))

    def _paths(self, offer: Offer) -> list[list[bytes]]:
        if len(offer.offer) != OFFER_BYTES:
            raise InvalidRequestError(f"an offer's name must have {OFFER_BYTES} bytes, got {len(offer.offer)}")
        if len(offer.paths) > MAX_PATHS:
            raise InvalidRequestError(f"an offer must have at most {MAX_PATHS} paths, got {len(offer.paths)}")
        paths = [hashes_of(path) for path in offer.paths]
        most = self._cache.max_blocks
        for path, joined in zip(paths, offer.paths, strict=True):
            if not 0 < len(path) <= most or len(set(path)) * HASH_BYTES != len(joined):
                raise InvalidRequestError(
                    f"an offered path must be from 1 to {most} different hashes of {HASH_BYTES} bytes, got "
                    f"{len(joined)} bytes"
                )
        return paths

    @property
    def _active(self) -> list[_Offered]:
        return [offered for offered in self._offers.values() if not offered.is_over]

    # ---- what comes ----

    def advance(self, now: float) -> None:
        """Ask for what there is room for, and tell of what is over."""
        for offered in self._active:
            self._advance(offered, now)

    def _advance(self, offered: _Offered, now: float) -> None:
        over = [each for each in offered.coming if not each.fetch.left]
        for each in over:
            offered.coming.remove(each)
            self._came(offered, each)
        if now - offered.heard > self._timeout_s:
            offered.queue.clear()
        if over or not offered.coming:  # there may be room that there was not before
            while offered.queue and len(offered.coming) < UNDER_WAY and self._begin(offered, offered.queue[0], now):
                offered.queue.popleft()
        if not offered.queue and not offered.coming:
            offered.is_over = True
            self._tell(offered)

    def _came(self, offered: _Offered, each: _Coming) -> None:
        """A path is over. The engine that offers it lends so much at a time and no more: what did not come may yet."""
        if not each.fetch.missed:
            offered.taken += each.blocks
            self.blocks += each.blocks
            return
        offered.tries[each.path[-1]] += 1
        if offered.tries[each.path[-1]] < MAX_TRIES:
            offered.queue.append(each.path)

    def _begin(self, offered: _Offered, path: list[bytes], now: float) -> bool:
        """Ask for what is lacking of a path, as far as that fits; False: the rest has to wait for room."""
        if offered.tries[path[-1]] >= MAX_TRIES:
            return True
        if offered.coming and (offered.tries[path[-1]] or offered.coming[-1].path is path):
            return False
        everywhere = np.ones((len(path), self._groups), dtype=np.bool_)
        free = self._pool.num_free
        source = offered.offer.engine, offered.offer.engine_epoch
        room = min(self._loads.room_from(*source), self._loads.room // 2, free + offered.evict)
        wanted, gained = self._cache.lacking(path, everywhere, room)
        if len(wanted) < len(path) and offered.coming:
            return False  # more of it may fit then
        blocks = int(np.count_nonzero(wanted))
        if not gained or not self._cache.costs.is_worth_loading(blocks, gained):
            return True
        fetch = self._loads.fetch(*source, path[: len(wanted)], wanted, now)
        if fetch is None:
            return False
        made = max(0, blocks - free)
        offered.evict -= made
        offered.evicted += made
        offered.coming.append(_Coming(path, fetch, gained // self._cache.block_size))
        return len(wanted) == len(path)

    def _tell(self, offered: _Offered) -> None:
        offer, evicted = offered.offer, -(-offered.evicted // self._groups)
        free = self._pool.num_free // self._groups
        self._peers.answer(
            offered.reader, Taken(offer.offer, offer.epoch, offered.taken, evicted, free, offered.is_over)
        )
