"""Files and directories that appear whole or not at all, even if processes are killed or many start at once."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headwise.errors import ModelError
from headwise.runtime.loader.progress import Progress


@contextmanager
def building(target: Path, progress: Progress) -> Iterator[Path | None]:
    """Build the directory ``target``, in one process at a time; waits for another that builds it.

    Yields an empty directory to fill, which is renamed to ``target`` when the block ends without an error; or ``None``
    if another process has built ``target`` meanwhile. The lock is released even if the process is killed.

    Raises:
        ModelError: the cache directory cannot be written. Any `OSError` within the block is taken for that.
    """
    try:
        with _building(target, progress) as directory:
            yield directory
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache directory {target.parent}: {error.strerror or error}; "
            "make room there or choose another with --cache-dir"
        ) from error


@contextmanager
def _building(target: Path, progress: Progress) -> Iterator[Path | None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(handle, target, progress)
        if target.is_dir():
            yield None
            return
        # Only the lock's owner touches this directory, so what is there was left by a process that was killed.
        partial = target.parent / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(handle)


class LockedFile:
    """A file that at most one process can lock. The holder writes a line in it, which others may read.

    The file is made if it is missing; `OSError` if that fails. The lock is released even if its process is killed.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def acquire(self) -> bool:
        """Try to take the lock; False if another process has it. Where files cannot be locked, always True."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def read(self) -> bytes:
        """The line that the holder wrote last, padded with spaces; empty if there is none."""
        return os.pread(self._handle, 128, 0)

    def write(self, text: bytes) -> None:
        """Replace the line; at most 64 bytes."""
        os.pwrite(self._handle, text.ljust(64), 0)

    def close(self) -> None:
        """Release the lock; the file stays."""
        os.close(self._handle)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, or replace it, so that it appears whole or not at all; raises `OSError` if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """What is written to is there, whole, once the block has ended, and not at all if that fails; raises `OSError`.

    Processes that share the directory may have the same host name and number: containers often do.
    """
    partial = path.parent / f"{path.name}.{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}.partial"
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _acquire(handle: int, target: Path, progress: Progress) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress.stage(f"waiting for another process to prepare {target.name}")
        fcntl.flock(handle, fcntl.LOCK_EX)
