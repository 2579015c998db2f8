"""What every storage backend promises, and which storage a URL names."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray
from support.memory_storage import MemoryStorage, Shared

from headwise.errors import ConfigError
from headwise.storage.backends.base import BlockStorage, StorageNamespace
from headwise.storage.backends.file import FileStorage
from headwise.storage.backends.mooncake import MooncakeConfig, MooncakeStorage
from headwise.storage.backends.segment import HEADER_BYTES
from headwise.storage.backends.select import only_of_others, open_storage

BLOCK_BYTES = 1000
NAMESPACE = StorageNamespace("model", "layout")

Open = Callable[[StorageNamespace], BlockStorage]


def hashes_of(numbers: Sequence[int]) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def int32(values: Sequence[int] | range) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def block_of(*seed: int, size: int = BLOCK_BYTES) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def write(storage: BlockStorage, blocks: dict[tuple[int, int], bytes]) -> list[bool]:
    """Write blocks by (number, group), from an arena that has them in reverse order."""
    arena = np.frombuffer(b"".join(reversed(blocks.values())), dtype=np.uint8).copy()
    storage.register(arena)
    numbers, groups = [key[0] for key in blocks], int32([key[1] for key in blocks])
    return storage.write(hashes_of(numbers), groups, arena, int32(range(len(blocks)))[::-1].copy()).tolist()


def read(storage: BlockStorage, keys: Sequence[tuple[int, int]]) -> list[bytes | None]:
    """What is stored by (number, group); None for a miss."""
    size = storage.block_bytes
    arena = np.zeros((len(keys) + 1) * size, dtype=np.uint8)
    storage.register(arena)
    hits = storage.read(
        hashes_of([key[0] for key in keys]), int32([key[1] for key in keys]), arena, int32(range(1, len(keys) + 1))
    )
    assert not arena[:size].any(), "a block that was not asked for was written to"
    rows = arena.reshape(-1, size)[1:]
    return [row.tobytes() if hit else None for row, hit in zip(rows, hits, strict=True)]


def contains(storage: BlockStorage, keys: Sequence[tuple[int, int]]) -> list[bool]:
    return storage.contains(hashes_of([key[0] for key in keys]), int32([key[1] for key in keys])).tolist()


class FakeMooncake:
    """A Mooncake store, with one dictionary for all clients, that reads and writes at the addresses it is given.

    late: transfers of `batch_get_into` fail, and happen when `arrive` is called
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.setups: list[tuple[object, ...]] = []
        self.late = False
        self._pending: list[tuple[int, bytes]] = []

    def setup(self, *args: object) -> int:
        self.setups.append(args)
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.objects) for name in names]

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        for name, address, size in zip(names, addresses, sizes, strict=True):
            self.objects.setdefault(name, ctypes.string_at(address, size))
        return [0] * len(names)

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        found = [self.objects.get(name) for name in names]
        self._pending += [(address, data) for address, data in zip(addresses, found, strict=True) if data]
        if self.late:
            return [-800] * len(names)
        self.arrive()
        return [len(data) if data else -704 for data in found]

    def arrive(self) -> None:
        for address, data in self._pending:
            ctypes.memmove(address, data, len(data))
        self._pending.clear()

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        return [0 if self.objects.pop(name, None) else -704 for name in names]

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        return sum(map(bool, self.batch_remove([name for name in self.objects if re.search(pattern, name)], force)))

    def close(self) -> int:
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMooncake:
    """In place of Mooncake, whoever imports it."""
    store = FakeMooncake()
    module = SimpleNamespace(MooncakeDistributedStore=lambda: store)
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(store=module))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr("headwise.storage.backends.mooncake._address_towards", lambda master: "127.0.0.1")
    return store


@pytest.fixture(params=["file", "mooncake", "memory"])
def open_(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same storage, empty at first, as often as one likes. That in memory is of the tests alone."""
    shared: Shared = {}
    url = f"file://{tmp_path}?capacity=1MiB"
    if request.param == "mooncake":
        request.getfixturevalue("fake")
        url = "mooncake://127.0.0.1:50051"
    opened: list[BlockStorage] = []

    def open_one(namespace: StorageNamespace) -> BlockStorage:
        in_memory = request.param == "memory"
        opened.append(
            MemoryStorage(BLOCK_BYTES, namespace, shared) if in_memory else open_storage(url, namespace, BLOCK_BYTES)
        )
        return opened[-1]

    yield open_one
    for storage in opened:
        storage.close()


# ---- what every backend promises ----


def test_what_one_process_writes_another_reads_whatever_the_order(open_: Open) -> None:
    one, other = open_(NAMESPACE), open_(NAMESPACE)
    blocks = {(number, group): block_of(number, group) for number in range(20) for group in range(2)}
    assert all(write(one, blocks))
    shuffled = [list(blocks)[at] for at in np.random.default_rng(0).permutation(len(blocks))]
    assert read(other, shuffled) == [blocks[key] for key in shuffled]
    assert all(contains(other, shuffled))


def test_hash_and_group_together_are_the_key(open_: Open) -> None:
    storage = open_(NAMESPACE)
    write(storage, {(1, 0): block_of(1), (2, 1): block_of(2)})
    asked = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    assert contains(storage, asked) == [True, False, False, True, False]
    assert read(storage, asked) == [block_of(1), None, None, block_of(2), None]


def test_no_other_model_layout_or_rank_finds_a_block(open_: Open) -> None:
    mine = StorageNamespace("model", "layout", 0, 2)
    others = [
        StorageNamespace("another", "layout", 0, 2),
        StorageNamespace("model", "layout 2", 0, 2),
        StorageNamespace("model", "layout", 1, 2),
        StorageNamespace("model", "layout", 0, 1),
        StorageNamespace("modellay", "out", 0, 2),
    ]
    write(open_(mine), {(1, 0): block_of(1)})
    for namespace in others:
        other = open_(namespace)
        assert contains(other, [(1, 0)]) == [False]
        assert read(other, [(1, 0)]) == [None]
        other.clear()
    assert read(open_(mine), [(1, 0)]) == [block_of(1)]


def test_deleted_blocks_are_gone_for_all_and_the_others_stay(open_: Open) -> None:
    one, other = open_(NAMESPACE), open_(NAMESPACE)
    blocks = {(number, 0): block_of(number) for number in range(6)}
    write(one, blocks)
    assert all(contains(other, list(blocks)))
    other.delete(hashes_of([1, 4, 99]), int32([0, 0, 0]))
    assert [block is None for block in read(one, list(blocks))] == [False, True, False, False, True, False]
    assert write(one, {(4, 0): block_of(44)}) == [True]
    assert read(other, [(4, 0)]) == [block_of(44)]


def test_cleared_storage_is_empty_for_all_and_goes_on(open_: Open) -> None:
    one, other = open_(NAMESPACE), open_(NAMESPACE)
    write(one, {(number, 0): block_of(number) for number in range(6)})
    other.clear()
    assert read(one, [(number, 0) for number in range(6)]) == [None] * 6
    assert write(one, {(7, 0): block_of(7)}) == [True]
    assert read(other, [(7, 0)]) == [block_of(7)]


def test_a_block_written_before_counts_as_stored(open_: Open) -> None:
    storage = open_(NAMESPACE)
    assert write(storage, {(1, 0): block_of(1)}) == [True]
    assert write(storage, {(1, 0): block_of(1), (2, 0): block_of(2)}) == [True, True]
    assert read(storage, [(1, 0), (2, 0)]) == [block_of(1), block_of(2)]


def test_reads_and_writes_are_counted(open_: Open) -> None:
    storage = open_(NAMESPACE)
    write(storage, {(number, 0): block_of(number) for number in range(3)})
    read(storage, [(0, 0), (1, 0), (8, 0), (9, 0), (2, 0)])
    stats = storage.stats()
    assert (stats.blocks, stats.bytes, stats.written, stats.write_failures) == (3, 3 * BLOCK_BYTES, 3, 0)
    assert (stats.hits, stats.misses, stats.corrupt, stats.evictions) == (3, 2, 0, 0)


def test_asking_for_nothing_is_fine(open_: Open) -> None:
    storage = open_(NAMESPACE)
    assert write(storage, {}) == read(storage, []) == contains(storage, []) == []
    storage.delete([], int32([]))


@pytest.mark.parametrize(
    ("hashes", "groups", "arena", "blocks", "told"),
    [
        (hashes_of([1, 2]), [0], np.zeros(BLOCK_BYTES, np.uint8), [0, 0], "2 block hashes with 1 groups"),
        ([b"short"], [0], np.zeros(BLOCK_BYTES, np.uint8), [0], "hash of 5 bytes"),
        (hashes_of([1]), [0], np.zeros(BLOCK_BYTES, np.uint8), [0, 0], "1 keys with 2 blocks"),
        (hashes_of([1]), [0], np.zeros(BLOCK_BYTES, np.uint8), [1], "blocks 1 to 1 of an arena that has 1"),
        (hashes_of([1]), [0], np.zeros(BLOCK_BYTES, np.uint8), [-1], "blocks -1 to -1"),
        (hashes_of([1]), [0], np.zeros(BLOCK_BYTES, np.int8), [0], "an arena of int8"),
        (hashes_of([1]), [0], np.zeros((1, BLOCK_BYTES), np.uint8), [0], "must be flat"),
        (hashes_of([1]), [0], np.zeros(2 * BLOCK_BYTES, np.uint8)[::2], [0], "contiguous"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(
    open_: Open, hashes: list[bytes], groups: list[int], arena: NDArray[Any], blocks: list[int], told: str
) -> None:
    storage = open_(NAMESPACE)
    for call in (storage.read, storage.write):
        with pytest.raises(ValueError, match=told):
            call(hashes, int32(groups), arena, int32(blocks))


def test_closing_twice_is_fine_and_keeps_what_is_stored(open_: Open) -> None:
    keeper, storage = open_(NAMESPACE), open_(NAMESPACE)
    write(storage, {(1, 0): block_of(1)})
    storage.close()
    storage.close()
    assert read(keeper, [(1, 0)]) == read(open_(NAMESPACE), [(1, 0)]) == [block_of(1)]


# ---- two processes, one directory, any order of calls, and damage ----


class SharedDirectory(RuleBasedStateMachine):
    """Two storages in one directory, against what was written.

    written:     by key, every content written since it was last deleted
    is_certain:  no block was deleted or damaged, of which the other storage learns when it reads it
    was_damaged: there was damage, ever
    room:        segments that the disk holds; two are being filled at most, so that there is always one to evict
    on_disk:     inodes of those that were given their space, as each is with its first block
    """

    SIZE = 64
    CAPACITY = 25_000  # five segments of six blocks each

    keys = st.lists(st.integers(0, 39), min_size=1, max_size=12, unique=True)
    either = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.storages = [self.open(), self.open()]
        self.written: dict[int, set[bytes]] = {}
        self.version = 0
        self.is_certain, self.was_damaged = True, False
        self.room = 5
        self.on_disk: set[int] = set()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "pwritev", partial(self.pwritev, os.pwritev))

    def pwritev(self, real: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.on_disk &= {path.stat().st_ino for path in self.segments()}
        inode = os.fstat(fd).st_ino
        if inode not in self.on_disk and len(self.on_disk) >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.on_disk.add(inode)
        return real(fd, buffers, offset)

    def open(self) -> FileStorage:
        return FileStorage(self.path, self.CAPACITY, NAMESPACE, self.SIZE)

    @rule(which=either, keys=keys)
    def write(self, which: int, keys: list[int]) -> None:
        self.version += 1
        blocks = {(key, 0): block_of(key, self.version, size=self.SIZE) for key in keys}
        was_known = contains(self.storages[which], list(blocks))
        stored = write(self.storages[which], blocks)
        for (key, _), block in blocks.items():
            self.written.setdefault(key, set()).add(block)
        if self.is_certain:
            assert stored[-1] or was_known[-1], "the last of the new blocks is in a segment that is being filled"

    @rule(which=either, keys=keys)
    def read(self, which: int, keys: list[int]) -> None:
        for key, block in zip(keys, read(self.storages[which], [(key, 0) for key in keys]), strict=True):
            assert block is None or block in self.written.get(key, ())

    @rule(which=either, keys=keys)
    def agree_on_what_is_there(self, which: int, keys: list[int]) -> None:
        told = [contains(storage, [(key, 0) for key in keys]) for storage in self.storages]
        if self.is_certain:
            assert told[0] == told[1]
            blocks = read(self.storages[which], [(key, 0) for key in keys])
            assert [block is not None for block in blocks] == told[0]

    @rule(which=either, keys=keys)
    def delete(self, which: int, keys: list[int]) -> None:
        self.storages[which].delete(hashes_of(keys), int32([0] * len(keys)))
        for key in keys:
            self.written.pop(key, None)
        self.is_certain = False

    @rule(which=either)
    def clear(self, which: int) -> None:
        self.storages[which].clear()
        self.written.clear()
        self.is_certain = True

    @rule(which=either)
    def restart(self, which: int) -> None:
        self.storages[which].close()
        self.storages[which] = self.open()

    @rule(which=st.integers(0, 9), where=st.integers(0, 9999), bit=st.integers(0, 7))
    def flip_a_bit(self, which: int, where: int, bit: int) -> None:
        paths = self.segments()
        if not paths:
            return
        path = paths[which % len(paths)]
        offset = HEADER_BYTES + where % (path.stat().st_size - HEADER_BYTES)
        content = bytearray(path.read_bytes())
        content[offset] ^= 1 << bit
        with path.open("r+b") as file:  # in place, as damage is
            file.write(content)
        self.is_certain, self.was_damaged = False, True

    @rule(segments=st.integers(2, 5))
    def disk_has_room_for(self, segments: int) -> None:
        self.room = segments

    @rule()
    def directory_vanishes(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.written.clear()
        self.is_certain = True

    @invariant()
    def capacity_is_kept(self) -> None:
        assert sum(path.stat().st_size for path in self.segments()) <= self.CAPACITY

    @invariant()
    def counts_add_up(self) -> None:
        for storage in self.storages:
            stats = storage.stats()
            assert stats.corrupt <= stats.misses
            assert self.was_damaged or stats.corrupt == 0
            assert stats.blocks <= 40

    def segments(self) -> list[Path]:
        return sorted(self.path.rglob("*.seg"))

    def teardown(self) -> None:
        self.patch.undo()
        for storage in self.storages:
            storage.close()
        shutil.rmtree(self.path, ignore_errors=True)


TestSharedDirectory = SharedDirectory.TestCase
TestSharedDirectory.settings = settings(max_examples=60, stateful_step_count=30)


# ---- Mooncake, which may deliver late, or something else ----


def test_a_mooncake_transfer_that_ends_after_its_call_failed_harms_no_block(fake: FakeMooncake) -> None:
    storage = MooncakeStorage(MooncakeConfig("127.0.0.1:1"), NAMESPACE, BLOCK_BYTES)
    write(storage, {(number, 0): block_of(number) for number in range(4)})
    arena = np.zeros(4 * BLOCK_BYTES, dtype=np.uint8)
    storage.register(arena)
    fake.late = True
    assert not storage.read(hashes_of(range(4)), int32([0] * 4), arena, int32(range(4))).any()
    arena[:] = 7  # the blocks hold something else by now
    fake.arrive()
    assert (arena == 7).all()
    assert storage.stats().misses == 4


def test_other_bytes_than_mooncake_was_given_are_a_miss(fake: FakeMooncake) -> None:
    storage = MooncakeStorage(MooncakeConfig("127.0.0.1:1"), NAMESPACE, BLOCK_BYTES)
    write(storage, {(1, 0): block_of(1), (2, 0): block_of(2), (3, 0): block_of(3), (4, 0): block_of(4)})
    one, two, three, four = fake.objects
    fake.objects[one] = fake.objects[two]
    fake.objects[three] = fake.objects[three][:-1]
    fake.objects[four] = bytes([fake.objects[four][0] ^ 1]) + fake.objects[four][1:]
    assert read(storage, [(1, 0), (2, 0), (3, 0), (4, 0)]) == [None, block_of(2), None, None]
    assert (storage.stats().hits, storage.stats().misses, storage.stats().corrupt) == (1, 3, 3)
    assert write(storage, {(1, 0): block_of(1)}) == [True]
    assert read(storage, [(1, 0)]) == [block_of(1)], "it can be stored again"


def test_mooncake_moves_more_than_its_staging_memory_holds(fake: FakeMooncake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.storage.backends.mooncake.STAGING_BYTES", 3 * (BLOCK_BYTES + 8))
    storage = MooncakeStorage(MooncakeConfig("127.0.0.1:1"), NAMESPACE, BLOCK_BYTES)
    blocks = {(number, 0): block_of(number) for number in range(10)}
    assert all(write(storage, blocks))
    assert read(storage, [*blocks, (99, 0)]) == [*blocks.values(), None]


# ---- which storage a URL names ----


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://bucket/path", "unknown scheme"),
        ("/var/cache/headwise", "unknown scheme"),
        ("file:///tmp/x", "gives no capacity"),
        ("file://tmp/x?capacity=1GiB", "three slashes"),
        ("file:///?capacity=1GiB", "names no directory"),
        ("file:///tmp/x?capacity=1GiB&capacity=2GiB", "capacity may stand once"),
        ("file:///tmp/x?capacity=1GiB&size=2", "capacity may stand once"),
        ("file:///tmp/x?capacity=much", "'much' is not a size"),
        ("file:///tmp/x?capacity=-1GiB", "'-1GiB' is not a size"),
        ("file:///tmp/x?capacity=5XiB", "'5XiB' is not a size"),
        ("file:///tmp/x?capacity=0", "does not hold one block of 1000 bytes"),
        ("file:///tmp/x?capacity=1000", "does not hold one block of 1000 bytes"),
        ("mooncake://127.0.0.1", "host and port"),
        ("mooncake://127.0.0.1:notaport", "is not a URL"),
        ("mooncake://127.0.0.1:1/path", "no path"),
        ("mooncake://127.0.0.1:1?capacity=1GiB", "host, protocol, segment may stand once"),
        ("mooncake://127.0.0.1:1?protocol=udp", "'udp' is unknown; choose one of tcp, rdma"),
        ("mooncake://127.0.0.1:1?segment=999", "segment of 999 bytes is too small"),
    ],
)
def test_a_url_that_names_no_usable_storage_is_refused_with_the_reason(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_storage(url, NAMESPACE, BLOCK_BYTES)


def test_a_mooncake_segment_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not hold one block of 67108864 bytes"):
        open_storage("mooncake://127.0.0.1:1?segment=32MiB", NAMESPACE, 64 << 20)


@pytest.mark.parametrize("block_bytes", [0, -1])
def test_a_block_without_bytes_is_refused(tmp_path: Path, block_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 byte"):
        open_storage(f"file://{tmp_path}?capacity=1MiB", NAMESPACE, block_bytes)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of {size}"):
        StorageNamespace("model", "layout", rank, size)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_storage(f"file://{tmp_path}/file?capacity=1MiB", NAMESPACE, BLOCK_BYTES)


def test_a_directory_that_only_others_have_filled_is_told_of(tmp_path: Path) -> None:
    url = f"file://{tmp_path}?capacity=1MiB"
    assert only_of_others(url, NAMESPACE) == []
    other = StorageNamespace("another model", "layout")
    for namespace, warned in ((other, [str(other)]), (NAMESPACE, [])):
        storage = open_storage(url, namespace, BLOCK_BYTES)
        write(storage, {(1, 0): block_of(1)})
        storage.close()
        assert only_of_others(url, NAMESPACE) == warned


def test_a_path_may_have_spaces_and_capacity_a_fraction(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/a%20b?capacity=0.5+GB", NAMESPACE, BLOCK_BYTES)
    assert isinstance(storage, FileStorage)
    assert (tmp_path / "a b").is_dir()


def test_without_mooncake_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'headwise\[mooncake\]'"):
        open_storage("mooncake://127.0.0.1:1", NAMESPACE, BLOCK_BYTES)


def test_a_process_that_only_asks_lends_mooncake_no_memory(fake: FakeMooncake) -> None:
    for may_lend in (True, False):
        open_storage("mooncake://127.0.0.1:50051?segment=1GiB&host=10.0.0.7", NAMESPACE, BLOCK_BYTES, may_lend)
    assert fake.setups == [("10.0.0.7", "P2PHANDSHAKE", lent, 0, "tcp", "", "127.0.0.1:50051") for lent in (1 << 30, 0)]
