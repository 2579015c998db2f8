"""A simulated cluster whose engines come and go: the real router, index and controller of elastic replicas.

An engine serves ``start_s`` after it was ordered, with an empty cache. One that goes gets no new requests, ends those
it has, and meanwhile writes the blocks that only it has into shared storage, most asked for first, at the storage's
speed, if it is full only as many as gain more than what goes for them (`headwise.storage.index.storable`); after
``drain_timeout_s`` what is left of both ends: its requests go on elsewhere, its blocks are lost. It is paid for from
the order to its end. With ``given`` the other engines take these blocks into their hosts, too: which, and who takes
which, is the real code's choice (`headwise.cache_controller.legacy`, `headwise.storage.index.allowances`).

What it leaves out, besides what `simulation.cluster` does: storage's bandwidth is each engine's own, and blocks that a
leaving engine computes last are written as if it had had them from the start.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.caches import Cache, Storage
from simulation.cluster import Engine
from simulation.machine import BLOCK, Hardware
from simulation.traced import Request

from headwise.cache_controller.legacy import Dealer, LeftPaths
from headwise.runtime.frontend.routing import RoutedRequest, Router
from headwise.runtime.frontend.scaling import Observation, Replica, ReplicaSet, ReplicaState, observe
from headwise.runtime.protocol.messages import STATUS_INTERVAL_S
from headwise.storage.index.allowances import allowances
from headwise.storage.index.hash_runs import split
from headwise.storage.index.prefix_index import PrefixIndex
from headwise.storage.index.storable import worth_storing

DECIDE_S = 1.0
COOL_S = 60.0
COOLING = 0.5 ** (COOL_S / 600.0)
"""What was asked for ten minutes ago counts half."""

VOLUME = "shared"
OWNER = "storage"
"""Whoever wrote it: blocks in storage outlive their writers."""


class LastingStorage(Storage):
    """What is in it stays known when its writer has gone."""

    def put(self, blocks: Iterable[bytes], writer: str) -> None:
        super().put(blocks, OWNER)


@dataclass(eq=False)
class Member:
    """An engine of the cluster. ``engine`` is None until it serves; ``began`` is when it was ordered."""

    name: str
    epoch: int
    began: float
    engine: Engine | None = None
    state: ReplicaState = ReplicaState.STARTING
    drained_at: float = 0.0


@dataclass
class View:
    """What a scaling policy of others may look at: exact numbers of this moment."""

    waiting: int
    ongoing: int
    serving: int
    first_tokens: Sequence[tuple[float, float]]  # when, and after how long; the last ones


Chooser = Callable[[View, float], int]
"""A policy of others: how many engines there should be now."""


@dataclass
class Served:
    """What came of it.

    engine_s: paid for
    counts:   engines that serve, at each decision
    kept:     of each engine that left: blocks that it wrote to storage, and all that only it had
    given:    blocks that others took into their hosts
    sole:     the blocks that only engines had that were told to go
    moved:    requests that went on elsewhere
    changes:  when the number changed, and why
    """

    engine_s: float = 0.0
    counts: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    given: int = 0
    sole: set[bytes] = field(default_factory=set)
    moved: int = 0
    changes: list[tuple[float, str]] = field(default_factory=list)


class ElasticCluster:
    """Serves requests with as many engines as a controller says.

    choose:   None: the controller's own decisions; else its number is set by hand to what this says
    handover: whether a leaving engine writes its blocks to storage
    by_worth: whether the engine to go is chosen by what its cache is worth
    given:    whether others take what a leaving engine has into their hosts, besides
    """

    def __init__(
        self,
        hardware: Hardware,
        router: Router,
        replicas: ReplicaSet,
        start_s: float,
        choose: Chooser | None = None,
        handover: bool = True,
        by_worth: bool = True,
        given: bool = False,
    ) -> None:
        self.hardware, self.router, self.replicas, self.start_s = hardware, router, replicas, start_s
        self.index = PrefixIndex()
        self.storage = LastingStorage(hardware.storage, self.index)
        self.index.set_volume(OWNER, VOLUME)
        self.served = Served()
        self._choose, self._handover, self._by_worth, self._given = choose, handover, by_worth, given
        self._parents: dict[bytes, bytes] = {}  # of blocks, the one before
        self._members: dict[str, Member] = {}
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._tie = itertools.count()
        self._planned: dict[str, float] = {}
        self._queue: deque[Request] = deque()
        self._epochs = itertools.count(1)
        self._first: dict[str, float] = {}  # of requests that were moved
        self._tokens: deque[tuple[float, float]] = deque(maxlen=200)
        self._left = 0
        self._cooled_at = 0.0

    # ---- time ----

    def serve(self, requests: Sequence[Request], begin: int) -> Served:
        """Serve all; ``begin`` engines serve when the first request comes."""
        self._left = len(requests)
        started = requests[0].arrived - DECIDE_S
        for number in range(begin):
            name = f"engine-{number}"
            self._members[name] = Member(name, next(self._epochs), started)
            self._start(started, self._members[name])
        for request in requests:
            self._at(request.arrived, self._arrive, request)
        self._at(started, self._decide, None)
        now = started
        while self._left:
            now, _, act, what = heapq.heappop(self._events)
            act(now, what)
        for member in self._members.values():
            self.served.engine_s += now - member.began
        return self.served

    def _at(self, when: float, act: Callable[[float, Any], None], what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._tie), act, what))

    # ---- requests ----

    def _arrive(self, now: float, request: Request) -> None:
        if self._queue or not self._dispatch(request, now):
            self._queue.append(request)

    def _dispatch(self, request: Request, now: float) -> bool:
        matches = self.index.match(b"".join(request.path))
        routed = RoutedRequest(request.name, request.path, request.num_tokens)
        choice = self.router.select_and_reserve(routed, matches, now)
        if choice is None:
            return False
        engine = self._members[choice.engine].engine
        assert engine is not None
        peer = self._members.get(choice.hint.engine) if choice.hint is not None else None
        engine.submit(request, now, None if peer is None else peer.engine)
        if self._given:
            self._parents.update(zip(request.path[1:], request.path, strict=False))
        self._advance(now, self._members[choice.engine])
        return True

    def _wake(self, now: float, member: Member) -> None:
        if self._planned.get(member.name) == now:
            del self._planned[member.name]
            self._advance(now, member)

    def _advance(self, now: float, member: Member) -> None:
        engine = member.engine
        if engine is None:
            return
        engine.advance(now)
        for request in engine.ended:
            request.first_token = self._first.pop(request.name, request.first_token)
            self._tokens.append((now, request.first_token - request.arrived))
            self._left -= 1
        engine.ended.clear()
        at = engine.next_event()
        if at != float("inf") and self._planned.get(member.name) != at:
            self._planned[member.name] = at
            self._at(at, self._wake, member)

    # ---- engines ----

    def _start(self, now: float, member: Member) -> None:
        if self._members.get(member.name) is not member:
            return  # cancelled
        self.index.set_volume(member.name, VOLUME)
        number = int(member.name.rpartition("-")[2])
        member.engine = Engine(number, self.hardware, Cache(member.name, self.hardware, self.storage, self.index))
        member.engine.now = now
        member.state = ReplicaState.RUNNING
        self._report(now, member)

    def _report(self, now: float, member: Member) -> None:
        """A status comes, and the next one is due; a member that has gone sends none."""
        if self._members.get(member.name) is not member or member.engine is None:
            return
        status = member.engine.status()
        accepts = member.state is ReplicaState.RUNNING
        self.router.update(replace(status, epoch=member.epoch, work=replace(status.work, accepts=accepts)), now)
        self.router.watch(now)
        while self._queue and self._dispatch(self._queue[0], now):
            self._queue.popleft()
        self._at(now + STATUS_INTERVAL_S, self._report, member)

    def _end(self, now: float, member: Member) -> None:
        """It is gone, and all that it had."""
        del self._members[member.name]
        self._planned.pop(member.name, None)
        self.served.engine_s += now - member.began
        self.index.drop(member.name)
        if member.name in self.router.table.rows:
            self.router.table.remove(member.name)
        if member.engine is not None:
            for request in _unfinished(member.engine):
                if request.first_token >= 0:
                    self._first.setdefault(request.name, request.first_token)
                self.served.moved += 1
                self._arrive(now, request)
            member.engine = None

    def _drain(self, now: float, member: Member) -> None:
        member.state, member.drained_at = ReplicaState.DRAINING, now
        self.served.sole.update(*(split(each.hashes) for each in self._sole(member)))
        self._report_draining(now, member)
        self._at(now + self.replicas.policy.drain_timeout_s, self._hand_over, member)
        self._hand_over_when_done(now, member)

    def _report_draining(self, now: float, member: Member) -> None:
        assert member.engine is not None
        status = member.engine.status()
        self.router.update(replace(status, epoch=member.epoch, work=replace(status.work, accepts=False)), now)

    def _hand_over_when_done(self, now: float, member: Member) -> None:
        if self._members.get(member.name) is not member or member.engine is None:
            return
        if member.engine.ongoing:
            self._at(now + STATUS_INTERVAL_S, self._hand_over_when_done, member)
            return
        speeds = [self.hardware.storage_token_s] * self._handover + [self.hardware.peer_token_s] * self._given
        block_s, blocks = BLOCK * max(speeds, default=0.0), sum(each.count for each in self._sole(member))
        self._at(max(now, member.drained_at + blocks * block_s), self._hand_over, member)

    def _leaving_beside(self, member: Member) -> list[str]:
        return [
            each.name for each in self._members.values() if each.state is ReplicaState.DRAINING and each is not member
        ]

    def _sole(self, member: Member) -> list[Any]:
        return self.index.sole_blocks(self._leaving_beside(member))[member.name]

    def _worth_storing(self, member: Member) -> int:
        """How many of its blocks, the most asked for first, gain more than what storage evicts for them."""
        return max(self.storage.room, worth_storing(self.index, member.name, self._leaving_beside(member)))

    def _hand_over(self, now: float, member: Member) -> None:
        """What could be written by now is in storage."""
        if self._members.get(member.name) is not member:
            return
        blocks = [block for each in self._sole(member) for block in split(each.hashes)]
        seconds = now - member.drained_at + 1e-6
        if self._given:
            self._give(member, seconds)
        written = int(seconds / (BLOCK * self.hardware.storage_token_s)) if self._handover else 0
        written = min(written, self._worth_storing(member))
        self.storage.put(reversed(blocks[:written]), member.name)  # the most asked for stay longest
        self.served.kept.append((min(written, len(blocks)), len(blocks)))
        self._end(now, member)

    def _give(self, member: Member, seconds: float) -> None:
        """The others take what only the leaving engine has, by the choice of `headwise`, as far as there is time."""
        assert member.engine is not None
        cache = member.engine.cache
        others = {
            name: each.engine.cache
            for name, each in self._members.items()
            if each.state is ReplicaState.RUNNING and each.engine is not None
        }
        leaving = [each.name for each in self._members.values() if each.state is ReplicaState.DRAINING]
        evict = allowances(self.index, member.name, list(others), [name for name in leaving if name != member.name])
        free = {name: self.hardware.host - len(other.host) for name, other in others.items()}
        dealer = Dealer({name: free[name] + evict[name] for name in others})
        blocks = [block for each in self._sole(member) for block in split(each.hashes)]
        paths = LeftPaths(blocks, self._parents.get, lambda path: cache.match(path, len(path))[1])
        left = int(seconds / (BLOCK * self.hardware.peer_token_s))
        while paths and left > 0:
            path = paths.take()
            taker = dealer.choose(path) if path else None
            if taker is None:
                continue
            depth = others[taker].match(path, len(path))[1]
            new = path[depth : min(len(path), depth + left, depth + free[taker] + evict[taker])]
            free[taker] -= len(new)
            if free[taker] < 0:
                free[taker], evict[taker] = 0, evict[taker] + free[taker]
            left -= len(new)
            cache.lend(path, depth, depth + len(new))
            others[taker].fetch(new)
            self.served.given += len(new)

    # ---- decisions ----

    def _decide(self, now: float, _: None) -> None:
        if now - self._cooled_at >= COOL_S:
            self._cooled_at = now
            self.index.cool(COOLING)
        if self._choose is not None:
            self.replicas.set_by_hand(self._choose(self._view(), now))
        there = [Replica(each.name, each.state, each.epoch) for each in self._members.values()]
        before = self.replicas.number
        cache = self.index if self._by_worth else None
        decision = self.replicas.decide(self._observe(now), there, now, cache)
        if decision.number != before:
            self.served.changes.append((now, decision.reason))
        for name in decision.start:
            if name not in self._members:
                member = self._members[name] = Member(name, next(self._epochs), now)
                self._at(now + self.start_s, self._start, member)
        for name in decision.cancel:
            self._end(now, self._members[name])
        for name in decision.drain:
            self._drain(now, self._members[name])
        self.served.counts.append(self._serving())
        self._at(now + DECIDE_S, self._decide, None)

    def _observe(self, now: float) -> Observation:
        tokens = sum(request.num_tokens for request in self._queue)
        return observe(self.router.table, self.router.options, now, len(self._queue), tokens)

    def _serving(self) -> int:
        return sum(each.state is ReplicaState.RUNNING for each in self._members.values())

    def _view(self) -> View:
        engines = [each.engine for each in self._members.values() if each.engine is not None]
        waiting = len(self._queue) + sum(len(each.waiting) + len(each.fetching) for each in engines)
        ongoing = len(self._queue) + sum(each.ongoing for each in engines)
        return View(waiting, ongoing, self._serving(), self._tokens)


def _unfinished(engine: Engine) -> list[Request]:
    """The requests of an engine that ends now, as another will get them: with what was generated in the prompt."""
    found = [*engine.waiting.items(), *(entry[2] for entry in engine.fetching), *engine.computing]
    for last_step, _, request in engine.decoding:
        generated = request.output - (last_step - engine.steps)
        request.num_tokens += generated
        request.output -= generated
        found.append(request)
    for request in found:
        request.held, request.reserved, request.left = [], 0, 0
        request.loaded_host = request.loaded_peer = request.loaded_storage = request.device = 0
    return sorted(found, key=lambda request: request.arrived)
