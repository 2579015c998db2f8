"""One worker's reads of other workers' arenas, in the background: an owner may be slow, gone or hung."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.head_exchange import HeadExchange
from headwise.errors import ConfigError, first_line
from headwise.transfer.base import Stream
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Reader, Runs
from headwise.transfer.lanes import Lanes
from headwise.transfer.stats import TransferStats, TransferTotals

log = logging.getLogger(__name__)

MAX_OWNERS = 4
"""Most owners that a worker reads at a time: so many must hang before one that does not waits for them."""
BATCH_BLOCKS = 64
"""Most blocks of one read: enough for few calls, few enough for the first ones of a long prefix to come early."""
BATCH_BYTES = 64 << 20
"""Most bytes of one read, but for one block: what a slow network brings well within the timeout."""
LOST_S = 10.0
"""Seconds for which an address is not tried again at which nothing could be read."""

Exports = tuple[tuple[bytes, ...], ...]
"""Encoded `ExportAddress`es, by rank of the owner, the best of each first"""


class FinishedReads(NamedTuple):
    """Our host blocks whose reads are over: ``int32 [m]`` of each kind, each block once."""

    fetched: NDArray[np.int32]
    missed: NDArray[np.int32]


@dataclass(frozen=True)
class PeerBlocks:
    """How this rank's arena and those of others fit together.

    identity:    of the blocks in this one: others must have the same
    rank:        of this worker
    block_bytes: of our blocks
    exchange:    with an owner of so many ranks. Raises ValueError or `ConfigError` if there is none with such an owner
    """

    identity: bytes
    rank: int
    block_bytes: int
    exchange: Callable[[int], HeadExchange]


@dataclass(eq=False)
class _Batch:
    """Blocks of one read. rows: ``int32 [m, 5]`` (its group, its block, our group, our host block, its memory);
    busy_s: that it took"""

    exports: Exports
    rows: NDArray[np.int32]
    ours: NDArray[np.int32]
    is_read: bool = False
    busy_s: float = 0.0
    is_over: bool = False


class PeerReads:
    """Fills host blocks from those of other engines, on streams of its own.

    Used by the worker's thread alone, which never waits for an owner but in `drain` and `close`. Whatever goes wrong
    makes blocks ``missed``; nothing writes to them any more once they are. Of one owner one read follows the other; as
    many owners are read at a time as there are streams, so that one that is slow or hangs holds up nobody else's.

    readers:   by transport, for all owners
    blocks:    what is in our arena
    arena:     flat uint8
    streams:   `MAX_OWNERS`, mostly
    timeout_s: longest wait for an owner, for each read of at most `BATCH_BYTES`
    clock:     in seconds
    """

    def __init__(
        self,
        readers: Mapping[str, Reader],
        blocks: PeerBlocks,
        arena: NDArray[np.uint8],
        *,
        streams: Sequence[Stream],
        timeout_s: float,
        batch_blocks: int = BATCH_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers, self._blocks, self._arena = readers, blocks, arena
        self._lanes, self._timeout_s = Lanes(streams, clock), timeout_s
        self._batch_blocks, self._clock = batch_blocks, clock
        self._batches: list[_Batch] = []
        self._totals = TransferTotals()
        self._may_read = True
        # Of the streams' threads:
        self._lock = threading.Lock()
        self._exchanges: dict[int, HeadExchange | str] = {}  # by the owner's ranks; or why there is none
        self._lost: dict[bytes, float] = {}  # address: when it may be tried again
        self._logged: set[str] = set()

    def fetch(self, exports: Exports, blocks: NDArray[np.int32]) -> None:
        """Start to fill host blocks: ``blocks [m, 5]`` (its group, its block, our group, our host block, its memory).

        Returns at once. A block of ours may be in several rows, one for each group of the owner's that it is filled
        from; it is there once all are copied. An owner's blocks come in the order in which they are first named.

        Raises:
            ValueError: ``blocks`` are of another shape.
        """
        if blocks.ndim != 2 or blocks.shape[1] != 5:
            raise ValueError(f"blocks {list(blocks.shape)}: give (its group, block, our group, block, its memory) each")
        ours, first, which = np.unique(blocks[:, 3], return_index=True, return_inverse=True)
        place = np.argsort(np.argsort(first))[which]  # of each row's block, in the order in which they are named
        rows = blocks[np.argsort(place, kind="stable")].astype(np.int32)
        place.sort()
        step = min(self._batch_blocks, max(1, BATCH_BYTES // self._blocks.block_bytes))
        for start in range(0, len(ours), step):
            part = rows[slice(*np.searchsorted(place, (start, start + step)))]
            batch = _Batch(exports, part, np.unique(part[:, 3]))
            self._batches.append(batch)
            self._lanes.submit(exports, partial(self._read, batch))

    def finished(self) -> FinishedReads:
        """The blocks whose reads came to an end since the last call, each once. Never waits."""
        fetched, missed = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.int32)]
        under_way = []
        for batch in self._batches:
            if not batch.is_over:
                under_way.append(batch)
                continue
            (fetched if batch.is_read else missed).append(batch.ours)
            read = len(batch.ours) if batch.is_read else 0
            busy_s = batch.busy_s if batch.is_read else 0.0  # waiting for who is gone says nothing of copies
            self._totals.add(read, read * self._blocks.block_bytes, busy_s, failed_blocks=len(batch.ours) - read)
        self._batches = under_way
        return FinishedReads(np.concatenate(fetched), np.concatenate(missed))

    def stats(self) -> TransferStats:
        """Statistics as of the last `finished`. ``failed_blocks`` were missed; ``busy_s`` is the sum of all owners'."""
        return self._totals.stats(0.0, sum(len(batch.ours) for batch in self._batches))

    def drain(self, timeout_s: float) -> bool:
        """Wait until all reads are over, and return whether they are."""
        return self._lanes.drain(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Give up what has not begun, and close readers and streams, within about ``timeout_s``. The last call but for
        `finished`. A read that is under way then is left to its stream's thread, which ends with it; the last one
        closes the readers.
        """
        self._may_read = False
        self._lanes.close(self._close_readers, timeout_s)

    # ---- on the streams ----

    def _read(self, batch: _Batch) -> None:
        begun = self._clock()
        if self._may_read:
            self._fill(batch, begun + self._timeout_s)
        batch.busy_s = self._clock() - begun
        batch.is_over = True

    def _fill(self, batch: _Batch, deadline: float) -> None:
        try:
            exchange = self._exchange(len(batch.exports))
            for (owner_rank, memory), runs in runs_of(exchange, self._blocks.rank, batch.rows).items():
                self._read_rank(batch.exports[owner_rank], memory, runs, deadline)
            batch.is_read = True
        except PeerLostError as error:
            self._log("blocks of another engine did not come: %s", error)
        except Exception as error:  # of a transport, or of an address from elsewhere: the blocks can be computed
            self._log(f"blocks of another engine cannot be read: {type(error).__name__}: %s", error)

    def _exchange(self, owner_ranks: int) -> HeadExchange:
        known = self._exchanges.get(owner_ranks)
        if known is None:
            try:
                known = self._blocks.exchange(owner_ranks)
            except (ValueError, ConfigError) as error:
                known = f"not with {owner_ranks} ranks: {first_line(error)}"
            self._exchanges[owner_ranks] = known
        if isinstance(known, str):
            raise PeerLostError(known)
        return known

    def _read_rank(self, exports: tuple[bytes, ...], memory: int, runs: Runs, deadline: float) -> None:
        """Read from a memory of one rank, in the first way that works. Raises `PeerLostError` if none does."""
        why = "its engine has no transport that this one has"
        for encoded in exports:
            address = ExportAddress.decode(encoded)
            reader = self._readers.get(address.transport)
            if address.memory != memory or reader is None or not reader.reaches(address):
                continue
            if address.identity != self._blocks.identity:
                raise PeerLostError("they are of another model, or kept in another way, than this engine's")
            if self._is_lost(encoded):
                why = "it could not be read a moment ago"
                continue
            try:
                reader.read(address, runs, self._arena, deadline - self._clock())
            except PeerLostError as error:
                why = f"{address.transport}: {error}"
                self._give_up(encoded, reader, address)
                continue
            if self._is_new(f"{address.transport}/{address.node}"):
                log.info("blocks of engines on node %s come by %s", address.node, address.transport)
            return
        raise PeerLostError(why)

    def _is_lost(self, encoded: bytes) -> bool:
        with self._lock:
            return self._lost.get(encoded, -math.inf) > self._clock()

    def _give_up(self, encoded: bytes, reader: Reader, address: ExportAddress) -> None:
        """Do not try an address for a while, in which the blocks that wait for it are missed at once."""
        reader.forget(address)
        now = self._clock()
        with self._lock:
            self._lost = {other: until for other, until in self._lost.items() if until > now}
            self._lost[encoded] = now + LOST_S

    def _log(self, text: str, error: Exception) -> None:
        """Once for each kind of failure: what is missed is counted."""
        if self._is_new(text):
            log.warning(text + "; they are computed, and further ones are not logged", first_line(error))

    def _is_new(self, text: str) -> bool:
        """Whether that was not logged yet; now it is."""
        with self._lock:
            is_new = text not in self._logged
            self._logged.add(text)
            return is_new

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            reader.close()


def runs_of(exchange: HeadExchange, rank: int, rows: NDArray[np.int32]) -> dict[tuple[int, int], Runs]:
    """What our ``rank`` reads of each of the owner's ranks and their memories to fill the blocks of ``rows``, as of
    `PeerReads.fetch`.

    Raises:
        ValueError: rows that do not fill a block of ours, or fill it from groups that have nothing for it.
    """
    _check_complete(exchange.needs, rows)
    runs: dict[tuple[int, int], list[Runs]] = {}
    pieces = exchange.pieces(rank).tolist()
    for memory in np.unique(rows[:, 4]).tolist():
        there = rows[rows[:, 4] == memory]
        for group, owner_group, owner_rank, first, to, count in pieces:
            of_piece = there[(there[:, 0] == owner_group) & (there[:, 2] == group)].astype(np.int64)
            sources = of_piece[:, 1] * exchange.owner_block_bytes + first
            targets = of_piece[:, 3] * exchange.block_bytes + to
            parts = np.column_stack([sources, targets, np.full_like(sources, count)])
            runs.setdefault((owner_rank, memory), []).append(parts)
    joined = {where: np.concatenate(parts) for where, parts in runs.items()}
    return {where: merged(parts) for where, parts in joined.items() if len(parts)}


def _check_complete(needs: NDArray[np.bool_], rows: NDArray[np.int32]) -> None:
    theirs, ours = rows[:, 0], rows[:, 2]
    if len(rows) == 0:
        return
    if min(theirs.min(), ours.min()) < 0 or ours.max() >= needs.shape[0] or theirs.max() >= needs.shape[1]:
        raise ValueError(f"rows name groups that are not there: {needs.shape[0]} here, {needs.shape[1]} there")
    if not needs[ours, theirs].all():
        raise ValueError("rows fill blocks from groups that have nothing for them")
    blocks, first, which = np.unique(rows[:, 3], return_index=True, return_inverse=True)
    given = np.bincount(which)
    is_one_group = (ours == ours[first][which]).all()
    if not is_one_group or len(np.unique(rows[:, [0, 3]], axis=0)) != len(rows):
        raise ValueError("rows fill a block twice, or with two groups")
    lacking = np.flatnonzero(given != needs.sum(axis=1)[ours[first]])
    if len(lacking):
        raise ValueError(f"rows fill block {blocks[lacking[0]]} in part only")


def merged(runs: Runs) -> Runs:
    """The same bytes in the fewest runs: those that go on in both arenas are one. In the order of the target."""
    runs = runs[np.argsort(runs[:, 1], kind="stable")]
    ends = runs[:, :2] + runs[:, 2:]
    begins = np.ones(len(runs), dtype=np.bool_)
    begins[1:] = (ends[:-1] != runs[1:, :2]).any(axis=1)
    result = runs[begins].copy()
    result[:, 2] = np.add.reduceat(runs[:, 2], np.flatnonzero(begins)) if len(runs) else result[:, 2]
    return result
