from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.memory_storage import MemoryStorage
from support.simulated_streams import SimulatedClock, SimulatedStream

from headwise.storage.backends.base import StorageNamespace
from headwise.storage.backends.file import FileStorage
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.storage_manager import StorageManager

BLOCKS, BLOCK_BYTES = 16, 8
WAIT_S = 60.0
"""For what must happen: never reached unless the test fails."""


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def named(*blocks: int, group: int = 0, first: int = 0) -> tuple[np.ndarray, list[bytes]]:
    """Host blocks of one group, with the hashes ``first``, ``first + 1``, ..."""
    pairs = np.array([(group, block) for block in blocks], dtype=np.int32).reshape(-1, 2)
    return pairs, [name(first + i) for i in range(len(blocks))]


def numbered_arena() -> np.ndarray:
    """Every block full of its number, from 1 on."""
    return np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8), BLOCK_BYTES)


def told(manager: StorageManager) -> dict[str, list[int]]:
    """What is finished, without what is empty."""
    return {kind: blocks.tolist() for kind, blocks in vars(manager.finished()).items() if len(blocks)}


class Simulated:
    """A manager on simulated streams, where every piece of work takes a second."""

    def __init__(self, storage: MemoryStorage, batch_blocks: int = 4) -> None:
        self.clock = SimulatedClock()
        self.reads, self.writes = (SimulatedStream(self.clock, delay_s=lambda: 1.0) for _ in range(2))
        self.storage, self.host = storage, numbered_arena()
        self.manager = StorageManager(
            storage,
            self.host,
            read_stream=self.reads,
            write_stream=self.writes,
            batch_blocks=batch_blocks,
            clock=self.clock,
        )

    def content(self, block: int) -> list[int]:
        return sorted(set(self.host.reshape(BLOCKS, BLOCK_BYTES)[block].tolist()))


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage(BLOCK_BYTES)


@pytest.fixture
def simulated(storage) -> Simulated:
    return Simulated(storage)


@pytest.fixture
def threads() -> dict[str, CpuStream]:
    return {"read_stream": CpuStream("test-fetch"), "write_stream": CpuStream("test-put")}


@pytest.fixture
def threaded(storage, threads) -> StorageManager:
    """A manager on real threads."""
    return StorageManager(storage, numbered_arena(), batch_blocks=4, **threads)


def calls_of(storage: MemoryStorage, method: str) -> list[int]:
    return [count for called, count in storage.calls if called == method]


# ---- puts and fetches ----


def test_what_was_put_is_fetched_into_other_blocks(simulated):
    simulated.manager.put(*named(2, 5))
    assert simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"put": [2, 5]}
    simulated.manager.fetch(*named(9, 8))
    assert told(simulated.manager) == {}
    assert simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"fetched": [9, 8]}
    assert (simulated.content(9), simulated.content(8)) == ([3], [6])
    assert told(simulated.manager) == {}, "everything is told once"


def test_a_hash_means_another_block_in_another_group(simulated):
    simulated.manager.put(*named(2, group=0))
    simulated.manager.put(*named(3, group=1))
    simulated.manager.drain(WAIT_S)
    simulated.manager.fetch(*named(9, group=1))
    simulated.manager.fetch(*named(10, group=2))
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"fetched": [9], "missed": [10], "put": [2, 3]}
    assert simulated.content(9) == [4]


def test_the_first_blocks_of_a_long_prefix_are_told_before_the_last_ones_come(simulated, storage):
    simulated.manager.put(*named(*range(10)))
    simulated.manager.drain(WAIT_S)
    told(simulated.manager)
    simulated.manager.fetch(*named(*range(10)))
    seen = []
    for _ in range(3):
        simulated.clock.advance(1.0)
        seen.append(told(simulated.manager)["fetched"])
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert calls_of(storage, "read") == [4, 4, 2]


def test_puts_that_queue_go_together_in_calls_of_at_most_a_batch(simulated, storage):
    for block in range(9):
        simulated.manager.put(*named(block, first=block))
    simulated.manager.put(*named(9, 10, 11, 12, 13, first=9))
    assert simulated.manager.put_stats().queued_blocks == 14
    assert simulated.manager.drain(WAIT_S)
    assert calls_of(storage, "write") == [4, 4, 4, 2]
    assert told(simulated.manager) == {"put": list(range(14))}
    simulated.manager.fetch(*named(*range(13, -1, -1)))
    simulated.manager.drain(WAIT_S)
    assert [simulated.content(block) for block in range(14)] == [[14 - block] for block in range(14)]


def test_nothing_is_added_to_a_call_that_has_begun(threaded, storage):
    begun = storage.hang("write")
    threaded.put(*named(0))
    assert begun.wait(WAIT_S)
    threaded.put(*named(1, first=1))
    threaded.put(*named(2, first=2))
    storage.go_on("write")
    assert threaded.drain(WAIT_S)
    assert told(threaded) == {"put": [0, 1, 2]}
    assert calls_of(storage, "write") == [1, 2]
    threaded.close(WAIT_S)


def test_what_the_caller_gave_may_change_while_it_is_queued(simulated):
    blocks, hashes = named(2)
    simulated.manager.put(blocks, hashes)
    blocks[:], hashes[0] = 99, b"?"
    blocks, hashes = named(3, first=1)
    simulated.manager.put(blocks, hashes)
    blocks[:], hashes[0] = 99, b"?"
    simulated.manager.drain(WAIT_S)
    blocks, hashes = named(9, 8)
    simulated.manager.fetch(blocks, hashes)
    blocks[:] = 99
    hashes.clear()
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"put": [2, 3], "fetched": [9, 8]}


def test_nothing_to_copy_is_no_work(simulated, storage):
    simulated.manager.put(*named())
    simulated.manager.fetch(*named())
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {}
    assert storage.calls == [("register", 0)]


def test_blocks_without_hashes_and_arenas_that_do_not_fit_are_refused(simulated, storage):
    for submit in (simulated.manager.put, simulated.manager.fetch):
        with pytest.raises(ValueError, match=r"blocks \[2, 2\] with 1 hashes"):
            submit(named(0, 1)[0], [name(0)])
    stream = SimulatedStream(SimulatedClock())
    with pytest.raises(ValueError, match="host arena has 7 bytes"):
        StorageManager(storage, np.zeros(7, np.uint8), read_stream=stream, write_stream=stream)


def test_storage_is_never_called_by_the_caller(threaded, storage):
    threaded.put(*named(0, 1))
    threaded.fetch(*named(2, 3))
    threaded.reset()
    assert threaded.drain(WAIT_S)
    told(threaded)
    threaded.close(WAIT_S)
    assert {method for method, _ in storage.calls} == {"register", "write", "read", "clear", "close"}
    assert threading.current_thread() not in storage.threads


# ---- misses and failures ----


def test_what_storage_has_not_or_finds_corrupt_is_missed_and_the_rest_is_fetched(simulated, storage):
    simulated.manager.put(*named(0, 1, 2))
    simulated.manager.drain(WAIT_S)
    storage.corrupt = {key for key in storage.blocks if key.startswith(name(1))}
    simulated.manager.fetch(*named(8, 9, 10, 11))
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"put": [0, 1, 2], "fetched": [8, 10], "missed": [9, 11]}


def test_what_could_not_be_written_is_told(simulated, storage):
    simulated.manager.put(*named(0))
    simulated.manager.drain(WAIT_S)
    storage.full = True
    simulated.manager.put(*named(0, 1))
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"put": [0, 0], "not_put": [1]}


@pytest.mark.parametrize("method", ["read", "write"])
@pytest.mark.parametrize("answer", [np.ones(3, np.bool_), np.ones(2, np.int32), None], ids=["length", "dtype", "none"])
def test_an_answer_that_makes_no_sense_counts_as_a_failure(simulated, storage, method, answer):
    storage.answers[method] = answer
    simulated.manager.put(*named(0, 1))
    simulated.manager.drain(WAIT_S)
    simulated.manager.fetch(*named(8, 9))
    simulated.manager.drain(WAIT_S)
    if method == "read":
        assert told(simulated.manager) == {"put": [0, 1], "missed": [8, 9]}
    else:
        assert told(simulated.manager) == {"not_put": [0, 1], "fetched": [8, 9]}


def test_failures_are_told_block_by_block_and_logged_once_a_kind(simulated, storage, caplog):
    storage.errors = {"read": OSError("the disk is gone"), "write": OSError("no space"), "clear": OSError("busy")}
    for _ in range(2):
        simulated.manager.put(*named(0, 1))
        simulated.manager.fetch(*named(8, 9))
        simulated.manager.reset()
        simulated.manager.drain(WAIT_S)
        assert told(simulated.manager) == {"not_put": [0, 1], "missed": [8, 9]}
    storage.errors["read"] = ValueError("another kind")
    simulated.manager.fetch(*named(8))
    simulated.manager.drain(WAIT_S)
    assert sorted(record.getMessage().partition(";")[0] for record in caplog.records) == [
        "cannot clear storage: OSError: busy",
        "cannot read from storage: OSError: the disk is gone",
        "cannot read from storage: ValueError: another kind",
        "cannot write to storage: OSError: no space",
    ]
    storage.errors.clear()
    simulated.manager.put(*named(0))
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"missed": [8], "put": [0]}, "it goes on when storage does"


def test_with_an_arena_that_cannot_be_registered_everything_is_a_miss(simulated, storage, caplog):
    storage.errors["register"] = RuntimeError("ulimit -l")
    for _ in range(2):
        simulated.manager.put(*named(0))
        simulated.manager.fetch(*named(8))
        simulated.manager.drain(WAIT_S)
        assert told(simulated.manager) == {"not_put": [0], "missed": [8]}
    assert [method for method, _ in storage.calls] == ["register"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_work_that_a_stream_drops_is_told_as_failed_and_takes_no_more_blocks(storage):
    clock, failures = SimulatedClock(), iter([OSError("dropped"), None])
    writes = SimulatedStream(clock, failure=lambda: next(failures))
    manager = StorageManager(
        storage, numbered_arena(), read_stream=SimulatedStream(clock), write_stream=writes, clock=clock
    )
    manager.put(*named(0))
    clock.advance(1.0)
    manager.put(*named(1))
    assert manager.drain(WAIT_S)
    assert told(manager) == {"not_put": [0], "put": [1]}


# ---- reset ----


def test_a_reset_forgets_what_was_put_before_and_nothing_put_after(simulated, storage):
    simulated.manager.put(*named(0))
    simulated.manager.reset()
    simulated.manager.put(*named(1, first=1))
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"put": [0, 1]}
    assert [method for method, _ in storage.calls if method != "register"] == ["write", "clear", "write"]
    simulated.manager.fetch(*named(8, 9))
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"missed": [8], "fetched": [9]}


def test_a_fetch_after_a_reset_finds_nothing_that_the_reset_has_yet_to_remove(simulated):
    simulated.manager.put(*named(0))
    simulated.manager.drain(WAIT_S)
    simulated.manager.put(*named(1, first=1))
    simulated.manager.reset()
    simulated.manager.fetch(*named(8))  # its turn comes before that of the reset
    simulated.clock.advance(1.0)
    assert told(simulated.manager) == {"put": [0, 1], "missed": [8]}


def test_a_delete_forgets_what_was_put_before_in_every_group_and_nothing_put_after(simulated, storage):
    simulated.manager.put(*named(0, 1))
    simulated.manager.delete([name(0)], 2)
    simulated.manager.put(*named(2))  # as the first was
    simulated.manager.drain(WAIT_S)
    assert [method for method, _ in storage.calls if method != "register"] == ["write", "delete", "write"]
    assert told(simulated.manager) == {"put": [0, 1, 2]}
    simulated.manager.delete([name(1)], 2)
    simulated.manager.drain(WAIT_S)
    simulated.manager.fetch(*named(8, 9))
    simulated.manager.drain(WAIT_S)
    assert told(simulated.manager) == {"fetched": [8], "missed": [9]}


def test_drain_waits_for_a_reset(simulated, storage):
    simulated.manager.reset()
    assert not simulated.manager.drain(0.5)
    assert simulated.manager.drain(1.0)
    assert calls_of(storage, "clear") == [0]


# ---- what hangs ----


def test_a_fetch_that_hangs_holds_up_neither_the_caller_nor_puts_and_is_told_when_it_goes_on(
    threaded, threads, storage
):
    begun = storage.hang("read")
    threaded.fetch(*named(8))
    assert begun.wait(WAIT_S)
    threaded.fetch(*named(9, first=1))
    threaded.put(*named(0, 1))
    assert threads["write_stream"].submit(lambda: None).wait(WAIT_S)
    assert told(threaded) == {"put": [0, 1]}
    assert not threaded.drain(0.0)
    assert threaded.fetch_stats().queued_blocks == 2
    storage.go_on("read")
    assert threaded.drain(WAIT_S)
    assert told(threaded) == {"fetched": [8, 9]}
    threaded.close(WAIT_S)


def test_a_registration_that_hangs_holds_up_nobody_and_is_not_tried_twice(storage, threads):
    begun = storage.hang("register")
    manager = StorageManager(storage, numbered_arena(), **threads)
    assert begun.wait(WAIT_S)
    manager.put(*named(0))
    manager.fetch(*named(8))
    assert not manager.drain(0.0)
    assert told(manager) == {}
    storage.go_on("register")
    assert manager.drain(WAIT_S)
    assert told(manager)["put"] == [0]
    assert calls_of(storage, "register") == [0]
    manager.close(WAIT_S)


# ---- close ----


def test_close_finishes_puts_and_gives_up_fetches(simulated, storage):
    for start in (0, 4):
        simulated.manager.put(*named(*range(start, start + 4), first=start))
    simulated.manager.fetch(*named(8, 9))
    simulated.manager.close(WAIT_S)
    assert told(simulated.manager) == {"put": list(range(8)), "missed": [8, 9]}
    assert [method for method, _ in storage.calls] == ["register", "write", "write", "close"]
    assert simulated.reads.is_closed
    assert simulated.writes.is_closed


def test_after_close_its_threads_are_gone(threaded, threads, storage):
    threaded.put(*named(0))
    threaded.close(WAIT_S)
    assert not any(thread.is_alive() for thread in storage.threads)
    for stream in threads.values():
        with pytest.raises(RuntimeError, match="is closed"):
            stream.submit(lambda: None)


def test_close_leaves_puts_that_do_not_begin_in_time(storage):
    simulated = Simulated(storage, batch_blocks=1)
    simulated.manager.put(*named(*range(9)))
    simulated.manager.close(3.5)
    assert simulated.clock.now == 3.5
    simulated.clock.advance(WAIT_S)
    assert told(simulated.manager) == {"put": [0, 1, 2], "not_put": [3, 4, 5, 6, 7, 8]}


@pytest.mark.parametrize("method", ["register", "read", "write", "close"])
def test_a_call_that_hangs_does_not_hang_close_and_its_thread_ends_with_it(storage, method):
    before = set(threading.enumerate())
    begun = storage.hang(method)
    streams = {"read_stream": CpuStream("test-fetch"), "write_stream": CpuStream("test-put")}
    manager = StorageManager(storage, numbered_arena(), batch_blocks=1, **streams)
    manager.fetch(*named(8))
    manager.put(*named(0, 1))
    if method != "close":
        assert begun.wait(WAIT_S)
    manager.close(0.05)
    assert begun.wait(WAIT_S)
    threads = set(threading.enumerate()) - before
    assert threads, "the one that hangs"
    assert all(thread.daemon for thread in threads)
    storage.go_on(method)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    is_being_read = method in ("register", "read")
    assert calls_of(storage, "close") == ([] if is_being_read else [0]), "what is being read must not be closed"


# ---- statistics ----


def test_statistics_count_what_was_copied_and_what_was_not(simulated, storage):
    simulated.manager.put(*named(0, 1))
    simulated.manager.fetch(*named(8, 9, 10, 11, 12))
    queued = simulated.manager.fetch_stats(), simulated.manager.put_stats()
    assert [stats.queued_blocks for stats in queued] == [5, 2]
    simulated.manager.drain(WAIT_S)
    told(simulated.manager)
    fetches, puts = simulated.manager.fetch_stats(), simulated.manager.put_stats()
    assert (puts.blocks, puts.bytes, puts.busy_s, puts.failed_blocks) == (2, 2 * BLOCK_BYTES, 1.0, 0)
    assert (fetches.blocks, fetches.bytes, fetches.failed_blocks) == (2, 2 * BLOCK_BYTES, 3)
    assert (fetches.busy_s, fetches.waited_s, fetches.queued_blocks) == (2.0, 0.0, 0)
    storage.errors["write"] = OSError("no space")
    simulated.manager.put(*named(2))
    simulated.manager.drain(WAIT_S)
    told(simulated.manager)
    assert simulated.manager.put_stats().failed_blocks == 1


# ---- anything, in any order ----


class StorageMachine(RuleBasedStateMachine):
    """Random puts, fetches, resets, delays and failures: a block fetched holds what was put under its key, not before
    the last reset when it was asked for, and every block submitted is told once."""

    KEYS = 12

    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.0
        clock = SimulatedClock()
        streams = [SimulatedStream(clock, lambda: self.delay_s) for _ in range(2)]
        self.clock, self.storage = clock, MemoryStorage(BLOCK_BYTES)
        self.host = np.zeros(BLOCKS * BLOCK_BYTES, np.uint8)
        self.manager = StorageManager(
            self.storage, self.host, read_stream=streams[0], write_stream=streams[1], batch_blocks=3, clock=clock
        )
        self.putting: set[int] = set()
        self.fetching: dict[int, tuple[tuple[int, int], int]] = {}  # key and resets before, by host block
        self.resets = 0

    def content(self, key: tuple[int, int], resets: int) -> list[int]:
        return [1 + key[0] + self.KEYS * key[1]] * (BLOCK_BYTES - 1) + [resets]

    def block(self, number: int) -> np.ndarray:
        return self.host.reshape(BLOCKS, BLOCK_BYTES)[number]

    def take(self, keys: list[tuple[int, int]]) -> tuple[list[int], np.ndarray, list[bytes]]:
        """Host blocks that nothing is copied from or to, one a key, as far as there are."""
        idle = [block for block in range(BLOCKS) if block not in self.putting and block not in self.fetching]
        blocks = idle[: len(keys)]
        pairs = [(group, block) for (_, group), block in zip(keys, blocks, strict=False)]
        hashes = [name(number) for number, _ in keys[: len(blocks)]]
        return blocks, np.array(pairs, dtype=np.int32).reshape(-1, 2), hashes

    keys = st.lists(st.tuples(st.integers(0, KEYS - 1), st.integers(0, 2)), max_size=8)

    @rule(keys=keys)
    def put(self, keys) -> None:
        blocks, pairs, hashes = self.take(keys)
        for block, key in zip(blocks, keys, strict=False):
            self.block(block)[:] = self.content(key, self.resets)
        self.putting.update(blocks)
        self.manager.put(pairs, hashes)

    @rule(keys=keys)
    def fetch(self, keys) -> None:
        blocks, pairs, hashes = self.take(keys)
        for block, key in zip(blocks, keys, strict=False):
            self.block(block)[:] = 0
            self.fetching[block] = key, self.resets
        self.manager.fetch(pairs, hashes)

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.resets += 1

    @rule(methods=st.sets(st.sampled_from(["read", "write"])))
    def break_down(self, methods) -> None:
        self.storage.errors = {method: OSError(method) for method in methods}

    @rule(is_full=st.booleans(), lost=st.sets(st.integers(0, KEYS - 1)), corrupt=st.sets(st.integers(0, KEYS - 1)))
    def lose(self, is_full, lost, corrupt) -> None:
        stored = self.storage.blocks
        self.storage.full = is_full
        self.storage.blocks = {key: data for key, data in stored.items() if key[0] not in lost}
        self.storage.corrupt = {key for key in stored if key[0] in corrupt}

    @rule(delay_s=st.sampled_from([0.0, 0.5, 2.0]), passed_s=st.sampled_from([0.0, 1.0, 10.0]))
    def pass_time(self, delay_s, passed_s) -> None:
        self.delay_s = delay_s
        self.clock.advance(passed_s)

    @rule()
    def tell(self) -> None:
        finished = self.manager.finished()
        for block in finished.fetched.tolist():
            key, resets = self.fetching.pop(block)
            written = [self.content(key, later) for later in range(resets, self.resets + 1)]
            assert self.block(block).tolist() in written
        for block in finished.missed.tolist():
            del self.fetching[block]
        for block in [*finished.put.tolist(), *finished.not_put.tolist()]:
            self.putting.remove(block)

    @rule()
    def drain(self) -> None:
        assert self.manager.drain(1e9)
        self.tell()
        assert not self.putting
        assert not self.fetching

    @invariant()
    def what_is_queued_is_what_is_not_told_yet(self) -> None:
        assert self.manager.fetch_stats().queued_blocks == len(self.fetching)
        assert self.manager.put_stats().queued_blocks == len(self.putting)

    def teardown(self) -> None:
        self.manager.close(1e9)
        self.tell()
        assert not self.putting
        assert not self.fetching


TestStorageMachine = StorageMachine.TestCase


# ---- a real storage ----


def test_blocks_outlive_the_process_that_put_them_in_files(tmp_path):
    def open_manager(host: np.ndarray) -> StorageManager:
        storage = FileStorage(tmp_path, 1 << 20, StorageNamespace("model", "layout"), BLOCK_BYTES)
        streams = {"read_stream": CpuStream("test-fetch"), "write_stream": CpuStream("test-put")}
        return StorageManager(storage, host, batch_blocks=4, **streams)

    writer = open_manager(numbered_arena())
    for block in range(12):
        writer.put(*named(block, first=block, group=block % 2))
    writer.close(WAIT_S)
    assert told(writer) == {"put": list(range(12))}

    host = np.zeros(BLOCKS * BLOCK_BYTES, np.uint8)
    reader = open_manager(host)
    reader.fetch(np.array([(i % 2, 15 - i) for i in range(14)], dtype=np.int32), [name(i) for i in range(14)])
    assert reader.drain(WAIT_S)
    assert told(reader) == {"fetched": [15 - i for i in range(12)], "missed": [3, 2]}
    assert host.reshape(BLOCKS, -1)[4:].tolist() == [[12 - i] * BLOCK_BYTES for i in range(12)]
    reader.reset()
    assert reader.drain(WAIT_S)
    reader.fetch(*named(0))
    assert reader.drain(WAIT_S)
    assert told(reader) == {"missed": [0]}
    reader.close(WAIT_S)
