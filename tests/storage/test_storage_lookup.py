from __future__ import annotations

import select
import threading

import numpy as np
import pytest
from support.memory_storage import MemoryStorage

from headwise.storage.backends.base import StorageNamespace, block_keys
from headwise.storage.backends.file import FileStorage
from headwise.storage.lookup import StorageLookup

GROUPS = 2
WAIT_S = 60.0
"""For what must happen: never reached unless the test fails."""


def path(length: int, first: int = 0) -> list[bytes]:
    return [(first + i).to_bytes(16, "little") for i in range(length)]


def store(storage: MemoryStorage, first: int, group: int) -> None:
    [key] = block_keys(path(1, first), np.array([group], np.int32))
    storage.blocks[key] = b""


@pytest.fixture
def storages() -> list[MemoryStorage]:
    return [MemoryStorage(), MemoryStorage()]


@pytest.fixture
def lookup(storages):
    lookup = StorageLookup(storages, GROUPS)
    yield lookup
    lookup.close()


def answers(lookup: StorageLookup, count: int = 1) -> list[tuple[str, list[list[bool]]]]:
    """The next ``count`` answers."""
    got = []
    while len(got) < count:
        assert lookup.wait(WAIT_S)
        got += [(key, found.tolist()) for key, found in lookup.poll()]
    assert len(got) == count
    return got


def test_a_block_is_there_if_every_rank_has_it_in_that_group(lookup, storages):
    for storage in storages:
        store(storage, 0, group=0)
        store(storage, 2, group=1)
    store(storages[0], 1, group=0)
    store(storages[1], 1, group=1)
    lookup.submit("a", path(3))
    assert answers(lookup) == [("a", [[True, False], [False, False], [False, True]])]
    assert [storage.calls for storage in storages] == [[("contains", 3 * GROUPS)]] * 2
    assert lookup.poll() == [], "an answer is given once"


def test_answers_are_bool_arrays_in_the_order_of_the_questions(lookup):
    for number in range(5):
        lookup.submit(str(number), path(number))
    got = []
    while len(got) < 5:
        assert lookup.wait(WAIT_S)
        got += lookup.poll()
    assert [key for key, _ in got] == ["0", "1", "2", "3", "4"]
    assert [found.shape for _, found in got] == [(number, GROUPS) for number in range(5)]
    assert {found.dtype for _, found in got} == {np.dtype(np.bool_)}


def test_what_the_caller_gave_may_change_while_it_is_queued(lookup, storages):
    for storage in storages:
        store(storage, 0, group=0)
    begun, hashes = storages[0].hang("contains"), path(1)
    lookup.submit("a", path(1))
    assert begun.wait(WAIT_S)
    lookup.submit("b", hashes)
    hashes.clear()
    storages[0].go_on("contains")
    assert answers(lookup, 2)[1] == ("b", [[True, False]])


def test_an_error_finds_nothing_is_logged_once_a_kind_and_ends_with_itself(lookup, storages, caplog):
    for storage in storages:
        store(storage, 0, group=1)
    storages[1].errors["contains"] = OSError("the network is gone")
    for key in "ab":
        lookup.submit(key, path(1))
    assert answers(lookup, 2) == [("a", [[False, False]]), ("b", [[False, False]])]
    storages[1].errors.clear()
    storages[1].answers["contains"] = np.ones(1, np.bool_)
    lookup.submit("c", path(1))
    assert answers(lookup) == [("c", [[False, False]])]
    storages[1].answers.clear()
    lookup.submit("d", path(1))
    assert answers(lookup) == [("d", [[False, True]])]
    assert [record.getMessage().partition(": ")[2].partition(":")[0] for record in caplog.records] == [
        "OSError",
        "TypeError",
    ]


def test_a_call_that_hangs_holds_up_nobody_and_answers_when_it_goes_on(lookup, storages):
    begun = storages[0].hang("contains")
    lookup.submit("a", path(1))
    assert begun.wait(WAIT_S)
    lookup.submit("b", path(1))
    assert lookup.poll() == []
    assert not lookup.wait(0.0)
    storages[0].go_on("contains")
    assert [key for key, _ in answers(lookup, 2)] == ["a", "b"]


def test_a_cancelled_question_is_not_answered_wherever_it_is(lookup, storages):
    lookup.submit("answered", path(1))
    assert lookup.wait(WAIT_S)
    begun = storages[1].hang("contains")
    for storage in storages:
        store(storage, 0, group=0)
    lookup.submit("being asked", path(1))
    assert begun.wait(WAIT_S)
    lookup.submit("queued", path(1))
    lookup.submit("wanted", path(1))
    for key in ("answered", "being asked", "queued", "unknown"):
        lookup.cancel(key)
    assert lookup.poll() == []
    storages[1].go_on("contains")
    assert [key for key, _ in answers(lookup)] == ["wanted"]
    assert storages[0].calls == [("contains", GROUPS)] * 3, "what was queued is not asked"


def test_what_is_asked_in_the_background_waits_for_everything_else(lookup, storages):
    begun = storages[0].hang("contains")
    lookup.submit("a", path(1))
    assert begun.wait(WAIT_S)
    lookup.submit("audit", path(1), in_background=True)
    for key in "bc":
        lookup.submit(key, path(1))
    storages[0].go_on("contains")
    assert [key for key, _ in answers(lookup, 4)] == ["a", "b", "c", "audit"]
    lookup.submit("audit", path(1), in_background=True)
    assert [key for key, _ in answers(lookup)] == ["audit"]


def test_what_is_asked_in_the_background_may_be_cancelled(lookup, storages):
    begun = storages[0].hang("contains")
    lookup.submit("a", path(1))
    assert begun.wait(WAIT_S)
    lookup.submit("audit", path(1), in_background=True)
    lookup.cancel("audit")
    storages[0].go_on("contains")
    lookup.submit("b", path(1))
    assert [key for key, _ in answers(lookup, 2)] == ["a", "b"]


def test_a_key_may_be_asked_again_after_it_was_cancelled(lookup, storages):
    store(storages[0], 0, group=0)
    begun = storages[0].hang("contains")
    lookup.submit("a", path(1))
    assert begun.wait(WAIT_S)
    lookup.cancel("a")
    lookup.submit("a", path(2))
    storages[0].go_on("contains")
    [(key, found)] = answers(lookup)
    assert (key, len(found)) == ("a", 2)


def test_wait_wakes_up_for_an_answer(lookup, storages):
    begun = storages[0].hang("contains")
    lookup.submit("a", path(1))
    assert begun.wait(WAIT_S)
    woken = []
    waiter = threading.Thread(target=lambda: woken.append(lookup.wait(WAIT_S)))
    waiter.start()
    storages[0].go_on("contains")
    waiter.join(WAIT_S)
    assert woken == [True]
    assert lookup.wait(0.0), "as long as it is not polled"


def test_a_poller_wakes_up_for_an_answer_and_for_nothing_else(lookup, storages):
    def is_readable(timeout_s: float) -> bool:
        return bool(select.select([lookup], [], [], timeout_s)[0])

    assert not is_readable(0)
    lookup.submit("a", path(1))
    assert is_readable(WAIT_S)
    assert len(lookup.poll()) == 1
    assert not is_readable(0)
    lookup.submit("b", path(1))
    assert lookup.wait(WAIT_S)
    lookup.cancel("b")
    assert lookup.poll() == []
    assert not is_readable(0)


def test_storages_are_asked_and_closed_on_one_thread_which_is_not_the_caller(storages):
    lookup = StorageLookup(storages, GROUPS)
    lookup.submit("a", path(1))
    answers(lookup)
    storages[0].errors["close"] = OSError("gone before")
    lookup.close()
    lookup.close()
    [thread] = storages[0].threads | storages[1].threads
    assert thread is not threading.current_thread()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert [storage.calls[-1] for storage in storages] == [("close", 0)] * 2
    with pytest.raises(RuntimeError, match="closed: 'b' can no longer"):
        lookup.submit("b", path(1))


def test_close_does_not_wait_for_a_call_that_hangs_and_wakes_who_waits_for_its_answer(storages, monkeypatch):
    monkeypatch.setattr("headwise.storage.lookup.CLOSE_S", 0.01)
    lookup = StorageLookup(storages, GROUPS)
    begun = storages[0].hang("contains")
    lookup.submit("a", path(1))
    lookup.submit("b", path(1))
    assert begun.wait(WAIT_S)
    woken = []
    waiter = threading.Thread(target=lambda: woken.append(lookup.wait(WAIT_S)))
    waiter.start()
    lookup.close()
    waiter.join(WAIT_S)
    assert woken == [False]
    [thread] = storages[0].threads
    assert thread.daemon
    storages[0].go_on("contains")
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert lookup.poll() == []
    assert storages[0].calls == [("contains", GROUPS), ("close", 0)], "what was queued is not asked"


def test_files_of_two_ranks_are_asked_together(tmp_path):
    arena = np.zeros(4 * 8, np.uint8)
    ranks = [FileStorage(tmp_path, 1 << 20, StorageNamespace("model", "layout", rank, 2), 8) for rank in range(2)]
    both = np.array([0, 1], np.int32)
    ranks[0].write(path(2), both, arena, both)
    ranks[1].write(path(1), both[:1], arena, both[:1])
    lookup = StorageLookup(ranks, GROUPS)
    lookup.submit("a", path(2))
    assert answers(lookup) == [("a", [[True, False], [False, False]])]
    lookup.close()


def test_room_is_that_of_token_blocks_of_all_ranks_and_groups(lookup, storages, monkeypatch):
    assert lookup.room(WAIT_S) is None, "not known"
    monkeypatch.setattr(MemoryStorage, "room", 41)
    assert lookup.room(WAIT_S) == 41 // (GROUPS * len(storages))
    lookup.submit("a", path(1))
    assert answers(lookup) == [("a", [[False, False]])]


def test_room_is_not_waited_for_for_long_nor_asked_of_what_is_closed(lookup, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(MemoryStorage, "room", property(lambda self: hangs.wait(WAIT_S)))
    assert lookup.room(0.01) is None
    hangs.set()
    lookup.submit("a", path(1))
    assert answers(lookup) == [("a", [[False, False]])]
    lookup.close()
    assert lookup.room(WAIT_S) is None
