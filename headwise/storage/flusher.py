"""The engine's side of the attention store: numbers its statements, sends them, answers with snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from headwise.storage.base import TIERS, Flush, Heartbeat, Snapshot, SnapshotRequest, Statement
from headwise.storage.protocol import ProtocolError, decode, encode

HEARTBEAT_S = 1.0


class IndexUpdate(Protocol):
    """What the cache reports: see `headwise.cache_controller.cache_manager.IndexUpdate`."""

    @property
    def tier(self) -> str: ...
    @property
    def start_block(self) -> int: ...
    @property
    def block_hashes(self) -> tuple[bytes, ...]: ...
    @property
    def resident(self) -> bool: ...


class Ledger:
    """What a node has said in this epoch, and so what it holds. No I/O, no clock."""

    def __init__(self, node: str, epoch: int) -> None:
        self.node = node
        self.restart(epoch)

    def restart(self, epoch: int) -> None:
        """Start anew with an empty cache; ``epoch`` must be higher than any before."""
        self.epoch = epoch
        self.seq = -1
        self.blocks: dict[str, set[bytes]] = {tier: set() for tier in TIERS}
        self._digests = dict.fromkeys(TIERS, 0)

    def flush(self, update: IndexUpdate) -> Flush:
        """The next flush, for a change of the cache."""
        held = self.blocks[update.tier]
        for block_hash in update.block_hashes:
            if (block_hash in held) != update.resident:
                self._digests[update.tier] ^= int.from_bytes(block_hash, "big")
                (held.add if update.resident else held.remove)(block_hash)
        self.seq += 1
        hashes = tuple(update.block_hashes)
        return Flush(self.node, self.epoch, self.seq, update.tier, update.start_block, hashes, update.resident)

    def snapshot(self) -> Snapshot:
        tiers = {tier: frozenset(held) for tier, held in self.blocks.items() if held}
        return Snapshot(self.node, self.epoch, self.seq, tiers)

    def heartbeat(self) -> Heartbeat:
        digests = {tier: digest for tier, digest in self._digests.items() if digest}
        return Heartbeat(self.node, self.epoch, self.seq, digests)


class Flusher:
    """Sends an engine's index updates to the store. Never blocks: what cannot be sent is dropped, and the store
    then sees the gap and asks for a snapshot. Owned by one thread.
    """

    def __init__(self, node: str, epoch: int, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        import zmq

        self._context = zmq.Context()
        self._ledger = Ledger(node, epoch)
        self._clock = clock
        self._connect(endpoint)

    def _connect(self, endpoint: str) -> None:
        import zmq

        self.endpoint = endpoint
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._beat_at = self._clock()

    def reconnect(self, endpoint: str) -> None:
        """Go on with a store that came back elsewhere."""
        if endpoint != self.endpoint:
            self._socket.close()
            self._connect(endpoint)

    def restart(self, epoch: int) -> None:
        """The cache is empty again; the store drops what was said before as soon as it hears of it."""
        self._ledger.restart(epoch)
        self._beat_at = self._clock()

    def flush(self, updates: Iterable[IndexUpdate]) -> None:
        """Send the cache's changes, in order."""
        for update in updates:
            self._send(self._ledger.flush(update))

    def service(self) -> None:
        """Answer the store and send the heartbeat when it is due; call it often."""
        import zmq

        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                wanted = isinstance(decode(data), SnapshotRequest)
            except ProtocolError:
                wanted = False
            if wanted:
                self._send(self._ledger.snapshot())
        if self._clock() >= self._beat_at:
            self._beat_at = self._clock() + HEARTBEAT_S
            self._send(self._ledger.heartbeat())

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _send(self, statement: Statement) -> None:
        import zmq

        try:
            self._socket.send(encode(statement), zmq.NOBLOCK)
        except zmq.Again:
            return
