"""The storage's part of an engine's cache: what goes there from the host, and what is fetched back to the host.

    host block   --put-->    storage         the host block is held until all workers report
    storage      --fetch-->  host block      see `Arrivals`

Storage is slow, shared with others, and may lose what it has, fail or hang: a block counts only once it is on the
host. What hangs keeps its host blocks, and a bounded number of them; no more is asked of a storage that says nothing.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Arrival, Arrivals, Fetch
from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.eviction import Blocks
from headwise.cache_controller.kv_events import KVEvents
from headwise.cache_controller.radix_tree import NOWHERE, RadixTree
from headwise.cache_controller.stored_blocks import StoredBlocks
from headwise.cache_controller.tiers import NamedBlocks, StorageTierStats

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 0.25
"""Share of the host's blocks that puts may hold. Held blocks cannot be evicted."""

MAX_DELETES = 512
"""Most token blocks that a step has storage delete."""

MAX_QUEUED_DELETES = 1 << 16
"""Most token blocks that wait to be deleted; of more, those that have waited longest are not."""

PROBE_S = 1.0
"""Seconds from one look to the next for whether a stalled storage has answered, while there is nothing else to do."""


class _Patience:
    """Whether storage still answers: it is ``stalled`` when it owes an answer and has given none for ``timeout_s``.

    Time counts from the first `look` on that finds something owed, and between two looks at most half of the
    timeout: an engine that was idle or suspended has nobody look, and what storage has answered is still to be read.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        self.is_stalled = False
        self._what, self._timeout_s = what, timeout_s
        self._looked_at: float | None = None
        self._waited_s = 0.0

    def look(self, now: float, owed: int) -> None:
        """Note the time, and how many answers storage owes."""
        if not owed:
            self.waive()
            return
        if self._looked_at is not None:
            self._waited_s += min(now - self._looked_at, self._timeout_s / 2)
        self._looked_at = now
        if self._waited_s > self._timeout_s and not self.is_stalled:
            log.warning("storage has not %s for %g s: it is not used until it does", self._what, self._timeout_s)
            self.is_stalled = True

    def waive(self) -> None:
        """Storage owes nothing any more, and may be tried again."""
        self._looked_at, self._waited_s = None, 0.0
        self.is_stalled = False

    def heard(self) -> None:
        """Storage has answered."""
        if self.is_stalled:
            log.warning("storage has %s again", self._what)
        self.waive()


class StorageTier:
    """The `Storage` that there is. Owns the puts and fetches in flight.

    pool:       the host's
    arrivals:   what is on its way to the host, from here and elsewhere
    events:     told of what storage comes to have
    timeout_s:  seconds without an answer after which storage counts as stalled
    stored:     what storage is known to have
    """

    is_there = True

    def __init__(
        self, tree: RadixTree, pool: BlockPool, arrivals: Arrivals, events: KVEvents, timeout_s: float
    ) -> None:
        self.stored = StoredBlocks(tree, events)
        self._tree, self._pool, self._arrivals = tree, pool, arrivals
        self._putting_goes_on = _Patience("taken a block", timeout_s)
        self._fetching_goes_on = _Patience("given a block", timeout_s)
        self._asking_goes_on = _Patience("said what it has", timeout_s)
        self._asking: set[str] = set()
        self._asked_too_early: set[str] = set()  # before storage was emptied
        self._probe_at = -math.inf
        self._is_probing = False
        self._max_in_flight = max(1, int(MAX_IN_FLIGHT * pool.num_blocks))
        self._backlog: deque[tuple[int, int]] = deque(maxlen=pool.num_blocks)  # host blocks, and their generations
        self._putting: set[int] = set()
        self._put_too_early: set[int] = set()  # likewise
        self._puts: list[tuple[int, int, bytes]] = []  # not sent yet: (group, host block, hash)
        self._deletes: deque[bytes] = deque(maxlen=MAX_QUEUED_DELETES)
        self._fetching: set[int] = set()
        self._fetches: list[tuple[int, int, bytes]] = []  # not sent yet: (group, host block, hash)
        self._put = self._failed_puts = self._fetched = self._missed = self._hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether something is on its way of which word may be expected, or of which it is time to ask."""
        if self._is_probing or (self._deletes and not self._putting_goes_on.is_stalled):
            return True
        puts = self._putting and not self._putting_goes_on.is_stalled
        return bool(puts or (self._fetching and not self._fetching_goes_on.is_stalled))

    @property
    def is_stalled(self) -> bool:
        return any(kind.is_stalled for kind in (self._putting_goes_on, self._fetching_goes_on, self._asking_goes_on))

    def stats(self) -> StorageTierStats:
        return StorageTierStats(
            queued_puts=len(self._putting) + len(self._backlog),
            queued_fetches=len(self._fetching),
            put_blocks=self._put,
            failed_puts=self._failed_puts,
            fetched_blocks=self._fetched,
            missed_blocks=self._missed,
            hit_tokens=self._hit_tokens,
            is_stalled=self.is_stalled,
        )

    def watch(self, now: float) -> None:
        """Note the time: of storage that owes an answer and gives none, no more is asked."""
        self._putting_goes_on.look(now, len(self._putting))
        self._fetching_goes_on.look(now, len(self._fetching))
        self._asking_goes_on.look(now, len(self._asking))

    def probe(self, now: float) -> None:
        """Have a step sent now and then that brings word of what a stalled storage has done meanwhile.

        To be called also while there is nothing to do.
        """
        is_silent = self._putting_goes_on.is_stalled or self._fetching_goes_on.is_stalled
        if is_silent and now >= self._probe_at:
            self._probe_at = now + PROBE_S
            self._is_probing = True

    # ---- what storage has ----

    @property
    def may_ask(self) -> bool:
        """Whether to ask storage what it has: it says so, and what it has does come."""
        return not (self._asking_goes_on.is_stalled or self._fetching_goes_on.is_stalled)

    def ask(self, key: str, now: float) -> None:
        """Storage was asked what it has of a path."""
        self._asking.add(key)
        self._asking_goes_on.look(now, len(self._asking))

    def answered(self, key: str, path: Sequence[bytes], stored: NDArray[np.bool_]) -> None:
        """It has said so: ``stored [n, groups]`` of the path."""
        self._asking_goes_on.heard()
        if key not in self._asked_too_early:
            self.stored.found(path, stored)
        self.ask_no_more(key)

    def ask_no_more(self, key: str) -> None:
        """The question was taken back."""
        self._asking.discard(key)
        self._asked_too_early.discard(key)
        if not self._asking:
            self._asking_goes_on.waive()

    def begin_audit(self, now: float) -> list[bytes]:
        """Hashes of which to ask storage in the background whether it still has them; mostly none."""
        return [] if self.is_stalled or self._asking else self.stored.begin_audit(now)

    def end_audit(self, stored: NDArray[np.bool_]) -> None:
        """It has said so: ``stored [n, groups]``."""
        self._asking_goes_on.heard()
        self.stored.end_audit(stored)

    def reset(self) -> None:
        """Storage is being emptied: nothing is known to be there, whatever is said of the time before."""
        self._put_too_early |= self._putting
        self._asked_too_early |= self._asking
        self.stored.reset()

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Delete what storage has of these token blocks."""
        self._deletes.extend(hashes)
        self._asked_too_early |= self._asking
        self.stored.forget(hashes)

    def take_deletes(self) -> tuple[bytes, ...]:
        """The token blocks to delete, of all groups, after what was put before."""
        if self._putting_goes_on.is_stalled:
            return ()
        return tuple(self._deletes.popleft() for _ in range(min(MAX_DELETES, len(self._deletes))))

    # ---- host to storage ----

    def put(self, host_blocks: Blocks) -> None:
        """Write host blocks that the tree knows to storage, as many at once as may be in flight, the rest later.

        What is evicted from the host before its turn comes is not written.
        """
        generations = self._tree.host.generations(host_blocks)
        self._backlog.extend(zip(host_blocks.tolist(), generations.tolist(), strict=True))
        self._start_puts()

    def _start_puts(self) -> None:
        if self._putting_goes_on.is_stalled:
            return
        while self._backlog and (room := self._max_in_flight - len(self._putting)) > 0:
            waited = dict.fromkeys(self._backlog.popleft() for _ in range(min(room, len(self._backlog))))
            blocks, generations = np.array(list(waited), dtype=np.int64).T
            is_same = (generations != NOWHERE) & (generations == self._tree.host.generations(blocks))
            due = [index for index in is_same.nonzero()[0].tolist() if int(blocks[index]) not in self._putting]
            putting = blocks[due].astype(np.int32)
            nodes, groups = self._tree.host.owners(putting)
            self._pool.retain(putting)
            self._putting.update(putting.tolist())
            hashes = [self._tree.hashes[node] for node in nodes.tolist()]
            self._puts += zip(groups.tolist(), putting.tolist(), hashes, strict=True)

    def take_puts(self) -> NamedBlocks:
        """What is to be written, from the next step on."""
        puts, self._puts = self._puts, []
        return _named(puts)

    def put_done(self, host_blocks: Sequence[int], failed: Sequence[int]) -> None:
        """Blocks are in storage, or could not be written."""
        if not (host_blocks or failed):
            return
        self._putting_goes_on.heard()
        done = np.array([*host_blocks, *failed], dtype=np.int32)
        there = np.array([block for block in host_blocks if block not in self._put_too_early], dtype=np.int32)
        known = there[self._tree.host.are_attached(there)]  # the rest was forgotten meanwhile
        if len(known):
            self.stored.put(*self._tree.host.owners(known))
        self._putting.difference_update(done.tolist())
        self._put_too_early.difference_update(done.tolist())
        self._put += len(host_blocks)
        self._failed_puts += len(failed)
        self._pool.release(done)
        self._start_puts()

    # ---- storage to host ----

    @property
    def room(self) -> int:
        """Blocks that may be fetched now."""
        return 0 if self._fetching_goes_on.is_stalled else self._arrivals.room(len(self._fetching))

    def fetch(self, path: Sequence[bytes], wanted: NDArray[np.bool_], gained: int) -> Fetch:
        """Bring the blocks ``wanted [n, groups]`` of a path to the host; those on their way already come once.

        gained: tokens more that can be served then

        Raises ValueError if there are more than `room`.
        """
        fetch, arrivals = self._arrivals.expect(self, path, wanted, gained)
        self._fetching.update(arrival.block for arrival in arrivals)
        self._fetches += [(arrival.group, arrival.block, arrival.hash) for arrival in arrivals]
        return fetch

    def take_fetches(self) -> NamedBlocks:
        """What is to be fetched, from the next step on."""
        self._is_probing = False
        fetches, self._fetches = self._fetches, []
        return _named(fetches)

    def reported(self, came: Sequence[Arrival], missed: Sequence[Arrival]) -> None:
        """Blocks are on the host, or storage did not have them (any more)."""
        self._fetching_goes_on.heard()
        there, lacking = self._arrivals.end(came, missed)
        self._fetching.difference_update(arrival.block for arrival in (*there, *lacking))
        self._fetched += len(there)
        self._missed += len(lacking)
        for arrival in lacking:
            self.stored.missed(*arrival.key)

    def hit(self, tokens: int) -> None:
        self._hit_tokens += tokens

    def held_host_blocks(self) -> set[int]:
        """The host blocks that puts in flight hold."""
        return set(self._putting)


def _named(entries: Sequence[tuple[int, int, bytes]]) -> NamedBlocks:
    blocks = np.array([entry[:2] for entry in entries], dtype=np.int32).reshape(-1, 2)
    return NamedBlocks(blocks, tuple(entry[2] for entry in entries))
