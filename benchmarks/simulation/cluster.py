"""Engines that serve a trace behind a scheduler, as discrete events: an hour of eight GPUs in some twenty seconds.

An engine computes prompts by their turns (`PromptTurns`), chunk by chunk, in steps that also decode all that runs.
Whose tokens are in a step is said by the real code (`headwise.runtime.engine.step_budget`), and how long it takes by a
roofline of the GPU (`simulation/gpu.py`). Between prompts it decodes; many equal steps are one event. Its cache: block
lists: device (what runs is held, the rest is least recently used), host (what the device evicts), and storage,
shared by all engines (what hosts evict). The unit of all caches is a block of the trace, 512 tokens. Engines may fetch
blocks from each other: one copy at a time into and out of each, and what only the owner's device has goes to its host.
Where a prompt is computed apart, its blocks are copied while the rest of it is computed.

What it leaves out: preemption (a request holds its blocks from the start), cached outputs (the trace does not tell
which blocks they are), and the network.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from simulation.caches import Cache
from simulation.machine import BLOCK, Hardware, StepTime
from simulation.traced import Request

from headwise.priority_queue import PriorityQueue
from headwise.runtime.engine.parts import turns_of
from headwise.runtime.engine.step_budget import left_for, shares
from headwise.runtime.protocol.messages import STATUS_INTERVAL_S, EngineLoad, EngineStatus

SMOOTHING = 0.2
"""Of the speeds that engines measure."""


class Engine:
    """Serves what is submitted; `advance` is called when the event comes that `next_event` names."""

    def __init__(self, number: int, hardware: Hardware, cache: Cache) -> None:
        self.number, self.name = number, f"engine-{number}"
        self.hardware, self.cache = hardware, cache
        self.time = StepTime(hardware.gpu, hardware.model)
        self.waiting: PriorityQueue[Request] = PriorityQueue()
        self.fetching: list[tuple[float, int, Request, list[bytes]]] = []
        self.copied_at = 0.0  # when copies to and from other engines will be over
        self.gaps: Counter[float] = Counter()  # seconds between two tokens of a sequence, to a tenth of a millisecond
        self.turns = turns_of(hardware.serving)
        self.computing: list[Request] = []  # by their order
        self.decoding: list[tuple[int, int, Request]] = []  # heap by the step of the last token
        self.context = 0
        self.steps = 0
        self.now = 0.0
        self.busy_s = 0.0
        self.received: list[str] = []
        self.ended: list[Request] = []
        self.prefill_token_s = self.decode_step_s = 0.0
        self._chunks: list[tuple[Request, int]] = []
        self._step_s = 0.0
        self._span = 0  # steps under way, from `now` on
        self._tie = itertools.count()
        self._fetched_at = 0.0

    # ---- from outside ----

    def receive(self, request: Request) -> None:
        """A request has come, whatever it has to wait for."""
        request.engine, request.number = self.number, next(self._tie)
        request.since = 0.0 if self.turns is None else self.turns.now
        self.received.append(request.name)

    def _queue(self, request: Request) -> None:
        """It waits for its turn alone."""
        self._take_turn(request, request.num_tokens - BLOCK * self.cache.match(request.path, _most(request))[1])
        self.waiting.push(request.order, request)

    def _take_turn(self, request: Request, lacking: int) -> None:
        if self.turns is not None:
            request.turn = self.turns.turn(request.since, lacking)

    def submit(self, request: Request, now: float, peer: Engine | None = None) -> None:
        self.receive(request)
        most, hardware = _most(request), self.hardware
        _, with_host, every = self.cache.match(request.path, most)
        reach, ready = with_host, now
        if peer is not None:
            reach = peer.cache.lend(request.path, with_host, most)
            request.loaded_peer = (reach - with_host) * BLOCK
            ready = self._copy_from(peer, request.loaded_peer, now)
            if every < most:
                every = max(reach, self.cache.match(request.path[reach:], most - reach)[2] + reach)
        if every > reach and self.prefill_token_s > hardware.host_token_s + hardware.storage_token_s:
            request.loaded_storage = (every - reach) * BLOCK
            self._fetched_at = max(self._fetched_at, now) + request.loaded_storage * hardware.storage_token_s
            reach, ready = every, max(ready, self._fetched_at)
        if reach > with_host:
            heapq.heappush(self.fetching, (ready, next(self._tie), request, request.path[with_host:reach]))
        else:
            self._queue(request)
        self._interrupt(now)

    def prefill(self, request: Request, target: Engine, now: float) -> None:
        """Compute a request's prompt, for another engine that decodes it."""
        path, tokens = request.path, request.num_tokens
        self.submit(Request(request.name, now, path, tokens, 1, target=(request, target)), now)

    def take_prefilled(self, prompt: Request, owner: Engine, now: float) -> None:
        """The owner has just computed the prompt: its last chunk is still to be copied, and more if the link is slower
        than the computing."""
        assert prompt.target is not None
        request, _ = prompt.target
        most, speed = _most(request), self.hardware.peer_token_s
        with_host = self.cache.match(request.path, most)[1]
        blocks = request.path[with_host : owner.cache.lend(request.path, with_host, most)]
        request.loaded_peer = len(blocks) * BLOCK
        end = max(self.copied_at, owner.copied_at, prompt.began) + request.loaded_peer * speed
        end = max(end, now + min(self.hardware.step_tokens, request.loaded_peer) * speed)
        self.copied_at = owner.copied_at = end
        heapq.heappush(self.fetching, (end, next(self._tie), request, blocks))
        self._interrupt(now)

    def _copy_from(self, peer: Engine, tokens: int, now: float) -> float:
        """When so many tokens of another engine's cache are here."""
        if tokens:
            end = max(self.copied_at, peer.copied_at, now) + tokens * self.hardware.peer_token_s
            self.copied_at = peer.copied_at = end
        return max(self.copied_at, now)

    def next_event(self) -> float:
        """When `advance` has something to do."""
        soonest = self.fetching[0][0] if self.fetching else float("inf")
        return min(soonest, self.now + self._span * self._step_s if self._span else float("inf"))

    def advance(self, now: float) -> None:
        """Let what is over by ``now`` be over, and begin what is next."""
        fetched = False
        while self.fetching and self.fetching[0][0] <= now:
            _, _, request, blocks = heapq.heappop(self.fetching)
            self.cache.fetch(blocks)
            self._queue(request)
            fetched = True
        if self._span and self.now + self._span * self._step_s <= now + 1e-12:
            self._finish_span()
        elif fetched:
            self._interrupt(now)
        if not self._span:
            self.now = max(self.now, now)
            self._begin_span()

    def status(self) -> EngineStatus:
        """What the engine would report now."""
        received, self.received = tuple(self.received), []
        match, most = self.cache.match, _most
        waiting = [*self.waiting.items(), *(entry[2] for entry in self.fetching)]
        coming = sum(BLOCK * len(entry[3]) for entry in self.fetching)
        queued = sum(each.num_tokens - BLOCK * match(each.path, most(each))[1] for each in waiting) - coming
        work = EngineLoad(
            waiting=len(waiting),
            running=len(self.computing) + len(self.decoding),
            queued_tokens=queued + sum(each.left for each in self.computing),
            used_blocks=min(self.cache.used, self.hardware.device),
            total_blocks=self.hardware.device,
            prefill_token_s=self.prefill_token_s,
            decode_step_s=self.decode_step_s,
            host_token_s=self.hardware.host_token_s,
            storage_token_s=self.hardware.storage_token_s,
            peer_token_s=self.hardware.peer_token_s,
            held_back=len(self.fetching),
        )
        return EngineStatus("", self.name, f"tcp://{self.name}", work.waiting + work.running, {}, 1, work, received)

    @property
    def ongoing(self) -> int:
        return len(self.waiting) + len(self.fetching) + len(self.computing) + len(self.decoding)

    @property
    def work_left(self) -> int:
        """Tokens of prompts to compute."""
        waiting = self.waiting.items()
        queued = sum(each.num_tokens - BLOCK * self.cache.match(each.path, _most(each))[0] for each in waiting)
        return queued + sum(each.left for each in self.computing)

    # ---- steps ----

    def _interrupt(self, now: float) -> None:
        """Something is to be started: a run of decode steps ends with the step that is under way."""
        if self._span and not self._chunks:
            done = int((now - self.now) / self._step_s) + 1
            self._span = min(self._span, done)

    def _begin_span(self) -> None:
        self._admit()
        places, counts = shares(*self._wanted(), self._step_tokens)
        self._chunks = [(self.computing[place], count) for place, count in zip(places, counts.tolist(), strict=True)]
        begun = [request for request, _ in self._chunks if request.left == request.num_tokens - request.computed]
        load_s = sum(request.loaded for request in begun) * self.hardware.host_token_s
        if not self._chunks and not self.decoding:
            self._span = 0
            return
        samples = len(self.decoding) + sum(count == request.left for request, count in self._chunks)
        spans = [(request.num_tokens - request.left, count) for request, count in self._chunks]
        compute_s = self.time.seconds(spans, len(self.decoding), self.context, samples)
        tokens = sum(count for _, count in spans)
        if tokens > len(self.decoding):
            self.prefill_token_s = _smooth(self.prefill_token_s, compute_s / (tokens + len(self.decoding)))
        elif not tokens:
            self.decode_step_s = _smooth(self.decode_step_s, compute_s)
        self._step_s = max(compute_s, load_s)  # layer by layer
        self._span = 1 if self._chunks else self.decoding[0][0] - self.steps
        if self._chunks:
            self.busy_s += self._step_s

    def _admit(self) -> None:
        """Start what waits, in order, as far as a step's tokens and the device go."""
        while self.ongoing - len(self.waiting) < self.hardware.max_num_seqs:
            request = self.waiting.first
            if request is None:
                return
            place = bisect.bisect(self.computing, request.order, key=lambda other: other.order)
            if left_for(place, *self._wanted(), self._step_tokens) <= 0:
                return
            device, with_host, _ = self.cache.match(request.path, _most(request))
            if self.hardware.host_token_s >= self.prefill_token_s > 0:
                with_host = device
            if not self.cache.hold(request, device):
                return
            self.waiting.pop()
            request.device = device * BLOCK
            loaded = (with_host - device) * BLOCK
            request.loaded_peer = min(request.loaded_peer, loaded)
            request.loaded_storage = min(request.loaded_storage, loaded - request.loaded_peer)
            request.loaded_host = loaded - request.loaded_peer - request.loaded_storage
            request.computed = with_host * BLOCK
            request.left = request.num_tokens - request.computed
            request.began = self.now
            self._take_turn(request, request.left)
            bisect.insort(self.computing, request, key=lambda other: other.order)

    @property
    def _step_tokens(self) -> int:
        """Of a step, what is left for prompts: all that runs decodes in each."""
        return self.hardware.step_tokens - len(self.decoding)

    def _wanted(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """As `left_for` and `shares` take it, of the prompts that are computed."""
        left = np.array([each.left for each in self.computing], dtype=np.int64)
        return np.minimum(left, self.hardware.serving.prefill_chunk), np.zeros(len(self.computing), np.bool_)

    def _finish_span(self) -> None:
        self.now += self._span * self._step_s
        self.gaps[round(self._step_s, 4)] += self._span * len(self.decoding)
        self.steps += self._span
        self.context += self._span * len(self.decoding)
        while self.decoding and self.decoding[0][0] <= self.steps:
            self._end(heapq.heappop(self.decoding)[2])
        if self.turns is not None:
            parts = len(self.waiting) + len(self.computing)
            self.turns.computed(sum(count for _, count in self._chunks), parts)
        for request, count in self._chunks:
            request.left -= count
            if not request.left:
                self.computing.remove(request)
                self.cache.computed(request)
                request.first_token = self.now
                self.context += request.num_tokens
                if request.output > 1:
                    heapq.heappush(self.decoding, (self.steps + request.output - 1, next(self._tie), request))
                else:
                    self._end(request)
        self._span, self._chunks = 0, []

    def _end(self, request: Request) -> None:
        request.ended = self.now
        self.context -= request.num_tokens + request.output - 1
        self.cache.release(request)
        self.ended.append(request)


class Dispatcher(Protocol):
    """A policy under test."""

    def route(self, request: Request, now: float) -> int | None:
        """The engine of a request; None: none can take it, ask again after the next status."""
        ...

    def report(self, engine: Engine, now: float) -> None:
        """An engine's status is due."""
        ...


def serve(requests: Sequence[Request], engines: Sequence[Engine], dispatcher: Dispatcher) -> list[list[float]]:
    """Serve all requests; per status interval, what each engine has spent on prompts by then, in seconds."""
    events: list[tuple[float, int, str, Any]] = [
        (request.arrived, i, "arrival", request) for i, request in enumerate(requests)
    ]
    tie = itertools.count(len(events))
    for engine in engines:
        offset = STATUS_INTERVAL_S * engine.number / len(engines)
        events.append((requests[0].arrived - STATUS_INTERVAL_S + offset, next(tie), "status", engine))
    heapq.heapify(events)
    planned: dict[int, float] = {}
    queue: deque[Request] = deque()
    spent: list[list[float]] = []

    def plan(engine: Engine) -> None:
        at = engine.next_event()
        if at != float("inf") and planned.get(engine.number) != at:
            planned[engine.number] = at
            heapq.heappush(events, (at, next(tie), "engine", engine))

    def dispatch(request: Request, now: float) -> bool:
        number = dispatcher.route(request, now)
        if number is None:
            return False
        engine, peer = engines[number], engines[request.peer] if request.peer >= 0 else None
        if request.is_apart and peer is not None:
            engine.receive(request)
            peer.prefill(request, engine, now)
            engine = peer
        else:
            engine.submit(request, now, peer)
        engine.advance(now)
        plan(engine)
        return True

    def end(engine: Engine, now: float) -> int:
        """How many requests have ended there."""
        ended = 0
        for request in engine.ended:
            if request.target is None:
                ended += 1
            else:
                target = request.target[1]
                target.take_prefilled(request, engine, now)
                plan(target)
        engine.ended.clear()
        return ended

    left = len(requests)
    while left:
        now, _, kind, what = heapq.heappop(events)
        if kind == "arrival":
            if queue or not dispatch(what, now):
                queue.append(what)
        elif kind == "engine":
            if planned.get(what.number) == now:
                del planned[what.number]
                what.advance(now)
                plan(what)
                left -= end(what, now)
        else:
            dispatcher.report(what, now)
            heapq.heappush(events, (now + STATUS_INTERVAL_S, next(tie), "status", what))
            while queue and dispatch(queue[0], now):
                queue.popleft()
            if what.number == 0:
                spent.append([engine.busy_s for engine in engines])
    return spent


def _most(request: Request) -> int:
    """Blocks of a request that caches may have. The path ends with its prompt, also where what was generated before it
    moved to another engine has become a part of that."""
    return min((request.num_tokens - 1) // BLOCK, len(request.path))


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)
