"""The leaving engine's side of a hand-over: offers others what only it has, the most valuable first.

    offer (no paths)  -->  how much room there is        to every engine that stays
    offer (paths)     -->  over, so much was taken       one at a time to each, until all is given or nobody has room

What is said is said again until it is answered; who does not answer for ``timeout_s`` gets nothing more, and others get
what it was offered.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from headwise.cache_controller.legacy import Dealer, LeftPaths
from headwise.runtime.engine.peers.base import Peers, hashes_of
from headwise.runtime.engine.peers.staging import Staging
from headwise.runtime.engine.peers.taking import MAX_PATHS, OFFER_BYTES, REFUSED
from headwise.runtime.protocol.lease_messages import Offer, Taken

log = logging.getLogger(__name__)

MAX_BLOCKS = 8192
"""Of all paths of an offer: 128 KiB of hashes. A path that is longer has an offer of its own."""
AHEAD = 8
"""Paths of each taker that are brought to the host from storage before it is offered them."""
LOOKED_AT = 64
"""Paths that are looked at before the next step: a leaving engine still serves requests."""
ASK_SHARE, ROOM_SHARE = 0.1, 0.25
"""Shares of the timeout: after which an offer that is not over is said again, and for which all are given time to say
how much room they have."""


@dataclass(eq=False)
class _Taker:
    """An engine that stays.

    evict: token blocks that it may evict yet
    offer: under way; None: none is
    heard: when it last answered
    """

    name: str
    epoch: int
    evict: int
    heard: float
    offer: Offer | None = None
    say_at: float = 0.0
    queue: deque[list[bytes]] = field(default_factory=deque)


class Giving:
    """me: this engine's name, and the epoch of its cache
    takers: the engines that stay, and how many token blocks each may evict
    staging: brings to the host what is to be read from there
    """

    def __init__(
        self,
        paths: LeftPaths,
        peers: Peers,
        me: tuple[str, int],
        takers: Mapping[str, int],
        timeout_s: float,
        staging: Staging,
    ) -> None:
        self._staging = staging
        self._paths, self._peers, self._me, self._timeout_s = paths, peers, me, timeout_s
        self._evict = takers
        self._takers: dict[str, _Taker] = {}
        self._dealer = Dealer({})
        self._again: deque[list[bytes]] = deque()  # what a taker had not taken when it fell silent
        self._began: float | None = None
        self._has_all = False
        self.given = 0

    @property
    def is_over(self) -> bool:
        """Nothing is left to give, or nobody is left to take it."""
        if self._began is None:
            return False
        is_idle = all(taker.offer is None and not taker.queue for taker in self._takers.values())
        return is_idle and (self._is_full or (self._has_all and not self._paths and not self._again))

    @property
    def _is_full(self) -> bool:
        return not any(room > 0 for room in self._dealer.room.values())

    def has_all(self) -> None:
        """No more paths will be given to `LeftPaths`."""
        self._has_all = True

    def advance(self, now: float) -> None:
        """Take in what was answered, and offer what is due. To be called also while there is nothing to do."""
        if self._began is None:
            self._began = now
            self._begin(now)
        for answer in self._peers.taken():
            taker = next((one for one in self._takers.values() if one.offer and one.offer.offer == answer.offer), None)
            if taker is not None:
                self._take(taker, answer, now)
        for taker in list(self._takers.values()):
            if taker.offer is not None and now - taker.heard > self._timeout_s:
                log.warning("%s does not say whether it takes what it was offered", taker.name)
                self._lose(taker)
        is_heard = all(taker.offer is None or taker.offer.paths for taker in self._takers.values())
        if is_heard or now - self._began > ROOM_SHARE * self._timeout_s:
            self._deal()
        for taker in self._takers.values():
            if taker.offer is None and taker.queue:
                if paths := self._next_of(taker):
                    self._offer(taker, paths, now)
            elif taker.offer is not None and now >= taker.say_at:
                self._say(taker, now)

    def _begin(self, now: float) -> None:
        for name, evict in self._evict.items():
            epoch = self._peers.epoch_of(name)
            if epoch is not None:
                self._takers[name] = _Taker(name, epoch, max(0, evict), now)
                self._offer(self._takers[name], (), now)

    def _deal(self) -> None:
        """Let takers have paths, until one that should get more has enough for now."""
        for _ in range(LOOKED_AT):
            if self._is_full or any(len(taker.queue) >= MAX_PATHS for taker in self._takers.values()):
                return
            if self._again:
                path = self._again.popleft()
            elif self._paths:
                path = self._paths.take()
            else:
                return
            taker = self._dealer.choose(path) if path else None
            if taker is not None:
                self._takers[taker].queue.append(path)

    def _next_of(self, taker: _Taker) -> tuple[bytes, ...]:
        """The paths of its next offer, and of the ones after it what is in storage starts to come; none: the first has
        not come yet."""
        for path in islice(taker.queue, AHEAD):
            if not self._staging.is_here(path) and not self._staging.is_coming(path):
                break  # what comes behind it would take its room
        paths, blocks = list[bytes](), 0
        while taker.queue and len(paths) < MAX_PATHS and (not paths or blocks + len(taker.queue[0]) <= MAX_BLOCKS):
            if not self._staging.is_here(taker.queue[0]):
                break
            path = taker.queue.popleft()
            blocks += len(path)
            paths.append(b"".join(path))
        return tuple(paths)

    # ---- what is said and heard ----

    def _offer(self, taker: _Taker, paths: tuple[bytes, ...], now: float) -> None:
        name, epoch = self._me
        taker.offer = Offer(secrets.token_bytes(OFFER_BYTES), taker.epoch, name, epoch, paths, taker.evict)
        taker.heard = now
        self._say(taker, now)

    def _say(self, taker: _Taker, now: float) -> None:
        assert taker.offer is not None
        self._peers.send(taker.name, taker.offer)
        taker.say_at = now + ASK_SHARE * self._timeout_s

    def _take(self, taker: _Taker, answer: Taken, now: float) -> None:
        taker.heard = now
        if not answer.is_over or taker.offer is None:
            return
        if answer.free == REFUSED:
            self._lose(taker)
            return
        for path in taker.offer.paths:
            self._staging.end(hashes_of(path))
        taker.offer = None
        taker.evict = max(0, taker.evict - max(0, answer.evicted))
        self.given += max(0, answer.blocks)
        promised = sum(map(len, taker.queue))
        self._dealer.room[taker.name] = max(0, answer.free) + taker.evict - promised

    def _lose(self, taker: _Taker) -> None:
        """It takes no more: what it was offered goes to others."""
        assert taker.offer is not None
        lost = [*map(hashes_of, taker.offer.paths), *taker.queue]
        for path in lost:
            self._staging.end(path)
        self._again += lost
        del self._takers[taker.name]
        self._dealer.lose(taker.name)
