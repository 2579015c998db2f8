"""Waiting requests' prefixes on their way from other engines' hosts to this one's.

    begin      room is made on the host, and the engine that the hint names is asked for a lease
    leased     what it holds for us is ordered from the workers, as it is told
    copied     when all copies are over the lease is ended, and its owner says whether it held
    held       then the blocks are known to the prefix tree; else, or after `timeout_s`, they are free again

A request waits for that, and not longer than ``timeout_s``. Whatever fails, it is computed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Arrival, Arrivals, Fetch
from headwise.cache_controller.cache_manager import CacheManager
from headwise.runtime.engine.peers.base import Peers
from headwise.runtime.engine.peers.lending import LEASE_BYTES, NO_GRANT
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.protocol.copies import PeerFetch
from headwise.runtime.protocol.messages import AskLease, EndLease, Leased, LeaseEnded, Prefill, RenewLease
from headwise.runtime.protocol.request import GenerateRequest, PeerHint, SamplingParams

MAX_LOADS = 128
"""Most leases that are asked for or read from at a time."""

MAX_PREFILL_S = 120.0
"""Longest that an owner may compute a prompt for us, whatever it says."""

ASK_SHARE, RENEW_SHARE = 0.1, 0.25
"""Shares of the timeout after which a question that was not answered is asked again, and a sign of life is given."""

MAX_RANKS, MAX_EXPORTS, MAX_EXPORT_BYTES = 1024, 8, 4096
"""What an owner may have: ranks, addresses of each, bytes of an address."""


@dataclass
class PeerCounts:
    """Since the start.

    asked, answered: leases that were asked for, and those that got any blocks
    unknown_hints:   hints of engines that are not known, or not with that cache
    leased_blocks:   blocks that owners held for this engine
    fetched_blocks, missed_blocks: blocks that came, and that did not or that could not be used
    hit_tokens:      tokens of prefixes that could be served because of what came
    given_up:        leases that had nothing of use, were not there in time, or did not hold
    """

    asked: int = 0
    answered: int = 0
    unknown_hints: int = 0
    leased_blocks: int = 0
    fetched_blocks: int = 0
    missed_blocks: int = 0
    hit_tokens: int = 0
    given_up: int = 0


@dataclass(eq=False)
class _Load:
    """A lease, and what comes by it.

    waits:   for the owner to lease them, by column and group
    ordered: being copied
    copied, failed: by all workers, or not by one of them
    grant:   of the lease; None: not heard yet
    heard:   blocks of the lease that the owner has told of
    is_over: nothing more is wanted of it, and what comes is missed
    """

    name: bytes
    engine: str
    epoch: int
    ask: AskLease | Prefill
    since: float
    until: float
    say_at: float
    waits: dict[tuple[int, int], Arrival]
    ordered: set[Arrival] = field(default_factory=set)
    copied: list[Arrival] = field(default_factory=list)
    failed: list[Arrival] = field(default_factory=list)
    grant: int | None = None
    heard: int = 0
    is_all: bool = False
    is_over: bool = False

    @property
    def prefills(self) -> bool:
        """Whether the owner computes what it leases: that takes its time, as long as there are signs of life."""
        return isinstance(self.ask, Prefill)

    @property
    def is_copied(self) -> bool:
        """Whether all is there that will come, as far as the copies go."""
        return self.is_all and not self.ordered

    def arrivals(self) -> list[Arrival]:
        return [*self.waits.values(), *self.ordered, *self.copied, *self.failed]


@dataclass(eq=False)
class _Waiting:
    """A sequence that is held back, and until when at most. load: by which an owner computes its prompt, if one does"""

    sequence: Sequence
    fetch: Fetch
    until: float
    load: _Load | None = None

    def is_over(self, now: float) -> bool:
        is_computed = self.load is not None and not self.load.is_over
        return not self.fetch.left or (now > self.until and not is_computed)


class PeerLoads:
    """timeout_s: longest that a request waits, and that an owner is believed to be there without a word"""

    def __init__(self, cache: CacheManager, arrivals: Arrivals, peers: Peers, timeout_s: float) -> None:
        self.counts = PeerCounts()
        self._cache, self._arrivals, self._peers = cache, arrivals, peers
        self._timeout_s = timeout_s
        self._loads: dict[bytes, _Load] = {}
        self._load_of: dict[Arrival, _Load] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._orders: list[tuple[tuple[tuple[bytes, ...], ...], list[tuple[int, int, int, int]]]] = []

    @property
    def held(self) -> list[Sequence]:
        """The sequences that are held back."""
        return [waiting.sequence for waiting in self._waiting.values()]

    @property
    def num_held(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step should be sent to start copies, or to bring word of them."""
        return bool(self._orders) or any(load.ordered for load in self._loads.values())

    def stats(self) -> dict[str, Any]:
        return {**asdict(self.counts), "loads": len(self._loads), "waiting": self.num_held}

    # ---- requests ----

    def begin(self, sequence: Sequence, now: float) -> bool:
        """Ask for what the device and the host lack of a sequence's prefix, if it comes with a hint and that is faster
        than computing; whether to hold the sequence back."""
        hint = sequence.request.peer
        if hint is None:
            return False
        if not self._peers.knows(hint.engine, hint.epoch):
            self.counts.unknown_hints += 1
            return False
        size = self._cache.block_size
        path = tuple(sequence.block_hashes(min(sequence.servable, max(0, hint.tokens)), size))
        wanted, gained = self._cache.lacking(path, np.ones((len(path), self._num_groups), np.bool_), self.room)
        prefills = hint.prefills and not sequence.request.extra_keys  # of which the other engine would need embeddings
        if not gained or not (prefills or self._is_worth_it(hint, int(np.count_nonzero(wanted)), gained)):
            return False
        path = path[: len(wanted)]
        if len(self._loads) >= MAX_LOADS and not self._arrivals.are_coming(path, self._num_groups)[wanted].all():
            return False
        fetch, arrivals = self._arrivals.expect(self, path, wanted, gained)
        waiting = self._waiting[sequence.id] = _Waiting(sequence, fetch, now + self._timeout_s)
        if arrivals:
            name = secrets.token_bytes(LEASE_BYTES)
            wanted = _places(arrivals, len(path), self._num_groups)
            ask: AskLease | Prefill = AskLease(name, hint.epoch, b"".join(path), wanted)
            if prefills:
                ask = Prefill(name, hint.epoch, _prompt_of(sequence, len(path) * size), wanted)
            self._ask(hint.engine, ask, arrivals, now)
        loads = [self._load_of.get(arrival) for arrival in self._arrivals.awaited(fetch)]
        waiting.load = next((load for load in loads if load is not None and load.prefills), None)
        return True

    def fetch(self, engine: str, epoch: int, path: Items[bytes], wanted: NDArray[np.bool_], now: float) -> Fetch | None:
        """Ask an engine for the blocks ``wanted [n, groups]`` of a path, for no request yet; None: too much is asked
        for already."""
        if len(self._loads) >= MAX_LOADS:
            return None
        fetch, arrivals = self._arrivals.expect(self, path, wanted, 0)
        if arrivals:
            wanted = _places(arrivals, len(path), self._num_groups)
            self._ask(engine, AskLease(secrets.token_bytes(LEASE_BYTES), epoch, b"".join(path), wanted), arrivals, now)
        return fetch

    def _is_worth_it(self, hint: PeerHint, blocks: int, tokens: int) -> bool:
        return not hint.prefills and self._cache.costs.is_worth_asking(blocks, tokens)

    @property
    def _num_groups(self) -> int:
        return len(self._cache.policies)

    @property
    def room(self) -> int:
        """Blocks that may be asked for now."""
        return self._arrivals.room(len(self._load_of))

    def _ask(self, engine: str, ask: AskLease | Prefill, arrivals: Items[Arrival], now: float) -> None:
        waits = {(arrival.column, arrival.group): arrival for arrival in arrivals}
        load = _Load(ask.lease, engine, ask.epoch, ask, now, now + self._timeout_s, now, waits)
        self._loads[ask.lease] = load
        self._load_of.update(dict.fromkeys(arrivals, load))
        self.counts.asked += 1
        self._say(load, now)

    def advance(self, now: float) -> list[Sequence]:
        """Take in what owners have said, and say what is due; the sequences that need not be held back any longer."""
        for answer in self._peers.receive():
            load = self._loads.get(answer.lease)
            if load is not None and answer.epoch == load.epoch:
                self._take(load, answer, now)
        for load in list(self._loads.values()):
            if now > load.until:
                self._give_up(load)
            elif now >= load.say_at:
                self._say(load, now)
        over = [waiting for waiting in self._waiting.values() if waiting.is_over(now)]
        for waiting in over:
            del self._waiting[waiting.sequence.id]
        return [waiting.sequence for waiting in over]

    def forget(self, sequence: Sequence) -> None:
        """A sequence waits no more. What is being copied still comes; what nobody else waits for is not asked for."""
        waiting = self._waiting.pop(sequence.id, None)
        if waiting is None:
            return
        for arrival in self._arrivals.leave(waiting.fetch):
            load = self._load_of.get(arrival)
            if load is None or (load.ordered and not load.prefills):
                continue
            if not any(each.waiting for each in load.arrivals()):
                self._give_up(load)

    # ---- what owners say, and what they are told ----

    def _say(self, load: _Load, now: float) -> None:
        """What the owner must hear next, be it again: the question, a sign of life, or the end."""
        share = ASK_SHARE
        if load.grant is None:
            self._peers.send(load.engine, load.ask)
        elif load.is_copied:
            self._peers.send(load.engine, EndLease(load.name, load.epoch, load.grant))
        else:
            self._peers.send(load.engine, RenewLease(load.name, load.epoch, load.heard))
            share = RENEW_SHARE
        load.say_at = now + share * self._timeout_s

    def _take(self, load: _Load, answer: Leased | LeaseEnded, now: float) -> None:
        if isinstance(answer, LeaseEnded):
            if answer.held and answer.grant == load.grant and load.is_copied and not load.is_over:
                self._finish(load, load.copied, load.failed)
            else:
                self._give_up(load)
        elif load.grant not in (None, answer.grant) or not _is_sane(answer):
            self._give_up(load)  # the lease had ended, and is another one now
        elif not load.is_all and not load.is_over:
            self._leased(load, answer, now)

    def _leased(self, load: _Load, answer: Leased, now: float) -> None:
        """The owner holds blocks for us: have the workers copy those that were not told of before."""
        load.grant = answer.grant
        if load.prefills:
            load.until = min(now + self._timeout_s, load.since + MAX_PREFILL_S)
        if answer.first > load.heard:  # what came between was lost
            self._say(load, now)
            return
        new = answer.blocks[load.heard - answer.first :].tolist()
        self.counts.answered += not load.heard and bool(new)
        load.heard += len(new)
        load.is_all = answer.is_all
        placed = [(load.waits.get((column, group)), group, block) for column, group, block in new]
        of_use = [(arrival, group, block) for arrival, group, block in placed if arrival is not None]
        if load.is_all and not load.ordered and not load.copied and not self._would_gain(load, of_use):
            self._give_up(load)
            return
        for arrival, _, _ in of_use:
            del load.waits[arrival.column, arrival.group]
        self._order(load, answer.exports, of_use)
        if load.is_all:
            self._miss(list(load.waits.values()))  # the owner has not got them
            load.waits.clear()
            self._go_on(load)

    def _would_gain(self, load: _Load, leased: Items[tuple[Arrival, int, int]]) -> bool:
        """Whether what is leased at once, and nothing else of it, lets more be served."""
        if not leased:
            return False
        path = leased[0][0].path
        there = _places([arrival for arrival, _, _ in leased], len(path), self._num_groups)
        elsewhere = self._arrivals.are_coming(path, self._num_groups)
        for column, group in load.waits:
            elsewhere[column, group] = False
        return self._cache.would_gain(path, there | elsewhere)

    def _order(
        self, load: _Load, exports: tuple[tuple[bytes, ...], ...], leased: Items[tuple[Arrival, int, int]]
    ) -> None:
        if not leased:
            return
        self.counts.leased_blocks += len(leased)
        load.ordered.update(arrival for arrival, _, _ in leased)
        self._orders.append(
            (exports, [(group, block, arrival.group, arrival.block) for arrival, group, block in leased])
        )

    def _go_on(self, load: _Load) -> None:
        """Once all copies are over: have it asked whether the lease has held, or be done if that does not matter."""
        if load.ordered or not (load.is_all or load.is_over):
            return
        if load.is_over or not load.copied:
            self._give_up(load)
        else:
            load.say_at = -math.inf

    # ---- copies ----

    def take_fetches(self) -> tuple[PeerFetch, ...]:
        """What the workers are to copy, from the next step on."""
        orders, self._orders = self._orders, []
        return tuple(PeerFetch(exports, np.array(blocks, dtype=np.int32)) for exports, blocks in orders)

    def reported(self, came: Items[Arrival], missed: Items[Arrival]) -> None:
        """All workers have copied what ``came``, and one at least could not copy what it ``missed``."""
        loads = {self._load_of[arrival]: None for arrival in (*came, *missed)}
        for arrival in came:
            self._load_of[arrival].copied.append(arrival)
        for arrival in missed:
            self._load_of[arrival].failed.append(arrival)
        for load in loads:
            load.ordered.difference_update(load.copied, load.failed)
            self._go_on(load)

    def hit(self, tokens: int) -> None:
        self.counts.hit_tokens += tokens

    # ---- the end of a load ----

    def _give_up(self, load: _Load) -> None:
        """Use nothing of it. What workers still write to stays held until they are through."""
        if not load.is_over:
            load.is_over = True
            self.counts.given_up += 1
            if load.grant != NO_GRANT:
                self._peers.send(load.engine, EndLease(load.name, load.epoch, load.grant or NO_GRANT))
        self._miss([*load.waits.values(), *load.copied, *load.failed])
        load.waits.clear()
        load.copied, load.failed = [], []
        load.until = load.say_at = math.inf
        if not load.ordered:
            self._finish(load, (), ())

    def _finish(self, load: _Load, came: Items[Arrival], missed: Items[Arrival]) -> None:
        there, lacking = self._arrivals.end(came, missed)
        self._count(there, lacking)
        del self._loads[load.name]

    def _miss(self, arrivals: Items[Arrival]) -> None:
        self._count(*self._arrivals.end((), arrivals))

    def _count(self, there: Items[Arrival], lacking: Iterable[Arrival]) -> None:
        self.counts.fetched_blocks += len(there)
        for arrival in there:
            del self._load_of[arrival]
        for arrival in lacking:
            self.counts.missed_blocks += 1
            del self._load_of[arrival]


def _places(arrivals: Items[Arrival], columns: int, groups: int) -> NDArray[np.bool_]:
    places = np.zeros((columns, groups), dtype=np.bool_)
    for arrival in arrivals:
        places[arrival.column, arrival.group] = True
    return places


def _prompt_of(sequence: Sequence, tokens: int) -> GenerateRequest:
    """The first of a sequence's tokens, as a prompt."""
    request = sequence.request
    return replace(
        request,
        prompt_token_ids=sequence.tokens(0, tokens),
        sampling=SamplingParams(),
        output_token_ids=(),
        prompt_told=0,
        peer=None,
    )


def _is_sane(answer: Leased) -> bool:
    """Whether blocks and addresses are what they must be. Whether they can be read, readers find out."""
    blocks = answer.blocks
    return (
        answer.first >= 0
        and blocks.ndim == 2
        and blocks.shape[1] == 3
        and len(answer.exports) <= MAX_RANKS
        and all(
            len(of_rank) <= MAX_EXPORTS and all(len(address) <= MAX_EXPORT_BYTES for address in of_rank)
            for of_rank in answer.exports
        )
    )
