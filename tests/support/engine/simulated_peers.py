"""Engines that fetch blocks from each other over a wire that loses, delays, doubles and reorders what they say.

Bytes are read when a copy ends, of whatever the owner's memory holds by then: also of blocks that it has given to
others, and of an engine that is no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
from support.engine.simulated_copies import HOST_POISON, Storage
from support.engine.simulated_engine import BLOCK, SOMEWHERE, LetterTokenizer, lookup_in
from support.engine.simulation import SimulatedExecutor, of_rank, simulated_card

from headwise.cache_controller.head_exchange import Arrangement, HeadExchange
from headwise.cache_controller.memories import DEVICE, HOST
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import HeadwiseError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.copies import CopyReport, MergedReports, PeerFetch
from headwise.runtime.protocol.lease_messages import Taken
from headwise.runtime.protocol.request import GenerationResult
from headwise.transfer.connectors.base import ExportAddress
from headwise.transfer.peer_reads import MAX_OWNERS, runs_of

TICK_S = 0.05
TIMEOUT_S = 3.0


@dataclass
class WireFaults:
    """lose, double: shares of the messages; delay: most ticks that one takes; lose_bytes, hang: shares of the copies
    that fail, and that take `HANG_TICKS` ticks; delay_bytes: most ticks that a copy takes; lose_devices: whether
    what is on devices cannot be read; in_order: whether a copy of a block takes just so many ticks, and begins when
    the one before it from there is over, and fewer than `MAX_OWNERS` others are being read; mute: engines, a letter
    each, whose memory does not answer: a copy from there is given up after `TIMEOUT_S`, and those behind it at once"""

    lose: float = 0.0
    double: float = 0.0
    delay: int = 1
    delay_bytes: int = 1
    lose_bytes: float = 0.0
    hang: float = 0.0
    lose_devices: bool = False
    in_order: int = 0
    mute: str = ""


HANG_TICKS = 200
"""Longer than `TIMEOUT_S`, at any time."""


class ReadingExecutor:
    """Some ranks, which all do what the engine says, and copy from other engines' hosts in the background.

    exchange: with engines of so many ranks
    hangs_until: steps do not end before this tick
    """

    def __init__(
        self,
        network: Network,
        name: str,
        card: ModelCard,
        exchange: Callable[[int], HeadExchange],
        storage: Storage | None,
    ) -> None:
        self.ranks = [SimulatedExecutor(of_rank(card, rank), storage=storage) for rank in range(card.plan.tp_size)]
        nodes = network.nodes_of_devices
        self.exports = tuple(
            tuple(
                ExportAddress(
                    network.transport, nodes.get(name[0], name), f"{name}/{rank}".encode(), b"", 1, memory
                ).encode()
                for memory in ((HOST, DEVICE) if name[0] in nodes else (HOST,))
            )
            for rank in range(card.plan.tp_size)
        )
        self._network, self._exchange = network, exchange
        self._merged = MergedReports(len(self.ranks))
        self._queue: deque[BatchRequest] = deque()
        self._reads: list[tuple[int, int, PeerFetch]] = []  # when it is over, our rank, one block of ours
        self._read_until: list[dict[str, int]] = [{} for _ in self.ranks]  # of each of our ranks, by engine
        self.hangs_until = 0
        for addresses, rank in zip(self.exports, self.ranks, strict=True):
            arenas = partial(host_arena, rank), partial(device_arena, rank)
            network.arenas |= dict(zip(addresses, arenas, strict=False))

    @property
    def host_arenas(self) -> list[np.ndarray]:
        """Flat, by rank."""
        return [host_arena(rank) for rank in self.ranks]

    def poison(self, blocks: np.ndarray) -> None:
        for rank in self.ranks:
            rank.poison(blocks)

    def poison_host(self, blocks: np.ndarray) -> None:
        for rank in self.ranks:
            rank.poison_host(blocks)

    # ---- `Executor` ----

    shares_memory = True

    def submit(self, batch: BatchRequest) -> None:
        self._queue.append(batch)

    def poll(self, timeout_s: float | None) -> StepResult | None:
        if not self._queue or self._network.ticks < self.hangs_until:
            return None
        return self._execute(self._queue.popleft())

    def close(self) -> None:
        pass

    def _execute(self, batch: BatchRequest) -> StepResult:
        swap_in = batch.cache_swap_metadata
        for fetch in swap_in.from_peers:
            for ours in dict.fromkeys(fetch.blocks[:, 3].tolist()):
                block = replace(fetch, blocks=fetch.blocks[fetch.blocks[:, 3] == ours])
                self._reads += [(self._ends_at(fetch, rank), rank, block) for rank in range(len(self.ranks))]
        batch = replace(batch, cache_swap_metadata=replace(swap_in, from_peers=()))
        answers = []
        for rank in self.ranks:
            rank.submit(batch)
            answer = rank.poll(None)
            assert answer is not None
            answers.append(answer)
            assert answer.token_ids.tolist() == answers[0].token_ids.tolist()
        reports = [self._with_reads(answer.copies, rank) for rank, answer in enumerate(answers)]
        return replace(answers[0], copies=self._merged.merge(reports))

    def _ends_at(self, fetch: PeerFetch, rank: int) -> int:
        """When a copy that is begun now, or once those before it are over, is over itself."""
        faults, ticks = self._network.faults, self._network.ticks
        if not faults.in_order:
            return self._network.ends_at()
        owner, read_until = engine_of(fetch), self._read_until[rank]
        busy = sorted(until for name, until in read_until.items() if name != owner and until > ticks)
        begins = max(read_until.get(owner, 0), ticks)
        if begins == ticks and len(busy) >= MAX_OWNERS:
            begins = busy[-MAX_OWNERS]
        if not self._is_mute(fetch):
            read_until[owner] = begins + faults.in_order
        elif not any(engine_of(other) == owner for _, of, other in self._reads if of == rank):
            read_until[owner] = begins + round(TIMEOUT_S / TICK_S)
        return read_until[owner]

    def _is_mute(self, fetch: PeerFetch) -> bool:
        return engine_of(fetch) in self._network.faults.mute

    def _with_reads(self, report: CopyReport, rank: int) -> CopyReport:
        """A rank's report, with the reads of it that are over by now."""
        came, missed, later = [], [], []
        for read in self._reads:
            over, its_rank, fetch = read
            if its_rank != rank or over > self._network.ticks:
                later.append(read)
                continue
            (came if self._read(fetch, rank) else missed).append(fetch.blocks[0, 3])
        self._reads = later
        return replace(
            report,
            fetched=np.concatenate([report.fetched, came]).astype(np.int32),
            missed=np.concatenate([report.missed, missed]).astype(np.int32),
        )

    def _read(self, fetch: PeerFetch, rank: int) -> bool:
        """Fill this rank's part of one block; whether it came."""
        arena = self.host_arenas[rank]
        on_device = (fetch.blocks[:, 4] == DEVICE).any()
        lost = self._network.random.random() < self._network.faults.lose_bytes or self._is_mute(fetch)
        is_asleep = any(self._network.arenas[of_rank[-1]]() is None for of_rank in fetch.exports)
        if lost or (on_device and (is_asleep or self._network.faults.lose_devices)):
            self.ranks[rank].poison_host(fetch.blocks[:1, 3])
            return False
        for (owner_rank, memory), runs in runs_of(self._exchange(len(fetch.exports)), rank, fetch.blocks).items():
            source = self._network.arenas[fetch.exports[owner_rank][memory]]()
            for first, to, count in runs.tolist():
                arena[to : to + count] = source[first : first + count]
        return True


def engine_of(fetch: PeerFetch) -> str:
    return ExportAddress.decode(fetch.exports[0][0]).location.decode().split("/")[0]


def host_arena(rank: SimulatedExecutor) -> np.ndarray:
    arena: np.ndarray = rank._copies._arena.array
    return arena


def device_arena(rank: SimulatedExecutor) -> np.ndarray | None:
    """None while it is asleep."""
    return None if rank.is_asleep else rank.worker.served.runner.cache.arena.view(np.uint8).reshape(-1)


class Node:
    """One engine, and its `Peers`. A new life has a new epoch, and nothing in its cache."""

    def __init__(self, network: Network, name: str, options: dict[str, Any]) -> None:
        self.network, self.name, self._options = network, name, options
        self.num_ranks: int = options["tp_size"]
        self.epoch = 0
        self.results: dict[str, GenerationResult] = {}
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.inbox: list[Any] = []
        options = dict(self._options)
        of_card = {name: options.pop(name) for name in ("policies", "num_blocks", "host_blocks", "tp_size", "grouping")}
        of_card["host_blocks"] *= self.num_ranks  # each rank has as much memory, for smaller blocks
        card = simulated_card(**of_card, block_size=BLOCK, max_rows=4)
        own = Arrangement.of(card.plan, card.layouts)
        self.network.arrangements[self.num_ranks] = own

        def exchange(ranks: int) -> HeadExchange:
            return HeadExchange(own, self.network.arrangements[ranks])

        storage = self.network.storages.get(self.name)
        self.executor = ReadingExecutor(self.network, f"{self.name}/{self.epoch}", card, exchange, storage)
        if storage is not None:
            options |= SOMEWHERE
        config = EngineConfig(
            **{
                "block_size": BLOCK,
                "max_batched_tokens": 16,
                "load_timeout_s": TIMEOUT_S,
                "host_cache": "1KiB",
                **options,
            }
        )
        self.core = EngineCore(
            config,
            card,
            LetterTokenizer(),
            self.executor,
            clock=self.network.clock,
            lookup=lookup_in(storage, card),
            peers=self,
            exchange=lambda config, card, ranks: exchange(ranks),
        )

    # ---- `Peers` ----

    def knows(self, engine: str, epoch: int) -> bool:
        node = self.network.nodes.get(engine)
        return node is not None and node is not self and node.epoch == epoch

    def tp_size(self, engine: str) -> int:
        return self.network.nodes[engine].num_ranks

    def send(self, engine: str, message: Any) -> None:
        self.network.send(engine, self.name.encode(), message)

    def answer(self, reader: bytes, message: Any) -> None:
        self.network.send(reader.decode(), None, message)

    def epoch_of(self, engine: str) -> int | None:
        node = self.network.nodes.get(engine)
        return None if node is None or node is self else node.epoch

    def receive(self) -> list[Any]:
        inbox, self.inbox = self.inbox, [message for message in self.inbox if isinstance(message, Taken)]
        return [message for message in inbox if not isinstance(message, Taken)]

    def taken(self) -> list[Any]:
        inbox, self.inbox = self.inbox, [message for message in self.inbox if not isinstance(message, Taken)]
        return [message for message in inbox if isinstance(message, Taken)]

    # ---- the loop of a server ----

    def deliver(self, reader: bytes | None, message: Any) -> None:
        if reader is None:
            self.inbox.append(message)
        elif message.epoch == self.epoch:
            self.core.asked(reader, message)
        else:
            self.core.refuse(reader, message)

    def turn(self) -> None:
        self.core.serve_peers()
        if self.core.has_work():
            for delta in self.core.step(0):
                self.results.setdefault(delta.request_id, GenerationResult(delta.request_id)).add(delta)
        self.core.drain_index_updates()
        if self.network.ticks % 8 == 0:
            self.core.cache.check_integrity()
        self.executor.poison(self.core.cache.pool.free_blocks)
        self.executor.poison_host(self.core.cache.host.pool.free_blocks)


class Network:
    """Some engines, their wire and their time: a tick for each `turn`.

    ranks:     of each engine; of those with more than one, heads are grouped by ``grouping``
    nodes:     where workers read each other's devices, by engine; others' devices nobody reads
    transport: its name
    storages:  of engines that have one of their own, with one rank
    """

    def __init__(
        self, names: Sequence[str], policies: Sequence[HeadPolicy], *, seed: int = 0, faults: WireFaults | None = None,
        ranks: Sequence[int] = (), grouping: str = "auto", nodes: dict[str, str] | None = None,
        transport: str = "simulated", storages: dict[str, Storage] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.random = Random(seed)
        self.faults = faults or WireFaults()
        self.ticks = 0
        self.nodes_of_devices = nodes or {}
        self.transport = transport
        self.storages = storages or {}
        self.sent: list[Any] = []
        self.arenas: dict[bytes, Callable[[], Any]] = {}  # by address; asleep there is none
        self.arrangements: dict[int, Arrangement] = {}  # by ranks
        self.nodes: dict[str, Node] = {}
        self._under_way: list[tuple[int, str, bytes | None, Any]] = []
        options = {"num_blocks": 60, "host_blocks": 80, "write_policy": "write_through", **options}
        for name, tp_size in zip(names, ranks or [1] * len(names), strict=True):
            of_ranks = {"tp_size": tp_size, "grouping": grouping if tp_size > 1 else "auto"}
            self.nodes[name] = Node(self, name, {"policies": policies, **of_ranks, **options})

    def clock(self) -> float:
        return 1e9 + self.ticks * TICK_S

    def ends_at(self) -> int:
        """When a copy that begins now is over."""
        if self.random.random() < self.faults.hang:
            return self.ticks + HANG_TICKS
        return self.ticks + self.random.randint(1, self.faults.delay_bytes)

    def send(self, to: str, reader: bytes | None, message: Any) -> None:
        self.sent.append(message)
        if self.random.random() < self.faults.lose:
            return
        for _ in range(1 + (self.random.random() < self.faults.double)):
            self._under_way.append((self.ticks + self.random.randint(1, self.faults.delay), to, reader, message))

    def turn(self) -> None:
        self.ticks += 1
        due = [entry for entry in self._under_way if entry[0] <= self.ticks]
        self._under_way = [entry for entry in self._under_way if entry[0] > self.ticks]
        self.random.shuffle(due)
        for _, to, reader, message in due:
            try:
                self.nodes[to].deliver(reader, message)
            except HeadwiseError as error:
                raise AssertionError(f"{message} was refused: {error}") from None
        for node in self.nodes.values():
            node.turn()

    def kill(self, name: str) -> None:
        """An engine loses its workers, and what they had: its memory may be read still, and holds nothing."""
        node = self.nodes[name]
        node.core.fail_all("killed")
        for rank in node.executor.ranks:
            for arena in (host_arena(rank), device_arena(rank)):
                if arena is not None:
                    arena.view(np.int32)[:] = HOST_POISON
        node.start()
