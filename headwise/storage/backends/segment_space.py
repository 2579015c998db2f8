"""The directory that processes share: who may append to which segment, and what goes when the capacity is reached.

    path/lock                                  held while a segment is created, taken over or evicted
    path/<namespace digest>/about.txt          the namespace, for people
    path/<namespace digest>/<id>.seg           a segment; whoever appends to it holds a lock on it
    path/<namespace digest>/<id>.tmp           a segment that is being created

Locks are advisory ones (flock), which the kernel frees when their holder dies. So a segment without a lock has no
writer and may be taken over or evicted, and a .tmp file that is seen while holding ``path/lock`` is a dead process's.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headwise.storage.backends.segment import SegmentFormat, first_free_slot
from headwise.storage.backends.segment_index import SUFFIX, Segment

LOCK_TIMEOUT_S = 2.0
LOCK_POLL_S = 0.005
UNFINISHED = ".tmp"

_NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")


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
        with suppress(OSError):  # of writes before, on a network's file system; checksums tell what got there
            os.close(self.fd)


class SegmentSpace:
    """The files under ``root``, at most ``capacity`` bytes of them. Methods raise OSError where the system does."""

    def __init__(self, root: Path, capacity: int) -> None:
        self._root, self._capacity = root, capacity

    def acquire(self, directory: Path, about: str, form: SegmentFormat, known: Iterable[Segment]) -> Tail:
        """A segment to append to: one of the ``known`` that has room and no writer, else a new one in ``directory``.

        Room for a new one is made by evicting the least recently used segments of the whole ``root``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with self._locked():
            for segment in known:
                if tail := _take_over(segment):
                    return tail
            self._make_room(form.size)
            with suppress(OSError):
                (directory / "about.txt").write_text(about + "\n")
            return _create(directory, form)

    def clear(self, directory: Path) -> None:
        """Remove every segment in ``directory``, also those that are being filled."""
        with self._locked():
            for path in directory.glob(f"*{SUFFIX}"):
                path.unlink(missing_ok=True)

    def _make_room(self, wanted: int) -> None:
        files = sorted(self._files())
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used + wanted <= self._capacity:
                return
            if _evict(path):
                used -= size
        if used + wanted > self._capacity:
            raise OSError(f"{used} of {self._capacity} bytes are in segments that are being filled")

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(last use in ns, bytes, path) of every segment; what dead processes left unfinished is removed."""
        for directory in os.scandir(self._root):
            if not _NAMESPACE_NAME.fullmatch(directory.name):
                continue
            for entry in os.scandir(directory):
                if entry.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):
                        told = entry.stat(follow_symlinks=False)
                        yield told.st_mtime_ns, told.st_size, Path(entry.path)
                elif entry.name.endswith(UNFINISHED):
                    os.unlink(entry.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
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
