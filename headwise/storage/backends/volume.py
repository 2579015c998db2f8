"""Tells whether nodes share a storage directory, and whether its mount is missing.

    path/volume-id      32 hexadecimal digits, drawn by the first process that used the directory

Processes that read the same digits use the same directory, and find each other's blocks there.

    notes/DIGEST        the path's mount point and digits, as they were when this node last used it

A process that finds no digits at the path, and another mount point than the one noted, has started without its mount.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import uuid
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

log = logging.getLogger(__name__)

ID_FILE = "volume-id"

_ID = re.compile(rb"[0-9a-f]{32}")


class Volume:
    """The directory at ``root``, created if it is missing. Raises OSError if that fails.

    A directory that was deleted may be created again. But if the path leads to another file system than before (it was
    unmounted), also before this process started, nothing is created or written until the first one is back.

    notes:      directory on the node's own disk, to remember mount points between processes; None: they are not
    is_missing: whether the last `check` found the file system missing
    """

    def __init__(self, root: Path, notes: Path | None = None) -> None:
        self._root = root
        note = None if notes is None else notes / sha256(os.fsencode(root.absolute())).hexdigest()[:32]
        mount, self._id = ("", "") if note is None else _read_note(note)
        self.is_missing = bool(mount) and not _read_id(root) and str(_mount_of(root)) != mount
        if self.is_missing:
            self._device = -1
            log.warning(
                "storage %s was last used with a file system at %s, where there is none now: nothing is stored until "
                "it is mounted; delete %s to use the directory without it",
                root, mount, note,
            )  # fmt: skip
            return
        root.mkdir(parents=True, exist_ok=True)
        self._device = os.stat(root).st_dev
        self._id = _read_id(root)
        if not self._id:
            if not any(root.iterdir()):
                log.info("storage %s is used for the first time, on the file system at %s", root, _mount_of(root))
            self._id = _write_id(root, uuid.uuid4().hex)
        if note is not None and self._id:
            _write_note(note, str(_mount_of(root)), self._id)

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
    path = path.resolve()
    return next(each for each in (path, *path.parents) if os.path.ismount(each))


def _read_note(note: Path) -> tuple[str, str]:
    """A mount point, and the id of the directory that was used there; empty if there is no note."""
    try:
        volume, _, mount = note.read_text().strip().partition(" ")
    except (OSError, UnicodeDecodeError):
        return "", ""
    return (mount, volume) if _ID.fullmatch(volume.encode()) else ("", "")


def _write_note(note: Path, mount: str, volume: str) -> None:
    if _read_note(note) == (mount, volume):
        return
    unfinished = note.with_name(f"{note.name}.{uuid.uuid4().hex}.tmp")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(f"{volume} {mount}\n")
        unfinished.rename(note)
    except (OSError, UnicodeEncodeError) as error:
        log.info("%s cannot be written (%s): a mount that is missing at the next start is not noticed", note, error)


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
