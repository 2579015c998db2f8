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
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from simulation.gpu import BYTES, Gpu, weights_of

from headwise.priority_queue import PriorityQueue
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.parts import turns_of
from headwise.runtime.engine.step_budget import left_for, shares
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.protocol.messages import STATUS_INTERVAL_S, EngineLoad, EngineStatus

BLOCK = 512
"""Tokens that one block of the trace stands for."""

SMOOTHING = 0.2
"""Of the speeds that engines measure."""


SERVING = EngineConfig(max_batched_tokens=2048, max_num_seqs=128)


@dataclass(frozen=True)
class Hardware:
    """What an engine has. Sizes are in blocks, speeds in seconds per token.

    device, host: blocks of an engine; storage: of all engines together
    host_token_s, storage_token_s, peer_token_s: from host to device, from storage to host, from host to host
    serving: an engine's configuration, as far as it decides what is computed in which step
    """

    gpu: Gpu
    model: ModelConfig
    device: int
    host: int
    storage: int
    host_token_s: float
    storage_token_s: float
    peer_token_s: float = 0.0
    serving: EngineConfig = SERVING

    @property
    def step_tokens(self) -> int:
        return self.serving.most_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        return self.serving.most_seqs


@dataclass(eq=False)
class Request:
    """One request of the trace, and what became of it.

    path: hashes of the prompt's full blocks
    peer: number of the engine that is asked for what the chosen one lacks; -1: none
    is_apart: that engine is to compute the prompt
    target: the request and the engine for which this one's prompt is computed
    number: in which requests came to the engine that serves it
    since, turn: see `Sequence` of an engine
    began:  when its prompt was begun to be computed
    """

    name: str
    arrived: float
    path: list[bytes]
    num_tokens: int
    output: int
    engine: int = -1
    peer: int = -1
    is_apart: bool = False
    target: tuple[Request, Engine] | None = None
    number: int = 0
    since: float = 0.0
    turn: float = 0.0
    began: float = 0.0
    device: int = 0
    loaded_host: int = 0
    loaded_peer: int = 0
    loaded_storage: int = 0
    left: int = 0
    computed: int = 0
    held: list[bytes] = field(default_factory=list)
    reserved: int = 0
    first_token: float = -1.0
    ended: float = -1.0

    @property
    def order(self) -> tuple[float, int]:
        return self.turn, self.number

    @property
    def blocks(self) -> int:
        return -(-(self.num_tokens + self.output) // BLOCK)

    @property
    def loaded(self) -> int:
        """Tokens that came to the device by the host."""
        return self.loaded_host + self.loaded_peer + self.loaded_storage

    @property
    def found(self) -> int:
        """Tokens that were not computed."""
        return self.device + self.loaded


class StepTime:
    """`simulation.gpu.SimulatedGpu.step_seconds` of a model whose heads all see everything, in plain arithmetic."""

    def __init__(self, gpu: Gpu, model: ModelConfig) -> None:
        weights = weights_of(model)
        heads = model.num_layers * model.num_kv_heads
        self._flops = gpu.flops * gpu.compute_efficiency
        self._bandwidth = gpu.bandwidth * gpu.memory_efficiency
        self._overhead_s = gpu.overhead_s
        self._per_token = 2 * weights.per_token
        self._head = 2 * weights.head
        self._pair = 4 * model.head_dim * (model.num_heads // model.num_kv_heads) * heads
        self._weight_bytes = weights.read(1) * BYTES
        self.kv_bytes = 2 * model.head_dim * BYTES * heads
        """Of a token's cache."""

    def seconds(self, chunks: Iterable[tuple[int, int]], decoding: int, context: int, samples: int) -> float:
        """A step with ``chunks`` of prompts (tokens before, tokens), and ``decoding`` sequences with ``context`` tokens
        of cache between them."""
        tokens, keys = decoding, context + decoding
        pairs = keys
        for start, count in chunks:
            tokens += count
            keys += start + count
            pairs += count * start + count * (count + 1) // 2
        flops = self._per_token * tokens + self._head * samples + self._pair * pairs
        size = self._weight_bytes + self.kv_bytes * (keys + tokens)
        return max(flops / self._flops, size / self._bandwidth) + self._overhead_s


class Index(Protocol):
    """`headwise.storage.index.prefix_index.PrefixIndex`, as far as engines tell it of their caches."""

    def apply(self, node: str, tier: str, block_hashes: bytes, resident: bool, resumable: bytes = b"") -> None: ...


class Storage:
    """The shared storage: the least recently written or read blocks go first."""

    def __init__(self, capacity: int, index: Index) -> None:
        self.blocks: OrderedDict[bytes, str] = OrderedDict()  # and who wrote it
        self._capacity = capacity
        self._index = index

    @property
    def room(self) -> int:
        """Blocks that evict none."""
        return self._capacity - len(self.blocks)

    def put(self, blocks: Iterable[bytes], writer: str) -> None:
        new = [block for block in blocks if block not in self.blocks] if self._capacity else []
        self.blocks.update(dict.fromkeys(new, writer))
        if new:
            self._index.apply(writer, "storage", in_path_order(new), True)
        gone: dict[str, list[bytes]] = {}
        while len(self.blocks) > self._capacity:
            block, by = self.blocks.popitem(last=False)
            gone.setdefault(by, []).append(block)
        for by, theirs in gone.items():
            self._index.apply(by, "storage", in_path_order(theirs), False)


def in_path_order(evicted: Sequence[bytes]) -> bytes:
    """Blocks that were evicted, a path's last ones first: the index takes neighbours together if a path's first ones
    come first."""
    return b"".join(reversed(evicted))


class Cache:
    """One engine's device and host blocks."""

    def __init__(self, name: str, hardware: Hardware, storage: Storage, index: Index) -> None:
        self.held: dict[bytes, int] = {}
        self.free: OrderedDict[bytes, None] = OrderedDict()  # cached and not held, least recently used first
        self.host: OrderedDict[bytes, None] = OrderedDict()
        self.private = 0
        self._name, self._hardware, self._storage, self._index = name, hardware, storage, index

    @property
    def used(self) -> int:
        return len(self.held) + self.private

    def match(self, path: Sequence[bytes], most: int) -> tuple[int, int, int]:
        """Leading blocks, at most ``most``, that the device, device and host, and all tiers have."""
        held, free, host, storage = self.held, self.free, self.host, self._storage.blocks
        depth = 0
        while depth < most and ((block := path[depth]) in held or block in free):
            depth += 1
        device = depth
        while depth < most and ((block := path[depth]) in held or block in free or block in host):
            depth += 1
        with_host = depth
        while depth < most and ((block := path[depth]) in host or block in storage or block in free or block in held):
            depth += 1
        return device, with_host, depth

    def lend(self, path: Sequence[bytes], begin: int, most: int) -> int:
        """How far another engine may read the path here, from block ``begin`` on: what is read is on the host now."""
        depth = begin
        while depth < most and ((block := path[depth]) in self.held or block in self.free or block in self.host):
            depth += 1
        self._to_host(path[begin:depth])
        return depth

    def fetch(self, blocks: Sequence[bytes]) -> None:
        """Blocks of storage or another engine are in the host now."""
        for block in blocks:
            if block in self._storage.blocks:
                self._storage.blocks.move_to_end(block)
        self._to_host(blocks)

    def hold(self, request: Request, hits: int) -> bool:
        """Hold the ``hits`` leading blocks, and room for the rest; False: there is none, and nothing was changed."""
        path = request.path[:hits]
        more = request.blocks - sum(block in self.held for block in path)
        if self.used + more > self._hardware.device:
            return False
        for block in path:
            self.held[block] = self.held.get(block, 0) + 1
            self.free.pop(block, None)
        request.held = list(path)
        request.reserved = request.blocks - hits
        self.private += request.reserved
        evicted = []
        while self.used + len(self.free) > self._hardware.device:
            evicted.append(self.free.popitem(last=False)[0])
        if evicted:
            self._index.apply(self._name, "device", in_path_order(evicted), False)
            self._to_host(evicted)
        return True

    def computed(self, request: Request) -> None:
        """All blocks of the prompt are there, and others may use them."""
        for block in request.path[len(request.held) :]:
            self.held[block] = self.held.get(block, 0) + 1
            self.free.pop(block, None)
            request.reserved -= 1
            self.private -= 1
        request.held = request.path

    def release(self, request: Request) -> None:
        """The request has ended: its blocks are cached, last ones first to go; and the index hears of them."""
        self.private -= request.reserved
        for block in reversed(request.held):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                self.free[block] = None
        if request.held:
            self._index.apply(self._name, "device", b"".join(request.held), True)

    def _to_host(self, blocks: Sequence[bytes]) -> None:
        if not self._hardware.host:
            self._storage.put(blocks, self._name)
            return
        new = [block for block in blocks if block not in self.host]
        for block in blocks:
            self.host[block] = None
            self.host.move_to_end(block)
        if new:
            self._index.apply(self._name, "host", in_path_order(new), True)
        gone = []
        while len(self.host) > self._hardware.host:
            gone.append(self.host.popitem(last=False)[0])
        if gone:
            self._index.apply(self._name, "host", in_path_order(gone), False)
            self._storage.put(gone, self._name)


class OneCache(Cache):
    """A cache that all engines share, as large as all of theirs, at no cost: what no deployment can have."""

    def __init__(self, hardware: Hardware, engines: int, index: Index) -> None:
        super().__init__("oracle", hardware, Storage(0, index), index)
        self._capacity = engines * (hardware.device + hardware.host) + hardware.storage
        self.used_by: dict[int, int] = dict.fromkeys(range(engines), 0)

    def hold(self, request: Request, hits: int) -> bool:
        if self.used_by[request.engine] + request.blocks > self._hardware.device:
            return False
        self.used_by[request.engine] += request.blocks
        self.computed(request)
        return True

    def computed(self, request: Request) -> None:
        for block in reversed(request.path):
            self.free[block] = None
            self.free.move_to_end(block)
        while len(self.free) > self._capacity:
            self.free.popitem(last=False)

    def release(self, request: Request) -> None:
        self.used_by[request.engine] -= request.blocks


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
            request.turn = self.turns.turn(request.since, lacking, 1)

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
            there = Counter({"": len(self.waiting) + len(self.computing)})
            self.turns.computed(sum(count for _, count in self._chunks), there)
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
