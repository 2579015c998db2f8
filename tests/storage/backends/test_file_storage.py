"""File storage survives what happens to directories, files and processes: misses, counted, and never a wrong byte."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.file_blocks import BLOCK_BYTES, CAPACITY, NAMESPACE, keys_of, open_at, read, write

from headwise.storage.backends import segment, segment_index, segment_space
from headwise.storage.backends.base import StorageNamespace
from headwise.storage.backends.file import FileStorage
from headwise.storage.backends.segment import ENTRY_BYTES, HEADER_BYTES

NOBODY = 65534


def contained(storage: FileStorage, numbers: Sequence[int]) -> list[int]:
    return [n for n, is_there in zip(numbers, storage.contains(*keys_of(numbers)), strict=True) if is_there]


def segments_in(path: Path) -> list[Path]:
    """From the least to the most recently used."""
    return sorted(path.rglob("*.seg"), key=lambda file: file.stat().st_mtime_ns)


def used_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in segments_in(path))


def change(path: Path, offset: int, flipped: int = 1) -> None:
    """Flip bits of one byte, in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ flipped]))


# ---- directories ----


@contextmanager
def an_ordinary_user() -> Iterator[Path]:
    """A directory of this user's, while permissions bind this process, too."""
    path = Path(tempfile.mkdtemp())
    was_root = os.geteuid() == 0
    try:
        if was_root:
            os.chown(path, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield path
    finally:
        if was_root:
            os.seteuid(0)
        shutil.rmtree(path)


def test_a_read_only_directory_serves_reads_and_counts_writes_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    with an_ordinary_user() as path:
        writer = open_at(path)
        write(writer, range(15))
        writer.close()
        closed = [path, *path.rglob("*")]
        for each in closed:
            each.chmod(0o555 if each.is_dir() else 0o444)
        try:
            storage = open_at(path)
            assert read(storage, range(17)) == list(range(15))
            assert not any(write(storage, [20, 21]))
            assert not any(write(storage, [22]))
            storage.delete(*keys_of([3]))
            storage.clear()
            stats = storage.stats()
            assert (stats.hits, stats.misses, stats.written, stats.write_failures) == (15, 2, 0, 3)
            assert open_at(path).stats().blocks == 15
        finally:
            for each in closed:
                each.chmod(0o755)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("cannot write to storage" in line for line in told) == 1, "logged once"


def test_a_directory_that_vanishes_gives_misses_and_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    storage = open_at(path)
    write(storage, range(15))
    shutil.rmtree(path)
    assert contained(storage, range(15)) == read(storage, range(15)) == []
    assert (storage.stats().misses, storage.stats().evictions, storage.stats().blocks) == (15, 15, 0)
    assert all(write(storage, range(5)))
    assert read(open_at(path), range(15)) == list(range(5))


def test_storages_of_one_directory_know_that_they_share_it(tmp_path: Path) -> None:
    here, same, other = open_at(tmp_path / "here"), open_at(tmp_path / "here"), open_at(tmp_path / "other")
    (tmp_path / "linked").symlink_to(tmp_path / "here")
    assert here.volume == same.volume == open_at(tmp_path / "linked").volume != other.volume
    assert open_at(tmp_path / "here", StorageNamespace("another model", "layout")).volume == here.volume
    shutil.rmtree(tmp_path / "here")
    write(here, range(5))
    assert open_at(tmp_path / "here").volume == here.volume


def test_there_is_room_until_a_segment_would_be_evicted_or_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_at(tmp_path)
    whole = storage.room
    assert whole is not None
    assert whole >= 100
    assert all(write(storage, range(20)))
    assert 0 < storage.room < whole, "whole segments count"
    written = 20
    while storage.room:
        assert all(write(storage, range(written, written + 10)))
        written += 10
    assert contained(storage, range(written)) == list(range(written)), "nothing was evicted"
    empty = open_at(tmp_path / "another")
    monkeypatch.setattr(os, "statvfs", lambda path: type("Disk", (), {"f_bavail": 0, "f_frsize": 4096}))
    assert empty.room == 0
    shutil.rmtree(tmp_path)
    tmp_path.write_text("")
    assert empty.room is None
    tmp_path.unlink()
    for each in (storage, empty):
        each.close()


def test_a_directory_that_is_used_for_the_first_time_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be one where a mount is missing."""
    caplog.set_level(logging.INFO, logger="headwise")
    for _ in range(2):
        open_at(tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "lock").touch()
    open_at(tmp_path / "old")
    (told,) = [record.message for record in caplog.records]
    assert told.startswith(f"storage {tmp_path / 'new'} is used for the first time, on the file system at /")


def test_a_directory_whose_id_cannot_be_read_or_written_is_shared_with_nobody_known(tmp_path: Path) -> None:
    (tmp_path / "volume-id").write_text("../../garbage\n")
    storage = open_at(tmp_path)
    assert storage.volume == ""
    assert all(write(storage, range(5)))


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A path, and a directory on another file system that it leads to, as to one that is mounted there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("/dev/shm is no file system of its own")
        (tmp_path / "mount").symlink_to(other)
        yield tmp_path / "mount", Path(other)


@pytest.mark.parametrize("below", ["an empty directory", "nothing"])
def test_where_a_mount_is_missing_nothing_is_written_to_the_disk_below(
    mountpoint: tuple[Path, Path], below: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, mounted = mountpoint
    storage = open_at(path)
    assert all(write(storage, range(15)))
    volume = storage.volume
    storage.close()
    path.unlink()
    if below == "an empty directory":
        path.mkdir()
    assert contained(storage, range(15)) == []
    assert not any(write(storage, range(20, 25)))
    storage.clear()
    assert not path.exists() or not list(path.iterdir())
    assert storage.volume == ""
    assert "it is on another file system than when it was opened; mount it again" in caplog.text
    if path.exists():
        path.rmdir()
    path.symlink_to(mounted)
    assert contained(storage, range(15)) == list(range(15))
    assert all(write(storage, range(20, 25)))
    assert storage.volume == volume


@pytest.mark.parametrize("below", ["an empty directory", "nothing"])
def test_a_process_that_starts_while_the_mount_is_missing_writes_nothing_to_the_disk_below(
    mountpoint: tuple[Path, Path], tmp_path: Path, below: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, mounted = mountpoint
    before = open_at(path / "blocks", notes=tmp_path / "notes")
    write(before, range(15))
    path.unlink()
    if below == "an empty directory":
        path.mkdir()
    storage = open_at(path / "blocks", notes=tmp_path / "notes")
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(
        f"storage {path / 'blocks'} was last used with a file system at /dev/shm, where there is none"
    )
    assert contained(storage, range(15)) == []
    assert not any(write(storage, range(20, 25)))
    assert storage.volume == ""
    assert not (path / "blocks").exists()
    if path.exists():
        path.rmdir()
    path.symlink_to(mounted)
    assert contained(storage, range(15)) == list(range(15))
    assert all(write(storage, range(20, 25)))
    assert storage.volume == before.volume


def test_a_directory_that_its_user_deleted_is_created_again_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    first = open_at(path, notes=tmp_path / "notes")
    shutil.rmtree(path)
    later = open_at(path, notes=tmp_path / "notes")
    assert all(write(later, range(5)))
    assert later.volume != first.volume


def test_what_is_noted_of_a_mount_can_be_deleted_to_go_on_without_it(
    mountpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    path, _ = mountpoint
    open_at(path, notes=tmp_path / "notes")
    path.unlink()
    (note,) = (tmp_path / "notes").iterdir()
    note.unlink()
    assert all(write(open_at(path, notes=tmp_path / "notes"), range(5)))


def test_a_directory_that_was_mounted_again_from_elsewhere_is_known_by_its_id(
    mountpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    path, mounted = mountpoint
    storage = open_at(path)
    write(storage, range(5))
    shutil.copytree(mounted, tmp_path / "moved")
    path.unlink()
    path.symlink_to(tmp_path / "moved")
    storage.close()
    assert all(write(storage, range(10, 15)))
    assert read(storage, range(20)) == [*range(5), *range(10, 15)]


def test_a_directory_that_becomes_a_file_gives_misses_and_failed_writes(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    storage = open_at(path)
    write(storage, range(5))
    shutil.rmtree(path)
    path.write_text("")
    assert read(storage, range(5)) == []
    assert not any(write(storage, range(5)))
    storage.clear()
    assert storage.stats().write_failures == 5


@pytest.mark.parametrize("call", ["listdir", "stat"])
def test_a_look_at_the_directory_that_fails_is_taken_again_and_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    reader, writer = open_at(tmp_path), open_at(tmp_path)
    write(writer, range(10))
    assert contained(reader, range(10)) == list(range(10))
    write(writer, range(10, 20))
    for directory in tmp_path.iterdir():
        os.utime(directory, ns=(1, 1))  # settled: it need not be listed twice

    def fails(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(segment_index.os, call, fails)
        assert contained(reader, range(20)) == list(range(10))
        assert reader.stats().evictions == 0
    assert contained(reader, range(20)) == list(range(20))


def test_a_segment_that_another_process_evicted_is_missed_though_the_index_still_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_at(tmp_path)
    write(storage, range(10))
    monkeypatch.setattr(segment_index.SegmentIndex, "refresh", lambda self: None)
    segments_in(tmp_path)[0].unlink()
    assert contained(storage, range(10)) == list(range(10))
    assert read(storage, range(10)) == []
    assert contained(storage, range(10)) == []


# ---- full disks ----


def test_a_full_disk_fails_writes_and_keeps_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_at(tmp_path)
    write(storage, range(4))

    def full(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(segment.os, "pwritev", full)
        assert write(storage, range(8)) == [True] * 4 + [False] * 4
        assert read(storage, range(8)) == list(range(4))
    assert storage.stats().write_failures == 4
    assert all(write(storage, range(8))), "there is room again"
    assert read(open_at(tmp_path), range(8)) == list(range(8))


def test_a_write_cut_short_by_the_system_stores_nothing_of_its_run(tmp_path: Path) -> None:
    storage = open_at(tmp_path)
    write(storage, range(4))
    form = segment.read_format(segments_in(tmp_path)[0])
    assert form is not None
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (form.block_offset(5) + 7, hard))
    try:
        assert not any(write(storage, range(4, 9)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert read(storage, range(9)) == list(range(4))
    assert all(write(storage, range(4, 9)))
    assert read(open_at(tmp_path), range(9)) == list(range(9))


def test_a_limit_on_file_sizes_evicts_nothing_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_at(tmp_path)
    write(storage, range(20))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert not any(write(storage, range(20, 25)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert read(storage, range(25)) == list(range(20))
    assert (storage.stats().disk_full, storage.stats().evictions) == (0, 0)
    assert not list(tmp_path.rglob("*.tmp")), "of the segment that could not be made"
    assert "exceed the limit on file sizes; raise it (ulimit -f)" in caplog.text


def test_blocks_whose_entries_were_written_before_the_disk_was_full_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_at(tmp_path)
    write(storage, [0])
    pwrite = os.pwrite

    def half(fd: int, data: bytes, offset: int) -> int:
        pwrite(fd, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(segment.os, "pwrite", half)
        assert write(storage, range(1, 5)) == [True, True, False, False]
    assert all(write(storage, range(5, 9)))
    assert read(storage, range(9)) == read(open_at(tmp_path), range(9)) == [0, 1, 2, 5, 6, 7, 8]


class FullDisk:
    """Stands in for a disk, or a quota, of ``room`` segments: that a segment's first block is written takes the space.

    refusals: how often there was none
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, room: int, code: int = errno.ENOSPC) -> None:
        self.room, self.refusals = room, 0
        self._path, self._code = path, code
        self._pwritev = os.pwritev
        self._given: set[int] = set()
        monkeypatch.setattr(segment.os, "pwritev", self._write)

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._given &= {file.stat().st_ino for file in segments_in(self._path)}
        inode = os.fstat(fd).st_ino
        if inode not in self._given and len(self._given) >= self.room:
            self.refusals += 1
            raise OSError(self._code, os.strerror(self._code))
        self._given.add(inode)
        return self._pwritev(fd, buffers, offset)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_disk_that_is_full_below_the_capacity_the_least_recently_used_blocks_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    disk = FullDisk(tmp_path, monkeypatch, 5, code)
    storage = open_at(tmp_path)
    for first in range(0, 200, 10):
        assert all(write(storage, range(first, first + 10)))
        assert read(storage, range(10)) == list(range(10)), "which are used all the time"
    assert read(storage, range(200)) == [*range(10), *range(160, 200)]
    stats = storage.stats()
    assert (stats.disk_full, stats.evictions, stats.written, stats.write_failures) == (15, 150, 200, 0)
    assert disk.refusals == 15
    (told,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"storage {tmp_path} cannot reach its capacity of 160 KiB" in told
    assert os.strerror(code) in told
    assert "KiB stored" in told


def test_one_write_longer_than_a_segment_takes_as_many_as_it_needs_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(tmp_path, monkeypatch, 8)
    storage = open_at(tmp_path)
    write(storage, range(80))
    assert all(write(storage, range(100, 160)))
    assert read(storage, range(160)) == [*range(60, 80), *range(100, 160)]


def test_the_store_grows_again_once_the_disk_has_space_and_the_next_full_disk_is_logged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(tmp_path, monkeypatch, 3)
    caplog.set_level(logging.WARNING, logger="headwise")
    storage = open_at(tmp_path)
    caplog.set_level(logging.INFO, logger="headwise")
    write(storage, range(100))
    assert storage.stats().blocks == 30
    disk.room = 40
    write(storage, range(100, 270))
    assert storage.stats().blocks == 200
    disk.room = 20
    write(storage, range(270, 300))
    assert (storage.stats().written, storage.stats().write_failures) == (300, 0)
    told = [record.message for record in caplog.records]
    assert ["cannot reach" in line for line in told] == [True, False, True]
    assert "has room again" in told[1]


def test_evicting_that_does_not_help_leaves_most_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="headwise")
    storage = open_at(tmp_path, capacity=4 * CAPACITY)  # segments of forty blocks
    write(storage, range(1600))
    disk = FullDisk(tmp_path, monkeypatch, 0)
    for number in range(2000, 2050):
        assert not any(write(storage, [number]))
    evicted = storage.stats().evictions
    assert evicted == 7 * 4 * 40, "four segments for the first write, the second, third, 5th, 9th, 17th and 33rd"
    assert read(storage, range(1600)) == list(range(evicted, 1600))
    assert storage.stats().write_failures == 50
    assert len(caplog.records) == 2, "that the disk is full, and that writes fail even so"
    disk.room = 1
    assert write(storage, [3000]) == [True]
    assert read(storage, range(1600)) == list(range(evicted, 1600)), "nothing else goes for it"
    assert read(open_at(tmp_path), [3000]) == [3000]


def test_a_full_disk_does_not_take_what_others_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(tmp_path, monkeypatch, 1)
    one, other = open_at(tmp_path), open_at(tmp_path)
    write(one, range(5))
    assert not any(write(other, range(5, 10)))
    assert all(write(one, range(10, 12)))
    assert read(other, range(15)) == [*range(5), 10, 11]
    one.close()
    assert all(write(other, range(5, 8))), "into the segment that is nobody's now"
    assert disk.refusals == other.stats().disk_full == 1
    assert other.stats().evictions == 0


def test_a_segment_that_finds_no_space_at_its_creation_is_made_once_another_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_at(tmp_path)
    write(storage, range(30))
    ftruncate = os.ftruncate

    def full(fd: int, size: int) -> None:
        assert len(list(tmp_path.rglob("*.tmp"))) == 1
        if len(segments_in(tmp_path)) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ftruncate(fd, size)

    monkeypatch.setattr(segment_space.os, "ftruncate", full)
    assert all(write(storage, range(30, 35)))
    assert read(open_at(tmp_path), range(35)) == list(range(20, 35))
    assert (storage.stats().disk_full, storage.stats().write_failures) == (2, 0)


def test_other_errors_evict_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_at(tmp_path)
    write(storage, range(30))
    for code in (errno.EIO, errno.EROFS, errno.EACCES):
        with monkeypatch.context() as patch:
            FullDisk(tmp_path, patch, 0, code)
            assert not any(write(storage, range(30, 35)))
    assert read(storage, range(35)) == list(range(30))
    assert (storage.stats().disk_full, storage.stats().write_failures) == (0, 15)


def test_a_lock_that_is_not_freed_fails_the_write_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_space, "LOCK_TIMEOUT_S", 0.05)
    storage = open_at(tmp_path)
    with segment_space.SegmentSpace(tmp_path, CAPACITY)._locked():
        assert not any(write(storage, [1]))
    assert all(write(storage, [1]))


# ---- damage ----


def header(form: segment.SegmentFormat) -> int:
    return 20


def entry_key(form: segment.SegmentFormat) -> int:
    return form.entry_offset(3) + 2


def entry_check(form: segment.SegmentFormat) -> int:
    return form.entry_offset(3) + ENTRY_BYTES - 10


def entry_checksum(form: segment.SegmentFormat) -> int:
    return form.entry_offset(3) + ENTRY_BYTES - 1


def block_data(form: segment.SegmentFormat) -> int:
    return form.block_offset(3) + 100


@pytest.mark.parametrize("where", [entry_key, entry_check, entry_checksum, block_data])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_flipped_byte_costs_the_one_block_which_can_be_stored_again(
    tmp_path: Path, where: Callable[[segment.SegmentFormat], int], is_reopened: bool
) -> None:
    storage = open_at(tmp_path)
    write(storage, range(7))
    (path,) = segments_in(tmp_path)
    form = segment.read_format(path)
    assert form is not None
    change(path, where(form))
    if is_reopened:
        storage.close()
        storage = open_at(tmp_path)
    assert read(storage, range(7)) == [0, 1, 2, 4, 5, 6]
    stats = storage.stats()
    assert (stats.hits, stats.misses) == (6, 1)
    assert stats.corrupt == (0 if is_reopened and where is not block_data else 1)
    assert contained(open_at(tmp_path), [3]) == [], "nobody is told that it is there"
    assert write(storage, [3]) == [True]
    assert read(storage, range(7)) == read(open_at(tmp_path), range(7)) == list(range(7))


def test_a_segment_with_a_damaged_header_is_no_segment(tmp_path: Path) -> None:
    storage = open_at(tmp_path)
    write(storage, range(7))
    storage.close()
    for offset in range(0, HEADER_BYTES, 7):
        change(segments_in(tmp_path)[0], offset)
        assert contained(open_at(tmp_path), range(7)) == []
        change(segments_in(tmp_path)[0], offset)
    assert contained(open_at(tmp_path), range(7)) == list(range(7))


def test_segments_of_another_version_are_left_alone_until_they_are_evicted(tmp_path: Path) -> None:
    storage = open_at(tmp_path)
    write(storage, range(7))
    storage.close()
    (path,) = segments_in(tmp_path)
    change(path, len(segment.MAGIC) - 1, flipped=2)
    changed = open_at(tmp_path)
    assert read(changed, range(7)) == []
    write(changed, range(7))
    assert path.exists()
    os.utime(path, ns=(0, 0))
    write(changed, range(100, 1000))
    assert not path.exists()
    assert used_bytes(tmp_path) <= CAPACITY


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("kept", ["nothing", "header", "some entries", "some blocks"])
def test_a_truncated_segment_gives_misses_for_what_was_cut_off(tmp_path: Path, kept: str, is_reopened: bool) -> None:
    storage = open_at(tmp_path)
    write(storage, range(10))
    storage.close()
    (path,) = segments_in(tmp_path)
    form = segment.read_format(path)
    assert form is not None
    sizes = {
        "nothing": 0,
        "header": HEADER_BYTES,
        "some entries": form.entry_offset(4) + 9,
        "some blocks": form.block_offset(4) + 9,
    }
    os.truncate(path, sizes[kept])
    if is_reopened:
        storage = open_at(tmp_path)
    assert read(storage, range(10)) == ([0, 1, 2, 3] if kept == "some blocks" else [])
    assert storage.stats().misses == (6 if kept == "some blocks" else 10)
    assert all(write(storage, range(10, 20)))
    assert read(open_at(tmp_path), range(10, 20)) == list(range(10, 20))


def test_entries_lost_in_the_middle_do_not_hide_those_behind_them(tmp_path: Path) -> None:
    storage = open_at(tmp_path)
    write(storage, range(5))
    (path,) = segments_in(tmp_path)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + ENTRY_BYTES)
        file.write(bytes(2 * ENTRY_BYTES))
    storage.close()
    again = open_at(tmp_path)
    assert read(again, range(5)) == [0, 3, 4]
    assert all(write(again, [1, 2, 5]))
    assert read(open_at(tmp_path), range(6)) == list(range(6))


def test_files_of_others_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    storage = open_at(tmp_path)
    write(storage, range(5))
    own = next(tmp_path.rglob("*.seg")).parent
    strangers = [tmp_path / "notes.txt", tmp_path / "directory" / "a.seg", own / "notes.txt"]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (own / "empty.seg").touch()
    write(storage, range(2000))
    storage.clear()
    assert all(path.read_text() == "mine" for path in strangers)


# ---- capacity ----


def test_the_least_recently_used_segment_goes_first_whichever_namespace_it_is_of(tmp_path: Path) -> None:
    one, other = open_at(tmp_path), open_at(tmp_path, StorageNamespace("another model", "layout"))
    for second, (storage, first) in enumerate([(one, 0), (other, 0), (one, 10)], 1):
        known = segments_in(tmp_path)
        write(storage, range(first, first + 10))
        (new,) = set(segments_in(tmp_path)) - set(known)
        os.utime(new, ns=(second * 10**9, second * 10**9))
    assert read(one, [0]) == [0], "which is a use of the oldest"

    number = 1000
    while contained(other, range(10)):
        assert contained(one, range(20)) == list(range(20))
        write(one, range(number, number + 10))
        number += 10
    assert contained(one, range(20)) == list(range(20))
    assert (other.stats().evictions, other.stats().blocks, one.stats().evictions) == (10, 0, 0)


def test_capacity_is_kept_whatever_is_written_and_the_last_blocks_stay(tmp_path: Path) -> None:
    storages = [open_at(tmp_path), open_at(tmp_path, StorageNamespace("another model", "layout"))]
    for first in range(0, 2000, 50):
        for storage in storages:
            assert all(write(storage, range(first, first + 50)))
            assert used_bytes(tmp_path) <= CAPACITY
    for storage in storages:
        assert read(storage, range(1950, 2000)) == list(range(1950, 2000))
        assert storage.stats().evictions == 2000 - storage.stats().blocks > 0


def test_a_run_of_blocks_ends_with_its_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "MAX_SLOTS", 4)
    monkeypatch.setattr(segment_index, "MAX_SLOTS", 4)
    storage = open_at(tmp_path)
    write(storage, range(10))
    assert len(segments_in(tmp_path)) == 3
    assert read(storage, range(10)) == list(range(10))


def test_a_smaller_capacity_is_reached_by_the_next_segment(tmp_path: Path) -> None:
    storage = open_at(tmp_path)
    write(storage, range(600))
    storage.close()
    smaller = open_at(tmp_path, capacity=CAPACITY // 4)
    assert all(write(smaller, range(1000, 1010)))
    assert used_bytes(tmp_path) <= CAPACITY // 4


def test_a_capacity_of_one_block_holds_one_block(tmp_path: Path) -> None:
    storage = open_at(tmp_path, capacity=4096 + BLOCK_BYTES)
    for number in range(3):
        assert write(storage, [number]) == [True]
        assert read(storage, range(3)) == [number]


def test_segments_being_filled_by_others_are_not_evicted(tmp_path: Path) -> None:
    capacity = 4096 + 2 * BLOCK_BYTES
    form = segment.format_for(NAMESPACE.digest, BLOCK_BYTES, capacity)
    assert form.slots > 1
    others = segment_space.SegmentSpace(tmp_path, 2 * capacity)
    tail = others.acquire(tmp_path / NAMESPACE.digest.hex(), "", segment.SegmentFormat(b"x" * 16, 256, 2), [])
    storage = open_at(tmp_path, capacity=capacity)
    assert write(storage, [1]) == [False]
    tail.release()
    assert write(storage, [1]) == [True]


# ---- several processes ----

PREAMBLE = f"""
import json, os, signal, subprocess, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from headwise.storage.backends import segment
from support.file_blocks import open_at, read, write
storage = open_at(Path(sys.argv[1]))
"""

DIES_IN_MID_WRITE = """
write(storage, range(3))
pwrite = os.pwrite
def die(fd, data, offset):
    pwrite(fd, data[:len(data) // 2], offset)
    os.kill(os.getpid(), signal.SIGKILL)
segment.os.pwrite = die
write(storage, range(3, 8))
"""

WRITES_AND_READS = """
hits = 0
for round in range(20):
    first = 40 * round + 10 * int(sys.argv[2])
    write(storage, range(first, first + 40))
    hits += len(read(storage, range(max(0, first - 100), first + 40)))
stats = storage.stats()
print(json.dumps([hits, stats.hits, stats.corrupt, stats.write_failures]))
"""


ON_A_SMALL_DISK = """
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", disk], check=True)

def fill(first, blocks):
    storage = open_at(disk / "storage", capacity=4 << 20)  # segments of 64 KiB
    for number in range(first, first + blocks, 20):
        write(storage, range(number, number + 20))
        read(storage, range(number, number + 20))
    storage.close()
    return vars(storage.stats())
"""

FILLS_A_DISK_THAT_HAS_MORE_SPACE_THEN = (
    ON_A_SMALL_DISK
    + """
(disk / "ballast").write_bytes(bytes(1_000_000))
small = fill(0, 8_000)
(disk / "ballast").unlink()
print(json.dumps([small, fill(8_000, 16_000)]))
"""
)

FILLS_A_DISK_WITH_TWO_OTHERS = (
    ON_A_SMALL_DISK
    + """
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(3) as pool:
    stats = list(pool.map(fill, [0, 10_000, 20_000], [8_000] * 3))
print(json.dumps([stats, open_at(disk / "storage").stats().blocks]))
"""
)


def start(script: str, *args: object, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [*within, sys.executable, "-c", PREAMBLE + script, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_killed_in_mid_write_leaves_whole_blocks_and_its_segment_is_taken_over(tmp_path: Path) -> None:
    before = open_at(tmp_path)
    dying = start(DIES_IN_MID_WRITE, tmp_path)
    _, errors = dying.communicate(timeout=300)
    assert dying.returncode == -signal.SIGKILL, errors
    for storage in (before, open_at(tmp_path)):
        # Half of five entries were written: two and a half.
        assert read(storage, range(8)) == [0, 1, 2, 3, 4]
        assert (storage.stats().misses, storage.stats().corrupt) == (3, 0)
    assert all(write(before, range(8)))
    assert len(segments_in(tmp_path)) == 1, "the dead process's segment is filled up"
    assert read(open_at(tmp_path), range(8)) == list(range(8))


def test_what_a_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    storage = open_at(tmp_path)
    write(storage, [1])
    unfinished = next(tmp_path.rglob("*.seg")).with_suffix(".tmp")
    unfinished.write_bytes(bytes(1000))
    write(storage, range(2, 30))
    assert not unfinished.exists()


def test_processes_that_write_and_evict_at_once_read_only_what_was_written(tmp_path: Path) -> None:
    processes = [start(WRITES_AND_READS, tmp_path, number) for number in range(2)]
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        hits, counted, corrupt, failures = json.loads(output)
        assert hits == counted > 0
        assert (corrupt, failures) == (0, 0)
    assert used_bytes(tmp_path) <= CAPACITY
    assert read(open_at(tmp_path), range(770, 810)), "something of the last round is there"


def test_a_block_stored_twice_is_deleted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = open_at(tmp_path), open_at(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(segment_index.SegmentIndex, "contains", lambda self, keys: [False] * len(keys))
        write(one, [7])
        write(other, [7])
    assert len(segments_in(tmp_path)) == 2
    one.delete(*keys_of([7]))
    assert read(one, [7]) == read(other, [7]) == read(open_at(tmp_path), [7]) == []


OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Callable[[str], Any]:
    """Runs a script that mounts a tmpfs of its own at a path; gives what it prints."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        tried = subprocess.run(
            [*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", str(path)], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")

    def run(script: str) -> Any:
        process = start(script, path, within=OWN_MOUNTS)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return json.loads(output)

    return run


def test_a_real_disk_that_is_full_keeps_the_newest_blocks_and_more_once_it_has_space(
    small_disk: Callable[[str], Any],
) -> None:
    small, large = small_disk(FILLS_A_DISK_THAT_HAS_MORE_SPACE_THEN)
    for stats in (small, large):
        assert (stats["write_failures"], stats["misses"], stats["corrupt"]) == (0, 0, 0)
        assert stats["disk_full"] > 10
    assert 800_000 < small["bytes"] < (2 << 20) - 1_000_000
    assert 1_650_000 < large["bytes"] < 2 << 20


def test_processes_that_find_a_real_disk_full_together_leave_each_other_most_of_it(
    small_disk: Callable[[str], Any],
) -> None:
    by_process, blocks = small_disk(FILLS_A_DISK_WITH_TWO_OTHERS)
    for stats in by_process:
        assert stats["corrupt"] == 0
        assert stats["hits"] > 7_200, "of 8,000, each read just after it was written"
    assert sum(stats["disk_full"] for stats in by_process) > 30
    assert blocks * BLOCK_BYTES > 1_000_000, "of about 1,700,000 that fit"
