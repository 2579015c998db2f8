"""A cache of packed weights on disk: where packing takes long, the next start maps a file instead.

Each rank's weights are a file of their own, named after the model, the settings that decide its bytes, and the rank. It
says by what code it was made; other code makes it anew, in its place. It appears whole or not at all. Where a file
cannot be used, the weights are packed again; where none can be written, they are not kept. Neither is an error.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from headwise.runtime.loader.files import LockedFile
from headwise.runtime.loader.packed_file import DamagedError, StaleError, read_packed, write_packed
from headwise.runtime.loader.progress import Progress, SilentProgress
from headwise.runtime.ops.base import PackedParts, PackingOps, Weight
from headwise.units import format_bytes

log = logging.getLogger(__name__)

DIRECTORY = "packed"
"""Name of these files' directory within the cache directory."""

LEAST_S = 2.0
"""Weights that were packed in fewer seconds are not kept."""

MOST_BYTES = 128 << 30
"""Most bytes of all packed weights in a directory. Files of the same model with other settings are deleted for new ones
to fit, least recently used first; if that is not enough, the new ones are not kept."""

SPARE_BYTES = 8 << 30
"""Bytes that must stay free on the disk. Weights that would leave fewer are not kept."""

_OURS = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}-\d+of\d+\.packed")
"""Names of our files: hashes of model and settings, rank and number of ranks."""

_PARTIAL = ".partial"


@dataclass(frozen=True)
class Limits:
    """When packed weights are kept: see `LEAST_S`, `MOST_BYTES` and `SPARE_BYTES`."""

    least_s: float = LEAST_S
    most_bytes: int = MOST_BYTES
    spare_bytes: int = SPARE_BYTES


LIMITS = Limits()


@dataclass(frozen=True)
class PackedKey:
    """What decides the bytes of a rank's packed weights.

    model:    a hash of the weights that are packed
    settings: all else that they depend on but for code; values as in JSON
    rank:     from 0 to ``size - 1``
    size:     number of ranks
    recipe:   says by what code they are made: which rows they are of, in which order, and what becomes of numbers. Not
              of the name, so that files of older code do not stay beside those of newer
    """

    model: str
    settings: Mapping[str, Any]
    rank: int
    size: int
    recipe: str

    @property
    def text(self) -> str:
        """The key without its recipe, as JSON: equal for equal ones only."""
        return json.dumps([self.model, dict(self.settings), self.rank, self.size], sort_keys=True)

    @property
    def file_name(self) -> str:
        settings = json.dumps(dict(self.settings), sort_keys=True)
        return f"{_short(self.model)}-{_short(settings)}-{self.rank}of{self.size}.packed"


def _short(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


class PackedWeights:
    """One rank's packed weights while its model is built: from disk if they are there, else packed and then kept there.

    The model calls `prepare` for each weight. Call `keep` once it is built, and only if the weights that were read are
    known to be those of ``key``.
    """

    def __init__(
        self,
        directory: Path,
        key: PackedKey,
        ops: PackingOps,
        elements: Callable[[], int],
        limits: Limits = LIMITS,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Read the weights from disk. Where that fails, `prepare` makes them; nothing is raised.

        directory: where these files are kept; made when something is written
        elements:  gives the number of elements of all weights, roughly, to report progress
        clock:     in seconds
        """
        self._directory, self._key, self._path = directory, key, directory / key.file_name
        self._ops, self._elements, self._limits, self._clock = ops, elements, limits, clock
        self._progress = progress or SilentProgress()
        self._parts: dict[str, PackedParts] = {}
        self._made, self._made_s, self._done, self._total = 0, 0.0, 0, 0
        started = clock()
        self._found = self._read()
        self._read_s = clock() - started

    def prepare(self, name: str, make: Callable[[], Weight]) -> Weight:
        """The weight ``name``, from disk, or else what ``make`` returns. Names must be unique."""
        weight = self._found[name] if name in self._found else self._make(make)
        self._parts[name] = self._ops.parts_of(weight)
        return weight

    def keep(self) -> None:
        """Write the weights to disk, if packing them took long and there is room; log what was done. Never raises
        `OSError`."""
        size = sum(array.nbytes for parts in self._parts.values() for array in parts.arrays.values())
        if not self._made:
            log.info("packed weights (%s) came from %s in %.1f s", format_bytes(size), self._path, self._read_s)
            with suppress(OSError):
                os.utime(self._path)  # entries that were not used for long go first
        elif self._made_s >= self._limits.least_s:
            try:
                self._write(size)
            except OSError as error:
                log.warning("packed weights are not kept in %s: %s", self._directory, error.strerror or error)

    # ---- reading ----

    def _read(self) -> dict[str, Weight]:
        """Name -> weight, from disk; empty if there is no file that can be used."""
        self._progress.stage("reading packed weights")
        try:
            parts = read_packed(self._path, self._key.text, self._key.recipe, self._progress)
            return {name: self._ops.weight_of(each) for name, each in parts.items()}
        except FileNotFoundError:
            return {}
        except StaleError:
            log.info("packed weights are made anew: those in %s were made by another version of headwise", self._path)
        except OSError as error:
            log.warning("packed weights are made anew: %s cannot be read: %s", self._path, error.strerror or error)
        except (DamagedError, ValueError) as error:
            log.warning("packed weights are made anew: %s cannot be used, and is deleted: %s", self._path, error)
            with suppress(OSError):
                self._path.unlink()
        return {}

    def _make(self, make: Callable[[], Weight]) -> Weight:
        if not self._made:
            self._progress.stage("packing the weights")
            self._total = self._elements()
        started = self._clock()
        weight = make()
        self._made_s += self._clock() - started
        self._made += 1
        self._done += self._ops.parts_of(weight).elements
        self._progress.update(min(self._done, self._total), self._total)
        return weight

    # ---- writing ----

    def _write(self, size: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._remove_left_behind()
        if any(self._directory.glob(f"{self._path.name}.*{_PARTIAL}")):
            log.info("packed weights are being kept in %s by another process", self._path)
            return
        why_not = self._make_room(size)
        if why_not:
            log.info("packed weights (%s) are not kept on disk: %s", format_bytes(size), why_not)
            return
        self._progress.stage("keeping the packed weights on disk")
        started = self._clock()
        with self._partial() as partial:
            write_packed(partial, self._key.text, self._key.recipe, self._parts, self._progress)
            partial.replace(self._path)
        taken = self._made_s, self._path, self._clock() - started
        log.info("packed weights (%s) were made in %.1f s and kept in %s in %.1f s", format_bytes(size), *taken)

    @contextmanager
    def _partial(self) -> Iterator[Path]:
        """A new file to write to, locked until the block ends or this process dies; then deleted, unless renamed."""
        while True:
            path = self._directory / f"{self._path.name}.{uuid4().hex}{_PARTIAL}"
            lock = LockedFile(path)
            if lock.acquire() and path.exists():
                break
            lock.close()  # before it was locked, somebody took it for one that was left behind
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
            lock.close()

    def _remove_left_behind(self) -> None:
        """Delete partial files whose writers are dead."""
        for path in self._directory.glob(f"*.packed.*{_PARTIAL}"):
            lock = LockedFile(path)
            if lock.acquire():
                path.unlink(missing_ok=True)
            lock.close()

    def _make_room(self, size: int) -> str:
        """Delete what must go for ``size`` more bytes. Returns why they may not be written, or an empty string."""
        limits, free = self._limits, shutil.disk_usage(self._directory).free
        if free - size < limits.spare_bytes:
            spare = format_bytes(limits.spare_bytes)
            return f"{self._directory} has {format_bytes(free)} free, and {spare} are to stay so"
        entries = {path: path.stat() for path in self._directory.iterdir() if _OURS.fullmatch(path.name)}
        entries.pop(self._path, None)  # is replaced
        over = sum(status.st_size for status in entries.values()) + size - limits.most_bytes
        older = sorted(filter(self._is_superseded, entries), key=lambda path: entries[path].st_mtime)
        if over > sum(entries[path].st_size for path in older):
            most = format_bytes(limits.most_bytes)
            return f"{self._directory} may hold {most}, which other models' fill: delete those that are not needed"
        for path in older:
            if over <= 0:
                break
            over -= entries[path].st_size
            path.unlink(missing_ok=True)
            log.info("deleted %s, packed weights of the same model", path)
        return ""

    def _is_superseded(self, path: Path) -> bool:
        """Whether a file is of the same model with other settings. Those of this deployment's other ranks are not."""
        (my_model, my_settings, _), (model, settings, _) = self._path.name.split("-"), path.name.split("-")
        return model == my_model and settings != my_settings
