"""Tells whether nodes share a storage directory, and whether its mount is missing.

    path/volume-id      32 hexadecimal digits, drawn by the first process that used the directory

Processes that read the same digits use the same directory, and find each other's blocks there.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

ID_FILE = "volume-id"

_ID = re.compile(rb"[0-9a-f]{32}")


class Volume:
    """The directory at ``root``, created if it is missing. Raises OSError if that fails.

    A directory that was deleted may be created again. But if the path leads to another file system than before (it was
    unmounted), nothing is written until the first one is back.

    is_missing: whether the last `check` found the file system missing
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.is_missing = False
        self._root = root
        self._device = os.stat(root).st_dev
        self._id = _read_id(root)
        if not self._id:
            if not any(root.iterdir()):
                log.info("storage %s is used for the first time, on the file system at %s", root, _mount_of(root))
            self._id = _write_id(root, uuid.uuid4().hex)

    @property
    def id(self) -> str:
        """The digits in its file; empty where they cannot be read or written, and while it is missing."""
        return "" if self.is_missing else self._id

    def check(self) -> None:
        """Raise OSError if the path leads to another file system than before."""
        device = os.stat(_nearest(self._root)).st_dev
        if device != self._device:
            self.is_missing = not self._id or _read_id(self._root) != self._id
            if self.is_missing:
                told = "it is on another file system than when it was opened; mount it again"
                raise OSError(errno.ENODEV, told, str(self._root))
            self._device = device  # mounted again
        self.is_missing = False

    def prepare(self) -> None:
        """Make sure that the directory can be written to; raises OSError if it cannot."""
        self.check()
        self._root.mkdir(parents=True, exist_ok=True)
        if self._id and not (self._root / ID_FILE).exists():
            _write_id(self._root, self._id)


def _nearest(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next((each for each in (path, *path.parents) if each.exists()), path)


def _mount_of(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.ismount(each))


def _read_id(root: Path) -> str:
    try:
        with (root / ID_FILE).open("rb") as file:
            told = file.read(64).strip()
    except OSError:
        return ""
    return told.decode() if _ID.fullmatch(told) else ""


def _write_id(root: Path, volume: str) -> str:
    """Write the file, unless another process does so first. Returns the id that it then has."""
    unfinished = root / f"{ID_FILE}.{uuid.uuid4().hex}.tmp"
    try:
        unfinished.write_text(volume + "\n")
        try:
            os.link(unfinished, root / ID_FILE)  # whole, or not at all, and never over another's
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            unfinished.rename(root / ID_FILE)
    except OSError as error:
        log.info("storage %s: %s cannot be written (%s): it counts as this process's own", root, ID_FILE, error)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return _read_id(root)
