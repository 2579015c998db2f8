"""Temporary directories for sockets and the like, removed even if the process that made them is killed."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_LOCK = "owner"
_UNLOCKED = "owner.new"


class ScratchDirectory:
    """A directory of this process alone, until `close`.

    The process holds a lock in it. The kernel releases the lock when the process dies, however it dies. (Process ids
    would not do: containers may share a directory.)

    path: ``parent/PREFIX...``
    """

    def __init__(self, parent: str, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._descriptor: int | None = os.open(self.path / _UNLOCKED, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        # It gets the name that `sweep` looks for only now, so `sweep` never finds it unlocked.
        os.rename(self.path / _UNLOCKED, self.path / _LOCK)

    def close(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def sweep(parent: str, prefix: str) -> list[Path]:
    """Remove directories ``parent/PREFIX...`` of this user whose processes are dead. Returns the removed ones.

    Directories without an owner's lock stay: their owners are not known.
    """
    removed = []
    for path in Path(parent).glob(f"{prefix}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except OSError:  # its owner lives
            continue
        finally:
            with suppress(OSError):
                os.close(descriptor)
    if removed:
        log.info("removed what dead processes left: %s", ", ".join(map(str, removed)))
    return removed
