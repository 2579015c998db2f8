"""The directory that processes share: which process may append to a segment, and which segments are evicted.

    path/volume-id                             identifies the directory, wherever it is mounted
    path/lock                                  held while a segment is created, taken over or evicted
    path/<namespace digest>/about.txt          the namespace, for people
    path/<namespace digest>/<id>.seg           a segment; the process that appends to it holds a lock on it
    path/<namespace digest>/<id>.tmp           a segment that is being created

Locks are advisory ones (flock), which the kernel frees when their holder dies. So a segment without a lock has no
writer and may be taken over or evicted, and a .tmp file that is seen while holding ``path/lock`` is a dead process's.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headwise.storage.backends.segment import SegmentFormat, first_free_slot
from headwise.storage.backends.segment_index import SUFFIX, Segment
from headwise.storage.backends.volume import Volume
from headwise.units import format_bytes

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 30.0
"""Longest wait for another process that creates or evicts a segment: its disk may be busy, or it may be suspended. Only
writes wait, in the background. If the wait is too long, their blocks are not stored."""
LOCK_POLL_S = 0.005
UNFINISHED = ".tmp"

GROWTH_OF_SPELL = 8
"""A disk counts as full until the segments on it have grown by this part of the capacity."""

_NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")


def lacks_space(error: OSError) -> bool:
    """Whether the error means that the disk or a quota is full. Not EFBIG: that limits a single file."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class _File(NamedTuple):
    """A segment's file, complete or not. Files are ordered by when they are evicted.

    used_ns: when it was last used
    size:    bytes that count towards the capacity
    on_disk: bytes that the disk has given for it so far
    """

    used_ns: int
    size: int
    on_disk: int
    path: Path


@dataclass
class Tail:
    """A segment to append to, locked by ``fd``. slot: the next to fill."""

    fd: int
    form: SegmentFormat
    slot: int

    @property
    def is_usable(self) -> bool:
        """Whether a slot is free, and the file still has a name."""
        return self.slot < self.form.slots and os.fstat(self.fd).st_nlink > 0

    def release(self) -> None:
        with suppress(OSError):  # an error of earlier writes, on a network file system: checksums tell
            os.close(self.fd)


class SegmentSpace:
    """The files under ``root``, at most ``capacity`` bytes of them. Methods raise OSError where the system does.

    If the disk has less room, it counts as full from the first `evict_for_full_disk` until the segments have grown well
    beyond the size that they had shrunk to. This is logged once.
    """

    def __init__(self, root: Path, capacity: int, volume: Volume | None = None) -> None:
        self._root, self._capacity = root, capacity
        self._volume = volume or Volume(root)
        self._full_at: int | None = None  # least bytes of segments while the disk was full; None: it is not

    def acquire(self, directory: Path, about: str, form: SegmentFormat, known: Iterable[Segment]) -> Tail:
        """A segment to append to: one of the ``known`` that has room and no writer, else a new one in ``directory``.

        Room for a new one is made by evicting the least recently used segments of the whole ``root``.
        """
        self._volume.prepare()
        directory.mkdir(exist_ok=True)
        with self._locked():
            for segment in known:
                if tail := _take_over(segment):
                    return tail
            self._make_room(form.size)
            with suppress(OSError):
                (directory / "about.txt").write_text(about + "\n")
            return _create(directory, form)

    def room(self, size: int) -> int:
        """How many segments of ``size`` bytes can be created before another one is evicted."""
        with self._locked():
            free = self._capacity - sum(file.size for file in self._files())
        disk = os.statvfs(self._root)
        return max(0, min(free, disk.f_bavail * disk.f_frsize) // size)

    def clear(self, directory: Path) -> None:
        """Remove every segment in ``directory``, also those that are being filled."""
        with self._locked():
            for path in directory.glob(f"*{SUFFIX}"):
                path.unlink(missing_ok=True)

    def evict_for_full_disk(self, error: OSError) -> bool:
        """Evict the least recently used segment, because a write failed with ``error`` on a full disk.

        False if all segments are being filled. It evicts only one, which is room for many writes: so several processes
        that find the disk full at once do not evict too much.
        """
        with self._locked():
            files = sorted(self._files())
            self._note_full(sum(file.on_disk for file in files), error)
            return any(_evict(file.path) for file in files)

    def _make_room(self, wanted: int) -> None:
        files = sorted(self._files())
        self._note_growth(sum(file.on_disk for file in files))
        used = sum(file.size for file in files)
        for file in files:
            if used + wanted <= self._capacity:
                return
            if _evict(file.path):
                used -= file.size
        if used + wanted > self._capacity:
            raise OSError(f"{used} of {self._capacity} bytes are in segments that are being filled")

    def _note_full(self, on_disk: int, error: OSError) -> None:
        if self._full_at is None:
            log.warning(
                "storage %s cannot reach its capacity of %s: the disk or a quota is full (%s) with %s stored; least "
                "recently used blocks give way to new ones until there is room again; free space or give less capacity",
                self._root,
                format_bytes(self._capacity),
                error.strerror,
                format_bytes(on_disk),
            )
        self._full_at = on_disk if self._full_at is None else min(self._full_at, on_disk)

    def _note_growth(self, on_disk: int) -> None:
        if self._full_at is not None and on_disk >= self._full_at + self._capacity // GROWTH_OF_SPELL:
            log.info("storage %s has room again: %s are stored", self._root, format_bytes(on_disk))
            self._full_at = None

    def _files(self) -> Iterator[_File]:
        """Every segment; what dead processes left unfinished is removed."""
        for directory in os.scandir(self._root):
            if not _NAMESPACE_NAME.fullmatch(directory.name):
                continue
            for entry in os.scandir(directory):
                if entry.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):
                        told = entry.stat(follow_symlinks=False)
                        yield _File(told.st_mtime_ns, told.st_size, told.st_blocks * 512, Path(entry.path))
                elif entry.name.endswith(UNFINISHED):
                    os.unlink(entry.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._volume.check()
        with opened(self._root / "lock", os.O_RDWR | os.O_CREAT) as fd:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._root / 'lock'} was held by another process for {LOCK_TIMEOUT_S:g} s")
                time.sleep(LOCK_POLL_S)
            yield


def namespaces_in(root: Path) -> dict[str, str]:
    """What namespaces have blocks under ``root``: by the name of each one's directory, what its ``about.txt`` says."""
    abouts: dict[str, str] = {}
    for directory in root.iterdir() if root.is_dir() else ():
        if _NAMESPACE_NAME.fullmatch(directory.name):
            with suppress(OSError):
                abouts[directory.name] = (directory / "about.txt").read_text().strip()
    return abouts


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor, for as long as the context lasts."""
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def touch(fd: int) -> None:
    """Mark a segment as used now, if this process may."""
    now = time.time_ns()  # finer than the clock by which the kernel stamps
    with suppress(OSError):
        os.utime(fd, ns=(now, now))


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take_over(segment: Segment) -> Tail | None:
    if len(segment.keys) == segment.form.slots:
        return None
    try:
        fd = os.open(segment.path, os.O_RDWR)
    except OSError:
        return None  # gone, or not ours to write
    tail = Tail(fd, segment.form, segment.form.slots)
    if _try_lock(fd):
        tail.slot = first_free_slot(fd, segment.form)
        if tail.is_usable:
            return tail
    tail.release()
    return None


def _create(directory: Path, form: SegmentFormat) -> Tail:
    name = uuid.uuid4().hex
    unfinished = directory / (name + UNFINISHED)
    fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, form.to_header(), 0)
        os.ftruncate(fd, form.size)
        unfinished.rename(directory / (name + SUFFIX))
    except OSError:
        os.close(fd)
        with suppress(OSError):  # then the next look at the directory removes it
            unfinished.unlink()
        raise
    return Tail(fd, form, 0)


def _evict(path: Path) -> bool:
    """Remove a segment, unless a process appends to it."""
    try:
        with opened(path, os.O_RDWR) as fd:
            if not _try_lock(fd):
                return False
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    return True
