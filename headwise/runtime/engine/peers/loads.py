"""Waiting requests' prefixes on their way from other engines to this one's host.

    begin      room is made on the host, and the engine that the hint names is asked for a lease
    leased     what it holds for us is ordered from the workers, as it is told
    copied     when all copies are over the lease is ended, and its owner says whether it held
    held       then the blocks are known to the prefix tree; else they are free again

A request waits for that as long as it gets on (`Load.until`): not longer than ``timeout_s`` without news, and at all
not longer than `timeout_s` and what computing would take. What has come by then is kept, if the owner says in time that
the lease held. Whatever fails, it is computed.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Arrival, Arrivals, Fetch
from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.head_exchange import HeadExchange
from headwise.cache_controller.memories import DEVICE
from headwise.errors import ConfigError, first_line
from headwise.runtime.engine.peers.base import LeaseAnswer, Peers
from headwise.runtime.engine.peers.copy_queue import CopyQueue
from headwise.runtime.engine.peers.devices import OtherDevices
from headwise.runtime.engine.peers.lending import LEASE_BYTES, NO_GRANT
from headwise.runtime.engine.peers.load import Load, OwnerGroups, Piece, is_sane
from headwise.runtime.engine.peers.parts import Part, Parts
from headwise.runtime.engine.peers.waiting import Waiting, prompt_of
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.protocol.copies import PeerFetch
from headwise.runtime.protocol.embed_parts import part_at
from headwise.runtime.protocol.lease_messages import (
    AskLease,
    EndLease,
    Leased,
    LeaseEmbeds,
    LeaseEnded,
    LeaseWants,
    RenewLease,
)
from headwise.runtime.protocol.prompt_items import PromptEmbeds, embed_places

log = logging.getLogger(__name__)

MAX_LOADS = 128
"""Most leases that are asked for or read from at a time."""

MAX_LOAD_S = 120.0
"""Longest that a request waits, for all parts of its prefix together; also if an owner computes it, whatever that says.
"""

ASK_SHARE, RENEW_SHARE = 0.1, 0.25
"""Shares of the timeout after which a question that was not answered is asked again, and a sign of life is given."""


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


class PeerLoads:
    """exchange:  with engines of so many ranks. Raises ValueError or `ConfigError` if there is none with such engines
    timeout_s: longest that a request waits without anything coming on
    ways:      how all workers can read devices' memory, as `ways_to_devices`; none: they cannot
    """

    def __init__(
        self,
        cache: CacheManager,
        arrivals: Arrivals,
        peers: Peers,
        exchange: Callable[[int], HeadExchange],
        timeout_s: float,
        ways: tuple[str, ...] = (),
    ) -> None:
        self.counts = PeerCounts()
        self._cache, self._arrivals, self._peers, self._exchange = cache, arrivals, peers, exchange
        self._timeout_s, self._devices = timeout_s, OtherDevices(ways)
        self._owners: dict[int, OwnerGroups | None] = {}  # by ranks; None: blocks cannot be exchanged with those
        self._parts = Parts(cache, arrivals)
        self._loads: dict[bytes, Load] = {}
        self._load_of: dict[Arrival, Load] = {}
        self._waiting: dict[str, Waiting] = {}
        self._orders: list[tuple[tuple[tuple[bytes, ...], ...], list[tuple[int, ...]]]] = []
        self._queue = CopyQueue()

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
        return bool(self._orders) or any(load.ordered or load.late for load in self._loads.values())

    def stats(self) -> dict[str, Any]:
        return {**asdict(self.counts), "loads": len(self._loads), "waiting": self.num_held}

    # ---- requests ----

    def begin(self, sequence: Sequence, now: float) -> bool:
        """Ask for what the device and the host lack of a sequence's prefix, if it comes with a hint and that is faster
        than computing; whether to hold the sequence back."""
        hint = sequence.request.peer
        if hint is None or (hint.prefills and sequence.lacks):  # another one could not compute what has no embeddings
            return False
        owner = self._groups_of(hint.engine, hint.epoch)
        if owner is None:
            self.counts.unknown_hints += 1
            return False
        servable = min(sequence.servable, max(0, hint.tokens))
        path = tuple(sequence.block_hashes(servable, self._cache.block_size))
        waiting = Waiting(sequence, hint, owner, path, now + self._longest_s(len(path), hint.prefills))
        if not self._ask_more(waiting, now):
            return False
        self._waiting[sequence.id] = waiting
        return True

    def _longest_s(self, num_columns: int, prefills: bool) -> float:
        """How long a request waits for so many token blocks at most."""
        if prefills:
            return MAX_LOAD_S
        return min(MAX_LOAD_S, self._timeout_s + self._cache.costs.computing_s(num_columns * self._cache.block_size))

    def _groups_of(self, engine: str, epoch: int) -> OwnerGroups | None:
        """How the blocks of an engine make up ours; None: it is not known, or they do not."""
        if not self._peers.knows(engine, epoch):
            return None
        ranks = self._peers.tp_size(engine)
        if ranks not in self._owners:
            try:
                self._owners[ranks] = OwnerGroups.of(self._exchange(ranks), self._arrivals.num_blocks)
            except (ValueError, ConfigError) as error:
                log.warning("no blocks are asked of engines with %d ranks: %s", ranks, first_line(error))
                self._owners[ranks] = None
        return self._owners[ranks]

    def _ask_more(self, waiting: Waiting, now: float) -> bool:
        """Ask for the next part of what a sequence lacks; False: there is none, or it is not worth it, or not now."""
        hint, groups = waiting.hint, self._parts.num_groups
        part = self._next_part(waiting)
        if part is None:
            return False
        path = waiting.path[: len(part.wanted)]
        if len(self._loads) >= MAX_LOADS and not self._arrivals.are_coming(path, groups)[part.wanted].all():
            return False
        waiting.fetch, arrivals = self._arrivals.expect(self, path, part.wanted, part.gained)
        waiting.until = min(now + self._timeout_s, waiting.limit)
        waiting.asked += int(np.count_nonzero(part.wanted))
        if arrivals:
            wanted = waiting.owner.of_ours(_places(arrivals, len(path), groups))
            ask = self._question(hint.engine, hint.epoch, b"", wanted, now)
            embeds: tuple[PromptEmbeds, ...] = ()
            if hint.prefills:
                prompt = prompt_of(waiting.sequence, len(path) * self._cache.block_size)
                embeds = prompt.embeds
                ask = replace(ask, prompt=replace(prompt, embeds=()), embeds=embed_places(embeds))
            else:
                ask = replace(ask, hashes=b"".join(path))
            is_part = not part.is_all
            self._ask(hint.engine, waiting.owner, ask, arrivals, now, waiting.limit, is_part=is_part, embeds=embeds)
        loads = [self._load_of.get(arrival) for arrival in self._arrivals.awaited(waiting.fetch)]
        waiting.loads = tuple(dict.fromkeys(load for load in loads if load is not None))
        return True

    def fetch(self, engine: str, epoch: int, path: Items[bytes], wanted: NDArray[np.bool_], now: float) -> Fetch | None:
        """Ask an engine for the blocks ``wanted [n, groups]`` of a path, for no request yet; None: too much is asked
        for already, or it is not known any more."""
        owner = self._groups_of(engine, epoch)
        if owner is None or len(self._loads) >= MAX_LOADS:
            return None
        fetch, arrivals = self._arrivals.expect(self, path, wanted, 0)
        if arrivals:
            wanted = owner.of_ours(_places(arrivals, len(path), self._parts.num_groups))
            ask = self._question(engine, epoch, b"".join(path), wanted, now)
            self._ask(engine, owner, ask, arrivals, now, now + MAX_LOAD_S)
        return fetch

    def takes_from(self, engine: str, epoch: int) -> bool:
        """Whether an engine is known, and its blocks are of use here."""
        return self._groups_of(engine, epoch) is not None

    def room_from(self, engine: str, epoch: int) -> int:
        """Blocks that an engine may be asked for at once."""
        owner = self._groups_of(engine, epoch)
        return 0 if owner is None else min(self.room, owner.most)

    @property
    def room(self) -> int:
        """Blocks that may be asked for now."""
        return self._arrivals.room(len(self._load_of))

    def _next_part(self, waiting: Waiting) -> Part | None:
        next_part = self._parts.to_compute if waiting.hint.prefills else self._parts.to_fetch
        return next_part(waiting.path, waiting.asked, self.room, waiting.owner.most)

    def _question(self, engine: str, epoch: int, hashes: bytes, wanted: NDArray[np.bool_], now: float) -> AskLease:
        return AskLease(
            secrets.token_bytes(LEASE_BYTES), epoch, hashes, wanted, ways=self._devices.ways_to(engine, now)
        )

    def _ask(
        self,
        engine: str,
        owner: OwnerGroups,
        ask: AskLease,
        arrivals: Items[Arrival],
        now: float,
        limit: float,
        *,
        is_part: bool = False,
        embeds: tuple[PromptEmbeds, ...] = (),
    ) -> None:
        waits = {(arrival.column, arrival.group): arrival for arrival in arrivals}
        load = Load(engine, ask, owner, now, limit, now, waits, is_part, embeds)
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
        self._queue.advance(now)
        for load in list(self._loads.values()):
            if now > load.until(self._timeout_s, is_queued=self._queue.is_behind(load)):
                self._end_early(load, now)
            elif now >= load.say_at:
                self._say(load, now)
        over = [waiting for waiting in self._waiting.values() if waiting.is_over(now)]
        over = [waiting for waiting in over if not self._goes_on(waiting, now)]
        for waiting in over:
            del self._waiting[waiting.sequence.id]
        return [waiting.sequence for waiting in over]

    def _goes_on(self, waiting: Waiting, now: float) -> bool:
        """Ask for the next part, if all of this one has come; whether there is one."""
        has_come = not waiting.fetch.left and not waiting.fetch.missed
        is_known = self._peers.knows(waiting.hint.engine, waiting.hint.epoch)
        return has_come and is_known and now < waiting.limit and self._ask_more(waiting, now)

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

    def _say(self, load: Load, now: float) -> None:
        """What the owner must hear next, be it again: the question, a sign of life, or the end."""
        share = ASK_SHARE
        if load.grant is None:
            self._peers.send(load.engine, load.ask)
            load.told = None
        elif load.is_copied:
            self._peers.send(load.engine, EndLease(load.name, load.epoch, load.grant))
        else:
            self._peers.send(load.engine, RenewLease(load.name, load.epoch, load.heard))
            share = RENEW_SHARE
        load.say_at = now + share * self._timeout_s

    def _take(self, load: Load, answer: LeaseAnswer, now: float) -> None:
        if isinstance(answer, LeaseWants):
            self._tell_embeds(load, (answer.start, answer.first), now)
        elif isinstance(answer, LeaseEnded):
            if answer.held and answer.grant == load.grant and load.is_copied and not load.is_over:
                self._finish(load, load.copied, load.failed)
            else:
                self._give_up(load)
        elif load.grant not in (None, answer.grant) or not is_sane(answer, load.owner.ranks):
            self._give_up(load)  # the lease had ended, and is another one now
        elif not load.is_all and not load.is_over:
            self._leased(load, answer, now)

    def _tell_embeds(self, load: Load, wanted: tuple[int, int], now: float) -> None:
        """The owner wants the embeddings from there on. Once is enough: what is lost is asked for again."""
        part = part_at("", load.embeds, *wanted)
        if part is None or wanted == load.told or load.grant is not None or load.is_over:
            return
        load.told, load.moved, load.say_at = wanted, now, now + RENEW_SHARE * self._timeout_s
        self._peers.send(load.engine, LeaseEmbeds(load.name, load.epoch, part.start, part.first, part.values))

    def _leased(self, load: Load, answer: Leased, now: float) -> None:
        """The owner holds blocks for us: have the workers copy those that were not told of before."""
        load.grant = answer.grant
        if load.prefills:  # it computes still, else it would say nothing
            load.moved = now
        if answer.first > load.heard:  # what came between was lost
            self._say(load, now)
            return
        new = answer.blocks[load.heard - answer.first :].tolist()
        self.counts.answered += not load.heard and bool(new)
        if new:
            load.heard, load.moved = load.heard + len(new), now
        load.is_all = answer.is_all
        leased = load.leased(new)
        if load.is_all and not load.ordered and not load.copied and not self._would_gain(load, leased):
            load.failed += [arrival for arrival, _ in leased]
            self._give_up(load)
            return
        self._order(load, answer.exports, leased)
        if load.is_all:
            self._miss(list(load.waits.values()))  # the owner has not got them
            load.waits.clear()
            self._go_on(load)

    def _would_gain(self, load: Load, leased: Items[tuple[Arrival, list[Piece]]]) -> bool:
        """Whether what is leased at once, and nothing else of it, lets more be served, if need be with later parts."""
        if not leased or (load.is_part and not load.waits):
            return bool(leased)
        path, groups = leased[0][0].path, self._parts.num_groups
        there = _places([arrival for arrival, _ in leased], len(path), groups)
        elsewhere = self._arrivals.are_coming(path, groups)
        for column, group in load.waits:
            elsewhere[column, group] = False
        return self._cache.gain(path, there | elsewhere) > 0

    def _order(
        self, load: Load, exports: tuple[tuple[bytes, ...], ...], leased: Items[tuple[Arrival, list[Piece]]]
    ) -> None:
        if not leased:
            return
        self.counts.leased_blocks += len(leased)
        load.ordered.update(arrival for arrival, _ in leased)
        self._queue.add(load, [arrival for arrival, _ in leased])
        rows: list[tuple[int, ...]] = [
            (theirs, block, arrival.group, arrival.block, memory)
            for arrival, parts in leased
            for theirs, block, memory in parts
        ]
        load.on_device.update(arrival for arrival, parts in leased if any(part[2] == DEVICE for part in parts))
        self._orders.append((exports, rows))

    def _go_on(self, load: Load) -> None:
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
        loads: dict[Load, list[Arrival]] = {}
        for arrival in (*came, *missed):
            loads.setdefault(self._load_of[arrival], []).append(arrival)
        for load, arrivals in loads.items():
            self._queue.reported(load, arrivals)
        for arrival in came:
            load = self._load_of[arrival]
            (load.failed if arrival in load.late else load.copied).append(arrival)
        for arrival in missed:
            load = self._load_of[arrival]
            load.failed.append(arrival)
            if arrival in load.on_device:
                self._devices.lost(load.engine)
        for load in loads:
            load.ordered.difference_update(load.copied, load.failed)
            load.late.difference_update(load.failed)
            self._go_on(load)

    def hit(self, tokens: int) -> None:
        self.counts.hit_tokens += tokens

    # ---- the end of a load ----

    def _end_early(self, load: Load, now: float) -> None:
        """It does not get on, or takes too long: use what has come, if its owner says in time that it held that."""
        if load.is_cut or not load.copied or load.is_over:
            self._give_up(load)
            return
        self._miss(list(load.waits.values()))
        load.cut(now, self._timeout_s)
        self._say(load, now)

    def _give_up(self, load: Load) -> None:
        """Use nothing of it. What workers still write to stays held until they are through."""
        if not load.is_over:
            load.is_over = True
            self.counts.given_up += 1
            if load.grant != NO_GRANT:
                self._peers.send(load.engine, EndLease(load.name, load.epoch, load.grant or NO_GRANT))
        self._miss([*load.waits.values(), *load.copied, *load.failed])
        load.waits.clear()
        load.copied, load.failed = [], []
        self._close(load)

    def _finish(self, load: Load, came: Items[Arrival], missed: Items[Arrival]) -> None:
        there, lacking = self._arrivals.end(came, missed)
        self._count(there, lacking)
        load.copied, load.failed = [], []
        load.is_over = True
        self._close(load)

    def _close(self, load: Load) -> None:
        """Nothing is wanted of it any more, and nobody told: it goes once nobody writes to what it was to bring."""
        load.limit = load.say_at = math.inf
        load.ordered |= load.late
        load.late.clear()
        if not load.ordered:
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
