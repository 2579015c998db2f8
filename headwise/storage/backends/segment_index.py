"""An index of a namespace's directory: which block lies in which slot of which segment. Safe for several threads.

The index follows the files: it lists the directory when that has changed, and reads new entries of the segments that
any process is still filling.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock

from headwise.storage.backends.segment import MAX_SLOTS, SegmentFormat, max_run, read_entries, read_format

SUFFIX = ".seg"

SETTLED_NS = 100_000_000
"""A directory that changed less than this ago may change again without a new time stamp."""


@dataclass(frozen=True)
class Segment:
    """A file of the namespace. keys: by slot, of the entries read so far; None where a block was deleted or damaged."""

    number: int
    path: Path
    form: SegmentFormat
    keys: list[bytes | None] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """Neighbouring slots, from ``slot`` on, and at which places of the question their keys stand."""

    segment: Segment
    slot: int
    places: list[int]


class SegmentIndex:
    """The blocks of ``block_bytes`` that the segments in ``directory`` hold. A directory that is not there is empty."""

    def __init__(self, directory: Path, namespace: bytes, block_bytes: int) -> None:
        self._directory = directory
        self._namespace, self._block_bytes = namespace, block_bytes
        self._lock = Lock()
        self._numbers = count()
        self._segments: dict[int, Segment] = {}
        self._names: dict[str, int | None] = {}  # None: not a segment for this index
        self._growing: set[int] = set()
        # As one integer, number * MAX_SLOTS + slot: a tuple for each block would burden the garbage collector.
        self._where: dict[bytes, int] = {}
        self._settled_at = 0
        self._evicted = 0

    def __len__(self) -> int:
        return len(self._where)

    @property
    def evicted(self) -> int:
        """Blocks whose segment vanished while the index knew them."""
        return self._evicted

    def refresh(self) -> None:
        """Learn what changed in the directory, and in the segments that are not full."""
        with self._lock:
            self._list_directory()
            for number in list(self._growing):
                self._read_tail(self._segments[number])

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._where for key in keys]

    def runs(self, keys: Sequence[bytes]) -> list[Run]:
        """Where the keys lie, those of neighbouring slots together; unknown keys are left out."""
        with self._lock:
            found = sorted((self._where[key], place) for place, key in enumerate(keys) if key in self._where)
            longest = max_run(self._block_bytes)
            runs: list[Run] = []
            end = -1
            for where, place in found:
                number, slot = divmod(where, MAX_SLOTS)
                if where == end and slot and len(runs[-1].places) < longest:
                    runs[-1].places.append(place)
                else:
                    runs.append(Run(self._segments[number], slot, [place]))
                end = where + 1
            return runs

    def copies(self, keys: Sequence[bytes]) -> list[tuple[Segment, int]]:
        """Every slot that holds one of the keys: processes that write at once may store a block twice."""
        wanted = set(keys)
        with self._lock:
            return [(at, slot) for at in self._segments.values() for slot, key in enumerate(at.keys) if key in wanted]

    def segments(self) -> list[Segment]:
        with self._lock:
            return list(self._segments.values())

    def discard(self, segment: Segment, slot: int) -> None:
        """Forget the block in one slot."""
        with self._lock:
            key, segment.keys[slot] = segment.keys[slot], None
            if key is not None and self._where.get(key) == segment.number * MAX_SLOTS + slot:
                del self._where[key]

    def forget(self, segment: Segment) -> None:
        """Forget a segment whose file is gone."""
        with self._lock:
            self._forget(segment.path.name)

    # ---- following the files ----

    def _list_directory(self) -> None:
        try:
            changed_at = os.stat(self._directory).st_mtime_ns
            if changed_at == self._settled_at:
                return
            names = {name for name in os.listdir(self._directory) if name.endswith(SUFFIX)}
        except (FileNotFoundError, NotADirectoryError):
            changed_at, names = 0, set()
        except OSError:  # an error is no empty directory: keep what is known until a listing succeeds
            self._settled_at = 0
            return
        self._settled_at = changed_at if time.time_ns() - changed_at > SETTLED_NS else 0
        for name in self._names.keys() - names:
            self._forget(name)
        for name in sorted(names - self._names.keys()):
            self._learn(name)

    def _learn(self, name: str) -> None:
        path = self._directory / name
        try:
            form = read_format(path)
        except OSError:
            self._settled_at = 0  # unless it was evicted just now, look again
            return
        if form is None or (form.namespace, form.block_bytes) != (self._namespace, self._block_bytes):
            self._names[name] = None
            return
        segment = Segment(next(self._numbers), path, form)
        self._names[name] = segment.number
        self._segments[segment.number] = segment
        self._growing.add(segment.number)

    def _read_tail(self, segment: Segment) -> None:
        slot = len(segment.keys)
        try:
            fd = os.open(segment.path, os.O_RDONLY)
            try:
                segment.keys.extend(read_entries(fd, segment.form, slot))
            finally:
                os.close(fd)
        except OSError:
            return  # evicted: the next look at the directory tells
        base = segment.number * MAX_SLOTS
        self._where.update((key, base + at) for at, key in enumerate(segment.keys[slot:], slot) if key is not None)
        if len(segment.keys) == segment.form.slots:
            self._growing.discard(segment.number)

    def _forget(self, name: str) -> None:
        number = self._names.pop(name, None)
        if number is None:
            return
        segment = self._segments.pop(number)
        self._growing.discard(number)
        base = number * MAX_SLOTS
        for at, key in enumerate(segment.keys):
            if key is not None and self._where.get(key) == base + at:
                del self._where[key]
                self._evicted += 1
