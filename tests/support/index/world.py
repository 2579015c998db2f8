"""Nodes and an attention store with a bad network between them, on simulated time or on real sockets."""

from __future__ import annotations

import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from support.index.truth import Held, Update, kept, truth
from support.waiting import PATIENCE_S

from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.connection import Connection
from headwise.storage.index.flusher import Channel, Flusher
from headwise.storage.index.message_handler import MessageHandler
from headwise.storage.index.messages import Gone, Message
from headwise.storage.index.store_client import StoreClient
from headwise.storage.index.store_server import StoreServer
from headwise.storage.index.wire import MAX_MESSAGE_BYTES, decode, encode


@dataclass
class Faults:
    """What the network does to a message: shares that are lost and that are doubled, and the longest delay (s), which
    also brings them out of order.
    """

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0


class BadChannel:
    """A channel whose messages suffer from ``faults``, in both directions."""

    def __init__(self, channel: Channel, faults: Faults, draw: random.Random, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._faults = faults
        self._draw = draw
        self._clock = clock
        self._out: list[tuple[float, Message]] = []
        self._in: list[tuple[float, Message]] = []

    @property
    def dropped(self) -> int:
        return self._channel.dropped

    def send(self, messages: Sequence[Message]) -> bool:
        if self._faults == Faults() and not self._out:
            return self._channel.send(messages)
        self._delay(self._out, messages)
        return True

    def receive(self) -> Iterable[Message]:
        self._delay(self._in, self._channel.receive())
        for message in self._due(self._out):
            self._channel.send([message])
        return list(self._due(self._in))

    def close(self) -> None:
        self._channel.close()

    def _delay(self, queue: list[tuple[float, Message]], messages: Iterable[Message]) -> None:
        faults, draw = self._faults, self._draw
        for message in messages:
            if draw.random() >= faults.lose:
                copies = 2 if draw.random() < faults.double else 1
                queue += [(self._clock() + draw.random() * faults.delay, message) for _ in range(copies)]

    def _due(self, queue: list[tuple[float, Message]]) -> Iterator[Message]:
        now = self._clock()
        due = sorted((entry for entry in queue if entry[0] <= now), key=lambda entry: entry[0])
        queue[:] = [entry for entry in queue if entry[0] > now]
        return (message for _, message in due)


NODE_TIMEOUT_S = 2.0
SUSPENDED_S = 3600.0


class World(ABC):
    """Flushers by name, the faults of the network, and a store that can be stopped and started again."""

    within_s: ClassVar = 2.0

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.faults = Faults()
        self.nodes: dict[str, Flusher] = {}
        self.dead: dict[str, int] = {}  # nodes that are gone for good, and their last epoch

    def add(self, name: str) -> None:
        channel = BadChannel(self.channel(name), self.faults, self.draw, self.clock)
        self.nodes[name] = Flusher(name, 1, "", clock=self.clock, channel=channel)

    def update(self, name: str, *updates: Update) -> None:
        self.nodes[name].flush(updates)

    def restart(self, name: str) -> None:
        self.nodes[name].restart(self.nodes[name].ledger.epoch + 1)

    def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        self.dead[name] = node.ledger.epoch
        node.close()

    def lossy(self, lose: float = 0.0, double: float = 0.0, delay: float = 0.0) -> None:
        self.faults.lose, self.faults.double, self.faults.delay = lose, double, delay

    def service(self) -> None:
        for node in self.nodes.values():
            node.service()

    def is_true(self) -> bool:
        """Whether the store keeps exactly what the living nodes hold."""
        names = {*self.nodes, *self.dead}
        held: Held = {**truth(node.ledger for node in self.nodes.values())}
        none = kept(AttentionStore(), names)
        return self.kept(names) == {**none, **held}

    def comes_to_truth(self, after_s: float = 0.0) -> bool:
        """Whether the store keeps what the nodes hold within `within_s`, or ``after_s`` later."""
        deadline = self.clock() + after_s + self.within_s
        while not self.is_true():
            if self.clock() > deadline:
                return False
            self.run(0.02)
        return True

    # ---- of the kind of world ----

    @abstractmethod
    def clock(self) -> float: ...

    @abstractmethod
    def channel(self, name: str) -> Channel: ...

    @abstractmethod
    def run(self, seconds: float) -> None: ...

    @abstractmethod
    def start_store(self) -> None: ...

    @abstractmethod
    def stop_store(self) -> None: ...

    @abstractmethod
    def gone(self, name: str) -> None: ...

    @abstractmethod
    def kept(self, names: Iterable[str]) -> Held: ...

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


class SimulatedWorld(World):
    """No sockets; a minute takes a fraction of a second."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.now = 1e9
        self.handler: MessageHandler | None = None
        self.inboxes: dict[bytes, deque[bytes]] = {}
        self.start_store()

    def clock(self) -> float:
        return self.now

    def channel(self, name: str) -> Channel:
        return _Wire(self, name.encode())

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.02
            self.service()
            if self.handler is not None:
                self.handler.tick()

    def suspend(self) -> None:
        """Let an hour pass for which everything was suspended, the store being the first to go on."""
        self.now += SUSPENDED_S
        if self.handler is not None:
            self.handler.tick()

    def start_store(self) -> None:
        self.handler = MessageHandler(
            AttentionStore(),
            self._answer,
            self.clock,
            node_timeout_s=NODE_TIMEOUT_S,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )

    def stop_store(self) -> None:
        self.handler = None

    def gone(self, name: str) -> None:
        if self.handler is not None:
            self.handler.take(b"scheduler", [encode(Gone(name, self.dead[name]))])

    def kept(self, names: Iterable[str]) -> Held:
        assert self.handler is not None
        self.handler.store.check_integrity()
        return kept(self.handler.store, names)

    def match(self, path: Sequence[bytes]) -> dict[str, tuple[int, int, int]]:
        assert self.handler is not None
        return self.handler.store.match(path)

    def _answer(self, identity: bytes, data: bytes) -> bool:
        self.inboxes[identity].append(data)
        return True


class _Wire:
    """A node's connection to a store without sockets. While the store is away, nothing is kept for it."""

    def __init__(self, world: SimulatedWorld, identity: bytes) -> None:
        self._world = world
        self._identity = identity
        self._inbox = world.inboxes.setdefault(identity, deque())
        self.dropped = 0

    def send(self, messages: Sequence[Message]) -> bool:
        if self._world.handler is None:
            self.dropped += len(messages)
            return False
        self._world.handler.take(self._identity, list(map(encode, messages)))
        return True

    def receive(self) -> Iterable[Message]:
        messages = [decode(data) for data in self._inbox]
        self._inbox.clear()
        return messages

    def close(self) -> None:
        self._inbox.clear()


class SocketWorld(World):
    """Real sockets on the loopback interface, and real time, in which a busy machine may take long."""

    within_s: ClassVar = PATIENCE_S

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.server: StoreServer | None = None
        self.endpoint = "tcp://127.0.0.1:*"
        self.start_store()
        self.scheduler = StoreClient(self.endpoint)

    def clock(self) -> float:
        return time.monotonic()

    def channel(self, name: str) -> Channel:
        return Connection(self.endpoint, "", None, 64)

    def run(self, seconds: float) -> None:
        end = self.clock() + seconds
        while self.clock() < end:
            self.service()
            self.scheduler.poll()
            time.sleep(0.002)

    def start_store(self) -> None:
        self.server = StoreServer(self.endpoint, node_timeout_s=NODE_TIMEOUT_S)
        self.endpoint = self.server.endpoint
        self.server.start()

    def stop_store(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def gone(self, name: str) -> None:
        self.scheduler.gone(name, self.dead[name])

    def kept(self, names: Iterable[str]) -> Held:
        assert self.server is not None
        with self.server._lock:
            return kept(self.server._handler.store, names)

    def close(self) -> None:
        super().close()
        self.scheduler.close()
        with contextlib.suppress(Exception):
            self.stop_store()
