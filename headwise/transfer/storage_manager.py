"""One worker's copies between its host arena and a storage, in the background: storage may be slow, fail or hang."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headwise.errors import first_line
from headwise.storage.backends.base import Arena, BlockStorage, Hits
from headwise.transfer.base import Event, Stream, end, ends_by
from headwise.transfer.stats import TransferStats, TransferTotals

log = logging.getLogger(__name__)

BATCH_BLOCKS = 64
"""Blocks of one call: enough for long runs on a disk, few enough for the first ones of a long prefix to come early."""

_Call = Callable[[Sequence[bytes], NDArray[np.int32], Arena, NDArray[np.int32]], Hits]


@dataclass(frozen=True)
class FinishedStorage:
    """Copies that are over, by host block: ``int32 [m]`` of each kind, in order of completion.

    fetched: blocks that hold what was asked for
    missed:  blocks that storage had nothing for; their content is undefined
    put:     blocks that are in storage
    not_put: blocks that could not be written to storage
    """

    fetched: NDArray[np.int32]
    missed: NDArray[np.int32]
    put: NDArray[np.int32]
    not_put: NDArray[np.int32]


@dataclass(eq=False)
class _Batch:
    """Blocks of one storage call.

    blocks:   ``int32 [m, 2]`` (group, host block)
    hits:     per block whether the call succeeded; None if there was no call, or it raised
    is_begun: the call has begun, so that no block may be added
    reset:    the last `StorageManager.reset` before it; what that has not removed yet must not be read
    """

    blocks: NDArray[np.int32]
    hashes: list[bytes]
    reset: Event | None = None
    hits: Hits | None = None
    is_begun: bool = False
    event: Event = field(init=False)


class StorageManager:
    """Fetches blocks to the host arena and puts them into storage, both at once, each on a stream of its own.

    Used by the worker's thread alone, which never waits for storage but in `drain` and `close`. Whatever storage raises
    makes blocks ``missed`` or ``not_put``. While a storage call hangs, nothing is reported of its blocks, nor of
    those queued behind it.

    host_arena:   flat uint8, a whole number of the storage's blocks
    read_stream, write_stream: run work on threads of their own, such as `CpuStream`; `close` ends them
    batch_blocks: most blocks of one storage call
    clock:        in seconds, for timeouts

    Raises:
        ValueError: the arena does not fit the storage's blocks.
    """

    def __init__(
        self,
        storage: BlockStorage,
        host_arena: NDArray[np.uint8],
        *,
        read_stream: Stream,
        write_stream: Stream,
        batch_blocks: int = BATCH_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if host_arena.size % storage.block_bytes:
            raise ValueError(
                f"the host arena has {host_arena.size} bytes: give a multiple of a block's {storage.block_bytes} bytes"
            )
        self._storage, self._arena = storage, host_arena
        self._reads, self._writes = read_stream, write_stream
        self._batch_blocks = batch_blocks
        self._clock = clock
        self._fetches: deque[_Batch] = deque()
        self._puts: deque[_Batch] = deque()
        self._fetched, self._put = TransferTotals(), TransferTotals()
        self._open_put: _Batch | None = None  # the last one, if more may be added to it until it begins
        self._begin_lock = threading.Lock()
        self._reset: Event | None = None
        self._may_read = self._may_write = True
        self._logged: set[tuple[str, type[Exception]]] = set()
        self._is_registered: bool | None = None
        self._register_lock = threading.Lock()
        self._last_write: Event | None = None
        self._last_read: Event = self._reads.submit(self._register)

    # ---- storage to host ----

    def fetch(self, blocks: NDArray[np.int32], hashes: Sequence[bytes]) -> None:
        """Start to fill host blocks: ``blocks [m, 2]`` (group, host block), each with what is stored under its hash.

        Returns at once. Blocks come in the order given. What a `reset` before has not removed yet is a miss.

        Raises:
            ValueError: ``blocks`` and ``hashes`` do not fit together.
        """
        _check(blocks, hashes)
        for batch in self._batches(blocks, hashes):
            batch.reset = self._reset
            batch.event = self._last_read = self._reads.submit(partial(self._read, batch))
            self._fetches.append(batch)

    def _read(self, batch: _Batch) -> None:
        is_stale = batch.reset is not None and not batch.reset.done
        if self._may_read and not is_stale:
            self._call("read from", self._storage.read, batch)

    # ---- host to storage ----

    def put(self, blocks: NDArray[np.int32], hashes: Sequence[bytes]) -> None:
        """Start to store host blocks: ``blocks [m, 2]`` (group, host block), each under its hash.

        Returns at once. Blocks still queued go with those queued before, in one call as far as ``batch_blocks`` allows.

        Raises:
            ValueError: ``blocks`` and ``hashes`` do not fit together.
        """
        _check(blocks, hashes)
        added = self._add_to_open_put(blocks, hashes)
        for batch in self._batches(blocks[added:], hashes[added:]):
            batch.event = self._last_write = self._writes.submit(partial(self._write, batch))
            self._puts.append(batch)
            self._open_put = batch

    def _add_to_open_put(self, blocks: NDArray[np.int32], hashes: Sequence[bytes]) -> int:
        """How many of the blocks, from the first on, go with the last batch, which has not begun yet."""
        batch = self._open_put
        if batch is None or batch.event.done:
            return 0
        with self._begin_lock:
            room = 0 if batch.is_begun else self._batch_blocks - len(batch.blocks)
            for more in self._batches(blocks[:room], hashes[:room]):
                batch.blocks = np.concatenate([batch.blocks, more.blocks])
                batch.hashes += more.hashes
        return min(room, len(blocks))

    def _write(self, batch: _Batch) -> None:
        with self._begin_lock:
            batch.is_begun = True
        if self._may_write:
            self._call("write to", self._storage.write, batch)

    def reset(self) -> None:
        """Have storage forget every block of the namespace, after all puts submitted before. Returns at once."""
        self._open_put = None
        self._reset = self._last_write = self._writes.submit(self._clear)

    def delete(self, hashes: Sequence[bytes], num_groups: int) -> None:
        """Have storage forget token blocks, of all groups, after all puts submitted before. Returns at once."""
        if hashes:
            self._open_put = None
            self._last_write = self._writes.submit(partial(self._delete, list(hashes), num_groups))

    def _delete(self, hashes: list[bytes], num_groups: int) -> None:
        if self._may_write:
            groups = np.tile(np.arange(num_groups, dtype=np.int32), len(hashes))
            named = [block_hash for block_hash in hashes for _ in range(num_groups)]
            self._succeeds("delete from", partial(self._storage.delete, named, groups))

    # ---- both ----

    def finished(self) -> FinishedStorage:
        """The copies that came to an end since the last call, each block once. Never waits."""
        fetched, missed = self._collect(self._fetches, self._fetched)
        put, not_put = self._collect(self._puts, self._put)
        return FinishedStorage(fetched, missed, put, not_put)

    def _collect(self, batches: deque[_Batch], totals: TransferTotals) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        done, failed = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.int32)]
        while batches and batches[0].event.done:
            batch = batches.popleft()
            hits = np.zeros(len(batch.blocks), dtype=np.bool_) if batch.hits is None else batch.hits
            num_hits = int(np.count_nonzero(hits))
            done.append(batch.blocks[hits, 1])
            failed.append(batch.blocks[~hits, 1])
            num_bytes = num_hits * self._storage.block_bytes
            totals.add(num_hits, num_bytes, batch.event.busy_s, failed_blocks=len(hits) - num_hits)
        return np.concatenate(done), np.concatenate(failed)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was submitted is over, and return whether it is; `finished` tells what came of it."""
        return self._drain_until(self._clock() + timeout_s)

    def _drain_until(self, deadline: float) -> bool:
        last = [event for event in (self._last_write, self._last_read) if event is not None]
        return all(ends_by(event, max(0.0, deadline - self._clock())) for event in last)

    def fetch_stats(self) -> TransferStats:
        """Statistics of fetches, as of the last `finished`. ``failed_blocks`` were missed."""
        return self._fetched.stats(self._reads.waited_s, sum(len(batch.blocks) for batch in self._fetches))

    def put_stats(self) -> TransferStats:
        """Statistics of puts, as of the last `finished`."""
        return self._put.stats(self._writes.waited_s, sum(len(batch.blocks) for batch in self._puts))

    def close(self, timeout_s: float) -> None:
        """Finish puts, give up fetches, and close storage and streams, within about ``timeout_s``. The last call but
        for `finished`.

        What is not over by then is left to the streams' threads, which end as soon as the call does that they are in.
        """
        deadline = self._clock() + timeout_s
        self._may_read = False
        self._drain_until(deadline)
        self._may_write = False
        if self._last_read.done:  # storage that is being read must not be closed
            self._last_write = self._writes.submit(self._close_storage)
            self._drain_until(deadline)
        end(self._reads, self._last_read)
        end(self._writes, self._last_write)

    # ---- storage calls: on the streams ----

    def _batches(self, blocks: NDArray[np.int32], hashes: Sequence[bytes]) -> Iterator[_Batch]:
        """Batches of copies of what the caller gave."""
        for start in range(0, len(blocks), self._batch_blocks):
            part = slice(start, start + self._batch_blocks)
            yield _Batch(blocks[part].astype(np.int32), list(hashes[part]))

    def _register(self) -> None:
        """Announce the arena, once: of both streams, the first to come here does, and the other waits for it."""
        with self._register_lock:
            if self._is_registered is None:
                register = partial(self._storage.register, self._arena)
                self._is_registered = self._succeeds("register the host arena with", register)

    def _clear(self) -> None:
        self._succeeds("clear", self._storage.clear)

    def _close_storage(self) -> None:
        self._succeeds("close", self._storage.close)

    def _call(self, what: str, call: _Call, batch: _Batch) -> None:
        self._register()
        if self._is_registered:
            self._succeeds(what, partial(_call_storage, call, batch, self._arena))

    def _succeeds(self, what: str, action: Callable[[], object]) -> bool:
        """Whether the action raises nothing. It must not, but what is cached can be computed again: so go on."""
        try:
            action()
        except Exception as error:
            if (what, type(error)) not in self._logged:
                self._logged.add((what, type(error)))
                log.warning(
                    "cannot %s storage: %s: %s; goes on without, and is not logged again",
                    what, type(error).__name__, first_line(error),
                )  # fmt: skip
            return False
        return True


def _call_storage(call: _Call, batch: _Batch, arena: Arena) -> None:
    groups, blocks = (np.ascontiguousarray(column) for column in batch.blocks.T)
    hits = call(batch.hashes, groups, arena, blocks)
    if hits.dtype != np.bool_ or hits.shape != blocks.shape:
        raise TypeError(f"the answer for {len(blocks)} blocks is {hits.dtype} {list(hits.shape)}")
    batch.hits = hits


def _check(blocks: NDArray[np.int32], hashes: Sequence[bytes]) -> None:
    if blocks.shape != (len(hashes), 2):
        raise ValueError(f"blocks {list(blocks.shape)} with {len(hashes)} hashes: give a (group, host block) each")
