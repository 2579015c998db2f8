"""Directories of weights that this node lacks: copied from another one to the same path, deleted when not needed.

A file beside a directory says that it is a copy, and which directory it is (its inode). Who needs the copy holds a
shared lock of that file; who makes or deletes the copy, an exclusive one. Such locks end with their process (flock(2)),
however that ends. A directory that no such file names is not ours: it is never written to, and never deleted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from headwise.errors import ModelError
from headwise.units import format_bytes

log = logging.getLogger(__name__)

MARK = ".headwise-copy"
"""What follows a directory's name in that of its file."""
_PARTIAL = ".headwise-partial"
_TRIES = 3
"""Another node's copy may be deleted while it is read: then there is a node that has it still."""
_LOOK_S = 0.1


class CutOffError(ModelError):
    """A directory elsewhere cannot be read to its end."""


class Source(Protocol):
    """A directory elsewhere.

    where: in words
    sizes: bytes of its files, by their names in it, with slashes
    """

    @property
    def where(self) -> str: ...

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        """All of the files, in the order of their names' in ``sizes``: a name, and what follows of that file.

        Raises `CutOffError`."""
        ...


class DirectoryCopies:
    """Those that a process needs. Its methods may be called from any thread.

    places:    where they may be; also where copies are looked for that nobody needs any more
    find:      tells who has a directory; None: nobody
    timeout_s: longest wait for another process that copies the same
    """

    def __init__(self, places: Sequence[Path], find: Callable[[Path], Source | None], timeout_s: float = 600.0) -> None:
        self._places, self._find, self._timeout_s = places, find, timeout_s
        self._held: dict[Path, int] = {}  # descriptors of locked files
        self._one_at_a_time = threading.Lock()

    def have(self, directory: Path) -> None:
        """Return when this node has the directory: until `keep` leaves it out, nobody here deletes its copy.

        Raises `ModelError`: nobody has it, there is no room for it, or it cannot be copied.
        """
        with self._one_at_a_time:
            if directory in self._held or (directory.exists() and not _is_copy(directory, _mark_of(directory))):
                return
            until = time.monotonic() + self._timeout_s
            while not self._hold_or_copy(directory):
                if time.monotonic() > until:
                    raise ModelError(f"{directory} is being copied by another process, which takes too long")
                time.sleep(_LOOK_S)

    def keep(self, directories: Collection[Path]) -> None:
        """Of those that `have` was asked for, only these are needed. Delete copies that nobody here needs."""
        with self._one_at_a_time:
            for directory in self._held.keys() - set(directories):
                os.close(self._held.pop(directory))
            for place in self._places:
                for mark in [*place.glob(f"*{MARK}"), *place.glob(f"*/*{MARK}")]:
                    _delete_if_unused(mark)
                for partial in [*place.glob(f".*{_PARTIAL}"), *place.glob(f"*/.*{_PARTIAL}")]:
                    if not partial.with_name(f"{partial.name[1:].rsplit('.', 2)[0]}{MARK}").exists():
                        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: nobody is at it

    def _hold_or_copy(self, directory: Path) -> bool:
        """False if another process makes or deletes it just now."""
        is_there = directory.exists()
        descriptor = _locked(directory, fcntl.LOCK_SH if is_there else fcntl.LOCK_EX)
        if descriptor is None:
            return False
        if not is_there:
            try:
                if not directory.exists():
                    self._copy(directory)
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, str(directory.stat().st_ino).encode(), 0)
            except BaseException:
                _mark_of(directory).unlink(missing_ok=True)
                os.close(descriptor)
                raise
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # lets go of the other lock first: it may be deleted just then
        if directory.exists():
            self._held[directory] = descriptor
        else:
            os.close(descriptor)
        return directory in self._held

    def _copy(self, directory: Path) -> None:
        for number in range(1, _TRIES + 1):
            source = self._find(directory)
            if source is None:
                raise ModelError(f"{directory} is at no node: it must be at one, until the next weights are served")
            try:
                _copied(source, directory)
                return
            except CutOffError as error:
                if number == _TRIES:
                    raise
                log.warning("%s; it is looked for again", error)


def _copied(source: Source, directory: Path) -> None:
    """Raises `ModelError`."""
    began, size = time.monotonic(), sum(source.sizes.values())
    for name in source.sizes:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ModelError(f"{source.where} has a file {name!r:.200}, which is not in {directory}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for left in directory.parent.glob(f".{directory.name}.*{_PARTIAL}"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(directory.parent).free
        if free < size:
            raise ModelError(
                f"{directory} is at {source.where} and has {format_bytes(size)}, but here are {format_bytes(free)} free"
            )
        partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex}{_PARTIAL}"
        try:
            _write(source, partial)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{directory} cannot be copied from {source.where}: {error}") from error
    seconds = time.monotonic() - began
    log.info("copied %s (%s) from %s in %.1f s", directory, format_bytes(size), source.where, seconds)


def _write(source: Source, directory: Path) -> None:
    directory.mkdir()
    for name in source.sizes:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    for name, piece in source.pieces():
        with (directory / name).open("ab") as file:
            file.write(piece)
    for name, size in source.sizes.items():
        written = (directory / name).stat().st_size
        if written != size:
            raise CutOffError(f"{name} of {source.where} has {written} bytes, and had {size} before: has it changed?")


def _mark_of(directory: Path) -> Path:
    return directory.with_name(directory.name + MARK)


def _is_copy(directory: Path, mark: Path) -> bool:
    try:
        return mark.read_text() == str(directory.stat().st_ino)
    except OSError:
        return False


def _locked(directory: Path, how: int) -> int | None:
    """A descriptor of the file of a copy, locked; None if others have it locked. Raises `ModelError`."""
    mark = _mark_of(directory)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ModelError(f"{directory} is not at this node, and cannot be copied to it: {error}") from error
    if _is_locked(descriptor, how) and _is_at(descriptor, mark):
        return descriptor
    os.close(descriptor)
    return None


def _is_locked(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, mark: Path) -> bool:
    """Whether a file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), mark.stat())
    except FileNotFoundError:
        return False


def _delete_if_unused(mark: Path) -> None:
    directory = mark.with_name(mark.name.removesuffix(MARK))
    try:
        descriptor = os.open(mark, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # another process has deleted it, or it is another user's
        return
    try:
        if not (_is_locked(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, mark)):
            return
        if _is_copy(directory, mark):
            gone = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}{_PARTIAL}")
            directory.rename(gone)  # so that there is all of it, or nothing
            shutil.rmtree(gone, ignore_errors=True)
            log.info("deleted %s: nobody here needs the copy", directory)
        mark.unlink()
    except OSError as error:
        log.warning("%s cannot be deleted: %s", directory, error)
    finally:
        os.close(descriptor)
