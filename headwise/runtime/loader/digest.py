"""Identifies a model's weights by a digest of every byte, computed once and cached while the files do not change.

Cache blocks in storage outlive a deployment and are shared with others, so weights that differ in one byte must have
different digests. A file is hashed in chunks, as many at once as there are cores: SHA-256 does 1 to 2 GB/s on each. The
file's digest is the hash of its size and its chunks' digests.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from headwise.cores import usable_cores
from headwise.errors import ModelError
from headwise.runtime.loader.checkpoint import weight_files
from headwise.runtime.loader.files import LockedFile, replace_file
from headwise.runtime.loader.progress import Progress, SilentProgress
from headwise.units import format_bytes

log = logging.getLogger(__name__)

RECORDS = ".headwise-digests.json"
"""The file beside the weights that digests are cached in. If their directory cannot be written, a file in the cache
directory is used."""

CHUNK_BYTES, READ_BYTES = 32 << 20, 1 << 20
"""How much one thread hashes, and how much of that it reads at a time. Another chunk size gives other digests."""

MAX_THREADS = 16
MAX_RECORDS_BYTES = 16 << 20
"""No more is read of a file of cached digests."""

STALLED_S = 10.0
"""A process waits for another's digest as long as that makes progress; after so long without, it computes its own."""

_YOUNG_NS = 100_000_000
"""Longer than the steps in which a kernel's file time stamps advance."""

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class _Stamp:
    """What changes whenever a file's content does. ``ctime`` changes even if a program sets ``mtime`` back."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_settled(self, now_ns: int) -> bool:
        """Whether a change after ``now_ns`` (Unix time) would show in the stamp.

        A change too soon after the last one may get the same time stamp.
        """
        coarse = not self.ctime_ns % _SECOND_NS  # some file systems count seconds, or two
        return now_ns - self.ctime_ns > (2 * _SECOND_NS if coarse else _YOUNG_NS)


@dataclass(frozen=True)
class _File:
    path: Path
    stamp: _Stamp

    @property
    def record(self) -> dict[str, int]:
        return vars(self.stamp)


def digest_weights(
    directory: Path,
    cache_dir: Path,
    progress: Progress | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
    *,
    blocks: bool = False,
) -> str:
    """SHA-256, as hexadecimal digits, of all files that a `Checkpoint` reads tensors from.

    The files are read once; as long as none changes, later calls look only at sizes, times and inodes. Several
    processes may call this at once: one on each node reads.

    cache_dir: where digests are cached if ``directory`` cannot be written
    clock_ns:  Unix time in nanoseconds
    blocks:    as for `Checkpoint`

    Raises:
        ModelError: a file cannot be read, or changes while it is read.
    """
    progress = progress or SilentProgress()
    places = [directory / RECORDS, cache_dir / "digests" / f"{_key(directory)}.json"]
    files = [_File(path, _stamp(path)) for path in weight_files(directory, blocks=blocks)]
    known = _known(files, places)
    if len(known) < len(files):
        lock = places[1].with_suffix(".lock")
        with _alone(lock, lambda: len(_known(files, places)) == len(files), progress) as report:
            known = _known(files, places)
            missing = [file for file in files if file.path.name not in known]
            if missing:
                now_ns = clock_ns()
                known |= _digest(missing, progress, report)
                _remember([file for file in files if file.stamp.is_settled(now_ns)], known, places)
    total = sha256()
    for file in files:
        total.update(f"{file.path.name}:{known[file.path.name]};".encode())
    return total.hexdigest()


def _key(directory: Path) -> str:
    return sha256(str(directory.resolve()).encode()).hexdigest()[:16]


def _stamp(path: Path) -> _Stamp:
    try:
        return _Stamp.of(path.stat())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


# ---- the cache of digests ----


def _known(files: list[_File], places: list[Path]) -> dict[str, str]:
    """File name -> cached digest, for the files that have not changed since."""
    known = {}
    for records in map(_records, places):
        for file in files:
            record = records.get(file.path.name)
            if isinstance(record, dict) and isinstance(record.get("digest"), str):
                digest = record["digest"]
                if {**file.record, "digest": digest} == record:
                    known[file.path.name] = digest
    return known


def _records(place: Path) -> dict[str, object]:
    """File name -> what is cached of it in ``place``; empty if that file is missing or malformed."""
    try:
        with place.open("rb") as file:
            records = json.loads(file.read(MAX_RECORDS_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return records if isinstance(records, dict) else {}


def _remember(files: list[_File], digests: dict[str, str], places: list[Path]) -> None:
    """Cache the digests in the first place that can be written. If none can, the next process reads the files again."""
    if not files:
        return
    records = {file.path.name: {**file.record, "digest": digests[file.path.name]} for file in files}
    data = json.dumps(records, indent=1).encode()
    for place in places:
        with suppress(OSError):
            replace_file(place, data)
            return
    log.warning("neither %s nor %s can be written: the weights are read again at each start", *places)


# ---- reading ----


@contextmanager
def _alone(path: Path, is_done: Callable[[], bool], progress: Progress) -> Iterator[Callable[[int, int], None]]:
    """Wait until no other process of this node reads the same weights, or ``is_done`` says that their digest is there.

    Yields a function ``(done, total)`` that reports progress, in bytes, to processes that wait. A process that makes no
    progress for `STALLED_S`, such as a suspended one, is not waited for. Without file locks nobody waits.

    path: the lock file
    """
    try:
        lock = LockedFile(path)
    except OSError:
        yield lambda done, total: None
        return
    try:
        seen, since = b"", time.monotonic()
        while not lock.acquire() and not is_done() and time.monotonic() - since < STALLED_S:
            if (said := lock.read()) != seen:
                if not seen:
                    progress.stage("waiting for another process to read the weights")
                seen, since = said, time.monotonic()
                with suppress(ValueError):
                    done, total = map(int, said.split())
                    progress.update(done, total)
            time.sleep(0.05)
        yield lambda done, total: lock.write(b"%d %d" % (done, total))
    finally:
        lock.close()


def _digest(files: list[_File], progress: Progress, report: Callable[[int, int], None]) -> dict[str, str]:
    """Read the files. Returns file name -> digest."""
    total, done = sum(file.stamp.size for file in files), 0
    threads = min(MAX_THREADS, usable_cores())
    progress.stage("hashing the weights")
    if total > 10 * CHUNK_BYTES:
        log.info("reading %s of weights to tell them from others, once for these files", format_bytes(total))
    handles: list[int] = []
    chunks: list[list[bytes]] = []
    pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")
    try:
        places = {}
        for index, file in enumerate(files):
            handles.append(_open(file))
            starts = range(0, file.stamp.size, CHUNK_BYTES)
            chunks.append([b""] * len(starts))
            for at, start in enumerate(starts):
                length = min(CHUNK_BYTES, file.stamp.size - start)
                places[pool.submit(_digest_chunk, file.path, handles[-1], start, length)] = index, at, length
        for future in as_completed(places):
            index, at, length = places[future]
            chunks[index][at] = future.result()
            done += length
            progress.update(done, total)
            report(done, total)
        for file, handle in zip(files, handles, strict=True):
            if not file.stamp == _Stamp.of(os.fstat(handle)) == _stamp(file.path):
                raise _changing(file.path)
    finally:
        pool.shutdown(cancel_futures=True)
        for handle in handles:
            os.close(handle)
    return {
        file.path.name: sha256(file.stamp.size.to_bytes(8, "little") + b"".join(digests)).hexdigest()
        for file, digests in zip(files, chunks, strict=True)
    }


def _open(file: _File) -> int:
    try:
        return os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise ModelError(f"cannot read {file.path}: {error.strerror}") from None


def _digest_chunk(path: Path, handle: int, start: int, length: int) -> bytes:
    """The digest of ``length`` bytes from ``start`` on. Small reads stay in a core's cache, and take little memory."""
    digest, buffer, stop = sha256(), memoryview(bytearray(min(READ_BYTES, length))), start + length
    while start < stop:
        try:
            count = os.preadv(handle, [buffer[: stop - start]], start)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        if not count:
            raise _changing(path)
        digest.update(buffer[:count])
        start += count
    return digest.digest()


def _changing(path: Path) -> ModelError:
    return ModelError(f"{path} changed while it was read: start again once it is complete")
