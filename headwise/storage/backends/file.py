"""Blocks in files: a directory of segments, used by any number of processes at once.

Why segments and not a file for each block: batches of 16 blocks of 48 KiB are read from the page cache at 3.9 GB/s
against 2.1, and written as fast; an index of 100,000 blocks is rebuilt in 0.05 s, from 76 files; and evicting costs one
unlink for a thousand blocks. A prefix is written together, so it lies together and is read in a few long runs. The
price is that eviction takes whole segments, the least recently used first, of whichever namespace: a segment lives as
long as one block in it is used.

Nothing is synced to disk: what a crash or a power cut left half written is told by checksums. They are XXH3, nine times
as fast as zlib's CRC-32. The file system must keep flock's locks between all who use the directory. If it hangs, so do
calls, opening the storage among them.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.storage.backends.base import (
    Arena,
    BlockStorage,
    Hits,
    StorageNamespace,
    StorageStats,
    block_keys,
    block_views,
)
from headwise.storage.backends.segment import Outcome, format_for, mark_deleted, max_run, read_run, write_run
from headwise.storage.backends.segment_index import Run, Segment, SegmentIndex
from headwise.storage.backends.segment_space import SegmentSpace, Tail, lacks_space, opened, touch
from headwise.storage.backends.volume import Volume

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
MIN_SEGMENTS = 64
"""That make up the capacity, so that evicting one evicts little."""

MAX_GIVING_WAY = 4
"""Segments that may be evicted, one after another, until a full disk takes one run of blocks."""

MAX_PATIENCE = 256
"""Writes in a row that may fail on a full disk without evicting anything."""


class FileStorage(BlockStorage):
    """Blocks of a namespace under ``path``.

    capacity: bytes of the segments of all namespaces under ``path``, by whichever process. Each process sees to it when
              it adds a segment, and a segment counts as full from the start, so processes that name the same capacity
              never exceed it together. Segments that are being filled are not evicted. Where the disk, or a quota, is
              full before, what fits is the capacity for as long as that lasts: the least recently used segments go.

    Raises ConfigError if ``path`` cannot be a directory or the capacity does not hold one block. A directory that is
    there but cannot be written to serves reads. Where what was mounted at ``path`` is gone, nothing is written. What is
    mounted is remembered in the directory ``notes`` for the next start.
    """

    def __init__(
        self, path: Path, capacity: int, namespace: StorageNamespace, block_bytes: int, notes: Path | None = None
    ) -> None:
        super().__init__(namespace, block_bytes)
        self._form = format_for(namespace.digest, block_bytes, min(SEGMENT_BYTES, capacity // MIN_SEGMENTS))
        if self._form.size > capacity:
            raise ConfigError(
                f"storage capacity of {capacity} bytes does not hold one block of {block_bytes} bytes with its header; "
                f"give at least {self._form.size} bytes, and better a hundred times that"
            )
        try:
            self._volume = Volume(path, notes)
        except OSError as error:
            raise ConfigError(
                f"storage directory {path} cannot be used: {error.strerror}; give one that is there or can be created"
            ) from error
        self._directory = path / namespace.digest.hex()
        self._space = SegmentSpace(path, capacity, self._volume)
        self._index = SegmentIndex(self._directory, namespace.digest, block_bytes)
        self._index.refresh()
        self._tail: Tail | None = None
        self._write_lock, self._count_lock = Lock(), Lock()
        self._hits = self._misses = self._corrupt = self._written = self._write_failures = self._disk_full = 0
        self._vain = 0  # writes in a row that failed on a full disk, though segments had been evicted
        self._logged: set[tuple[str, int | None]] = set()

    def register(self, arena: Arena) -> None:
        """Nothing to do: files can be read into any memory."""

    @property
    def volume(self) -> str:
        return self._volume.id

    @property
    def room(self) -> int | None:
        try:
            return self._space.room(self._form.size) * self._form.slots
        except OSError as error:
            self._log_once("look for room", error)
            return None

    def contains(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> Hits:
        keys = block_keys(hashes, groups)
        try:
            self._volume.check()
        except OSError as error:
            self._log_once("find", error)
        self._index.refresh()
        return np.array(self._index.contains(keys), dtype=np.bool_)

    # ---- read ----

    def read(self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]) -> Hits:
        keys = block_keys(hashes, groups)
        views = block_views(arena, blocks, self.block_bytes, len(keys))
        hits = np.zeros(len(keys), dtype=np.bool_)
        corrupt = 0
        self._index.refresh()
        for run in self._index.runs(keys):
            outcomes = self._read_run(run, [keys[p] for p in run.places], [views[p] for p in run.places])
            hits[run.places] = [outcome is Outcome.HIT for outcome in outcomes]
            corrupt += outcomes.count(Outcome.CORRUPT)
        served = int(np.count_nonzero(hits))
        with self._count_lock:
            self._hits += served
            self._misses += len(keys) - served
            self._corrupt += corrupt
        return hits

    def _read_run(self, run: Run, keys: list[bytes], views: list[memoryview]) -> list[Outcome]:
        try:
            with opened(run.segment.path, os.O_RDONLY) as fd:
                outcomes = read_run(fd, run.segment.form, run.slot, keys, views)
                touch(fd)
        except FileNotFoundError:
            self._index.forget(run.segment)  # evicted
            return [Outcome.GONE] * len(keys)
        except OSError as error:
            self._log_once("read from", error)
            return [Outcome.GONE] * len(keys)
        for slot, outcome in enumerate(outcomes, run.slot):
            if outcome is not Outcome.HIT:
                self._drop(run.segment, slot, is_marked=outcome is Outcome.GONE)
        return outcomes

    # ---- write ----

    def write(
        self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]
    ) -> Hits:
        keys = block_keys(hashes, groups)
        views = block_views(arena, blocks, self.block_bytes, len(keys))
        with self._write_lock:
            self._index.refresh()
            known = self._index.contains(keys)
            new = {key: view for key, view, is_known in zip(keys, views, known, strict=True) if not is_known}
            written = self._append(list(new), list(new.values()))
            self._index.refresh()
        with self._count_lock:
            self._written += written
            self._write_failures += len(new) - written
        return np.array(self._index.contains(keys), dtype=np.bool_)

    def _append(self, keys: list[bytes], views: list[memoryview]) -> int:
        """How many of the blocks, from the first on, were written."""
        done = 0
        try:
            while done < len(keys):
                done = self._append_run(keys, views, done)
        except OSError as error:
            self._release_tail()  # the next owner checks which blocks were written
            if error.errno == errno.EFBIG:
                told = f"segments of {self._form.size} bytes exceed the limit on file sizes; raise it (ulimit -f)"
                error = OSError(errno.EFBIG, told)
            self._log_once("write to", error)
        return done

    def _append_run(self, keys: list[bytes], views: list[memoryview], first: int) -> int:
        """Write a run of the blocks, from ``first`` on; returns its end. On a full disk, older segments give way."""
        left = MAX_GIVING_WAY if _is_worth_evicting(self._vain) else 0
        while True:
            try:
                end = self._fill_tail(keys, views, first)
            except OSError as error:
                if not lacks_space(error):
                    raise
                with self._count_lock:
                    self._disk_full += 1
                if left == 0:
                    self._vain += 1
                    raise
                if not self._space.evict_for_full_disk(error):
                    raise
                left -= 1
            else:
                self._vain = 0
                return end

    def _fill_tail(self, keys: list[bytes], views: list[memoryview], first: int) -> int:
        tail = self._usable_tail()
        end = min(len(keys), first + min(max_run(self.block_bytes), tail.form.slots - tail.slot))
        write_run(tail.fd, tail.form, tail.slot, keys[first:end], views[first:end])
        tail.slot += end - first
        if not tail.is_usable:
            self._release_tail()
        return end

    def _usable_tail(self) -> Tail:
        if self._tail is not None and not self._tail.is_usable:
            self._release_tail()
        if self._tail is None:
            known = self._index.segments()
            self._tail = self._space.acquire(self._directory, str(self.namespace), self._form, known)
        return self._tail

    def _release_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            tail.release()

    # ---- forget ----

    def delete(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> None:
        keys = block_keys(hashes, groups)
        self._index.refresh()
        for segment, slot in self._index.copies(keys):
            self._drop(segment, slot)

    def _drop(self, segment: Segment, slot: int, is_marked: bool = False) -> None:
        self._index.discard(segment, slot)
        if is_marked:
            return
        try:
            with opened(segment.path, os.O_RDWR) as fd:
                mark_deleted(fd, segment.form, slot)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._log_once("delete from", error)

    def clear(self) -> None:
        try:
            self._space.clear(self._directory)
        except FileNotFoundError:
            pass  # the whole directory vanished
        except OSError as error:
            self._log_once("clear", error)
        self._index.refresh()

    def close(self) -> None:
        with self._write_lock:
            self._release_tail()

    def stats(self) -> StorageStats:
        known = len(self._index)
        with self._count_lock:
            return StorageStats(
                blocks=known,
                bytes=known * self.block_bytes,
                hits=self._hits,
                misses=self._misses,
                corrupt=self._corrupt,
                evictions=self._index.evicted,
                written=self._written,
                write_failures=self._write_failures,
                disk_full=self._disk_full,
            )

    def _log_once(self, what: str, error: OSError) -> None:
        if (what, error.errno) not in self._logged:
            self._logged.add((what, error.errno))
            log.warning("cannot %s storage %s: %s; counted, and not logged again", what, self._directory, error)


def _is_worth_evicting(vain: int) -> bool:
    """Whether to evict segments for a write on a full disk, after ``vain`` writes in a row for which that did not help.

    Snapshots, readers that hang or another user's quota may keep the space of evicted files from becoming free. So that
    the store then keeps most of its blocks, it evicts for ever fewer writes.
    """
    return vain & (vain - 1) == 0 or vain % MAX_PATIENCE == 0
