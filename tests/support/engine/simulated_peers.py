"""Engines that fetch blocks from each other over a wire that loses, delays, doubles and reorders what they say.

Bytes are read when a copy ends, of whatever the owner's memory holds by then: also of blocks that it has given to
others, and of an engine that is no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from support.engine.simulated_copies import HOST_POISON
from support.engine.simulated_engine import BLOCK, LetterTokenizer
from support.engine.simulation import SimulatedExecutor, simulated_card

from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import HeadwiseError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.copies import PeerFetch
from headwise.runtime.protocol.messages import Taken
from headwise.runtime.protocol.request import GenerationResult
from headwise.runtime.protocol.running_step import RunningStep

TICK_S = 0.05
TIMEOUT_S = 3.0


@dataclass
class WireFaults:
    """lose, double: shares of the messages; delay: most ticks that one takes; lose_bytes, hang: shares of the copies
    that fail, and that take `HANG_TICKS` ticks; delay_bytes: most ticks that a copy takes"""

    lose: float = 0.0
    double: float = 0.0
    delay: int = 1
    delay_bytes: int = 1
    lose_bytes: float = 0.0
    hang: float = 0.0


HANG_TICKS = 200
"""Longer than `TIMEOUT_S`, at any time."""


class ReadingExecutor(SimulatedExecutor):
    """Copies from other engines' hosts in the background."""

    def __init__(self, network: Network, address: bytes, **options: Any) -> None:
        super().__init__(**options)
        self.exports = ((address,),)
        self._network = network
        self._reads: list[tuple[int, PeerFetch]] = []

    @property
    def host_arena(self) -> np.ndarray:
        return self._copies._arena.array.reshape(self.card.spec.num_host_blocks, -1)

    def _begin(self, batch: BatchRequest) -> RunningStep:
        swap_in = batch.cache_swap_metadata
        for fetch in swap_in.from_peers:
            self._reads += [(self._network.ends_at(), replace(fetch, blocks=row[None])) for row in fetch.blocks]
        return super()._begin(replace(batch, cache_swap_metadata=replace(swap_in, from_peers=())))

    def _tell(self, result: StepResult) -> None:
        came, missed = self._read()
        copies = result.copies
        copies = replace(
            copies,
            fetched=np.concatenate([copies.fetched, came]).astype(np.int32),
            missed=np.concatenate([copies.missed, missed]).astype(np.int32),
        )
        super()._tell(replace(result, copies=copies))

    def _read(self) -> tuple[list[int], list[int]]:
        came: list[int] = []
        missed: list[int] = []
        due = [fetch for at, fetch in self._reads if at <= self._network.ticks]
        self._reads = [read for read in self._reads if read[0] > self._network.ticks]
        for fetch in due:
            (_, theirs, _, ours) = fetch.blocks[0].tolist()
            source = self._network.arenas[fetch.exports[0][0]]
            if self._network.random.random() < self._network.faults.lose_bytes:
                self.host_arena[ours].view(np.int32)[:] = HOST_POISON
                missed.append(ours)
            else:
                self.host_arena[ours] = source[theirs]
                came.append(ours)
        return came, missed


class Node:
    """One engine, and its `Peers`. A new life has a new epoch, and nothing in its cache."""

    def __init__(self, network: Network, name: str, options: dict[str, Any]) -> None:
        self.network, self.name, self._options = network, name, options
        self.epoch = 0
        self.results: dict[str, GenerationResult] = {}
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.inbox: list[Any] = []
        options = dict(self._options)
        address = f"{self.name}/{self.epoch}".encode()
        card = simulated_card(
            options.pop("policies"),
            block_size=BLOCK,
            num_blocks=options.pop("num_blocks"),
            max_rows=4,
            host_blocks=options.pop("host_blocks"),
        )
        self.executor = ReadingExecutor(self.network, address, card=card, eager=True)
        self.network.arenas[address] = self.executor.host_arena
        config = EngineConfig(
            block_size=BLOCK, max_batched_tokens=16, load_timeout_s=TIMEOUT_S, host_cache="1KiB", **options
        )
        self.core = EngineCore(config, card, LetterTokenizer(), self.executor, clock=self.network.clock, peers=self)

    # ---- `Peers` ----

    def knows(self, engine: str, epoch: int) -> bool:
        node = self.network.nodes.get(engine)
        return node is not None and node is not self and node.epoch == epoch

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
    """Some engines, their wire and their time: a tick for each `turn`."""

    def __init__(
        self, names: Sequence[str], policies: Sequence[HeadPolicy], *, seed: int = 0, faults: WireFaults | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.random = Random(seed)
        self.faults = faults or WireFaults()
        self.ticks = 0
        self.sent: list[Any] = []
        self.arenas: dict[bytes, np.ndarray] = {}
        self.nodes: dict[str, Node] = {}
        self._under_way: list[tuple[int, str, bytes | None, Any]] = []
        options = {"num_blocks": 60, "host_blocks": 80, "write_policy": "write_through", **options}
        for name in names:
            self.nodes[name] = Node(self, name, {"policies": policies, **options})

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
        node.executor.host_arena.view(np.int32)[:] = HOST_POISON
        node.start()
