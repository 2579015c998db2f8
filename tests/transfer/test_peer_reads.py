"""What a worker's reads of other engines' arenas promise, whatever owners do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_streams import SimulatedClock, SimulatedStream
from support.waiting import eventually

from headwise.cache_controller.head_exchange import Arrangement, HeadExchange
from headwise.cache_controller.memories import DEVICE, HOST
from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.kernels.block_copy import reference_run_copy
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Runs, check_runs
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.peer_reads import LOST_S, MAX_OWNERS, PeerBlocks, PeerReads, merged, runs_of

BLOCKS, WAIT_S, TIMEOUT_S = 16, 60.0, 5.0
POLICIES = [[FULL, HeadPolicy(8), FULL, HeadPolicy(8)]] * 2
"""Two groups at any number of ranks, so that a block of ours is one group's of every rank of the owner."""


def arrangement(ranks: int) -> Arrangement:
    plan = plan_head_groups(POLICIES, ranks, sizes=[4, 4])
    return Arrangement(plan, (4, 4), plan.block_bytes, ("k", "k"))


class Owners:
    """`Reader` of owners in this process, which fail when told to."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.arenas: dict[bytes, np.ndarray] = {}
        self.reads: list[bytes] = []
        self.places: list[tuple[bytes, int]] = []  # of each read its owner, and the first byte that it fills
        self.forgotten: list[bytes] = []
        self.fail: Callable[[ExportAddress], None] = lambda address: None
        self.is_closed = False

    def export(
        self, arena: np.ndarray, transport: str = "memory", identity: bytes = b"id", memory: int = HOST
    ) -> bytes:
        location = b"%d" % len(self.arenas)
        self.arenas[location] = arena
        return ExportAddress(transport, "here", location, identity, arena.size, memory).encode()

    def reaches(self, address: ExportAddress) -> bool:
        return address.node == "here"

    def read(self, address: ExportAddress, runs: Runs, arena: np.ndarray, timeout_s: float) -> None:
        self.reads.append(address.location)
        assert 0 < timeout_s <= TIMEOUT_S
        check_runs(runs, address.arena_bytes, arena.size)
        self.clock.advance(1.0)
        self.fail(address)
        self.places.append((address.location, int(runs[:, 1].min())))
        reference_run_copy(self.arenas[address.location], arena, runs)

    def forget(self, address: ExportAddress) -> None:
        self.forgotten.append(address.location)

    def close(self) -> None:
        self.is_closed = True


class Simulated:
    """Reads on a simulated stream, each of which takes a second; owners of ``ranks`` ranks."""

    def __init__(self, ranks: int = 1, batch_blocks: int = 4) -> None:
        self.clock = SimulatedClock()
        self.owners, self.stream = Owners(self.clock), SimulatedStream(self.clock)
        self.ours, self.theirs = arrangement(1), arrangement(ranks)
        self.arena = np.zeros(BLOCKS * self.ours.block_bytes, dtype=np.uint8)
        rng = np.random.default_rng(ranks)
        self.sources = [rng.integers(1, 256, BLOCKS * self.theirs.block_bytes, dtype=np.uint8) for _ in range(ranks)]
        self.exports = tuple((self.owners.export(source),) for source in self.sources)
        blocks = PeerBlocks(b"id", 0, self.ours.block_bytes, self.exchange)
        self.reads = PeerReads(
            {"memory": self.owners, "other": self.owners},
            blocks,
            self.arena,
            streams=[self.stream],
            timeout_s=TIMEOUT_S,
            batch_blocks=batch_blocks,
            clock=self.clock,
        )

    def exchange(self, ranks: int) -> HeadExchange:
        if ranks == 3:
            raise ValueError("3 does not divide the heads")
        return HeadExchange(self.ours, arrangement(ranks))

    def told(self) -> dict[str, list[int]]:
        self.stream.catch_up()
        return {kind: blocks.tolist() for kind, blocks in self.reads.finished()._asdict().items() if len(blocks)}

    def content(self, block: int) -> np.ndarray:
        return self.arena.reshape(BLOCKS, -1)[block]


def rows(*pairs: tuple[int, int], group: int = 0) -> np.ndarray:
    """(its host block, ours), of one group of both."""
    return np.array([(group, theirs, group, ours, HOST) for theirs, ours in pairs], dtype=np.int32).reshape(-1, 5)


@pytest.fixture
def simulated() -> Simulated:
    return Simulated()


def test_blocks_come_in_the_order_in_which_they_are_asked_for_and_are_told_once(simulated) -> None:
    simulated.reads.fetch(simulated.exports, rows(*((block, 15 - block) for block in range(10))))
    assert simulated.reads.stats().queued_blocks == 10
    assert simulated.told() == {"fetched": [12, 13, 14, 15, 8, 9, 10, 11, 6, 7]}, "four at a time"
    assert simulated.told() == {}
    theirs = simulated.sources[0].reshape(BLOCKS, -1)
    for block in range(10):
        assert (simulated.content(15 - block) == theirs[block]).all()
    assert not simulated.arena.reshape(BLOCKS, -1)[:6].any()
    stats = simulated.reads.stats()
    assert (stats.blocks, stats.bytes, stats.busy_s) == (10, 10 * simulated.ours.block_bytes, 3.0)


def test_a_block_that_is_filled_from_two_ranks_is_there_when_both_have_come() -> None:
    simulated = Simulated(ranks=2)
    simulated.reads.fetch(simulated.exports, np.concatenate([rows((3, 5)), rows((4, 6), group=1)]))
    assert simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"fetched": [5, 6]}
    assert simulated.content(5).all()
    assert simulated.content(6).all()
    simulated.owners.fail = lambda address: lose() if address.location == b"1" else None
    simulated.reads.fetch(simulated.exports, rows((3, 7)))
    assert simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"missed": [7]}


def test_blocks_are_read_in_the_memory_that_they_are_in_or_not_at_all(simulated) -> None:
    on_device = 255 - simulated.sources[0]
    by_host, by_device = simulated.exports[0][0], simulated.owners.export(on_device, memory=DEVICE)
    mixed = rows((3, 5), (3, 6))
    mixed[1, 4] = DEVICE
    simulated.reads.fetch(((by_device, by_host),), mixed)
    assert simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"fetched": [5, 6]}
    assert (simulated.content(5) == simulated.sources[0].reshape(BLOCKS, -1)[3]).all()
    assert (simulated.content(6) == on_device.reshape(BLOCKS, -1)[3]).all()

    mixed[:, 3] = 7, 8
    simulated.reads.fetch(((by_host,),), mixed)
    assert simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"missed": [7, 8]}, "an owner without an export of its device"


def lose() -> None:
    raise PeerLostError("it is gone")


@pytest.mark.parametrize(
    "wrong",
    [
        [(0, 3, 1, 5)],  # a group that has nothing for ours
        [(2, 3, 0, 5)],
        [(0, 3, 9, 5)],
        [(-1, 3, 0, 5)],
        [(0, 3, 0, 5), (0, 4, 0, 5)],  # twice
        [(0, 3, 0, 5), (1, 4, 1, 5)],  # by two groups
        [(0, 99, 0, 5)],  # beyond the owner's arena
        [(0, 3, 0, 99)],
        [(0, -1, 0, 5)],
    ],
)
def test_rows_that_make_no_sense_are_missed_and_write_nothing(simulated, wrong) -> None:
    simulated.reads.fetch(simulated.exports, np.array([(*row, HOST) for row in wrong], dtype=np.int32))
    simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"missed": sorted({row[3] for row in wrong})}
    assert not simulated.arena.any()


def test_a_block_of_which_a_part_was_not_asked_for_is_missed() -> None:
    needs = np.array([[True, True]])

    class Exchange:
        pass

    exchange = Exchange()
    exchange.needs = needs
    with pytest.raises(ValueError, match="fill block 5 in part only"):
        runs_of(exchange, 0, rows((3, 5)))


def test_an_owner_that_is_lost_is_not_tried_again_for_a_while(simulated, caplog) -> None:
    simulated.owners.fail = lambda address: lose()
    for block in (1, 2):
        simulated.reads.fetch(simulated.exports, rows((0, block)))
    simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"missed": [1, 2]}
    assert simulated.owners.reads == [b"0"]
    assert simulated.owners.forgotten == [b"0"]
    assert caplog.text.count("did not come: memory: it is gone") == 1
    simulated.owners.fail = lambda address: None
    simulated.clock.advance(LOST_S)
    simulated.reads.fetch(simulated.exports, rows((0, 3)))
    simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"fetched": [3]}
    assert simulated.reads.stats().failed_blocks == 2


def test_the_next_transport_is_taken_where_the_first_one_fails(simulated, caplog) -> None:
    caplog.set_level(logging.INFO)
    simulated.owners.fail = lambda address: lose() if address.transport == "memory" else None
    other = simulated.owners.export(simulated.sources[0], "other")
    unknown = simulated.owners.export(simulated.sources[0], "carrier-pigeon")
    simulated.reads.fetch(((unknown, *simulated.exports[0], other),), rows((0, 3)))
    simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"fetched": [3]}
    assert "blocks of engines on node here come by other" in caplog.text


@pytest.mark.parametrize(
    ("exports", "why"),
    [
        (lambda owners, arena: ((owners.export(arena, identity=b"x"),),), "of another model"),
        (lambda owners, arena: ((owners.export(arena, "carrier-pigeon"),),), "no transport that this one has"),
        (lambda owners, arena: ((b"no address",),), "no address of an arena"),
        (lambda owners, arena: ((),), "no transport that this one has"),
        (lambda owners, arena: ((owners.export(arena),),) * 3, "not with 3 ranks: 3 does not divide"),
        (lambda owners, arena: (), "of another engine"),
    ],
)
def test_an_owner_that_does_not_fit_is_missed_with_one_clear_line(simulated, caplog, exports, why) -> None:
    where = exports(simulated.owners, simulated.sources[0])
    for block in (1, 2):
        simulated.reads.fetch(where, rows((0, block)))
    simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"missed": [1, 2]}
    assert why in caplog.text
    assert len(caplog.records) == 1


def test_a_transport_that_fails_in_its_own_way_makes_blocks_missed(simulated, caplog) -> None:
    def fail(address: ExportAddress) -> None:
        raise RuntimeError("no such device\nand more")

    simulated.owners.fail = fail
    simulated.reads.fetch(simulated.exports, rows((0, 1)))
    simulated.reads.drain(WAIT_S)
    assert simulated.told() == {"missed": [1]}
    assert "RuntimeError: no such device;" in caplog.text


def test_close_gives_up_what_has_not_begun_and_closes_readers(simulated) -> None:
    simulated.reads.fetch(simulated.exports, rows((0, 1)))
    simulated.reads.close(WAIT_S)
    assert simulated.told() == {"missed": [1]}
    assert simulated.owners.is_closed


class Hanging:
    """Reads on threads, of owners that hang until they are let go."""

    def __init__(self, owners: int, streams: int = MAX_OWNERS) -> None:
        self.simulated = Simulated()
        self.exports = [((self.simulated.owners.export(self.simulated.sources[0]),),) for _ in range(owners)]
        self.begun = [threading.Event() for _ in self.exports]
        self.may_end = [threading.Event() for _ in self.exports]
        self.under_way = self.most = 0
        self.lock = threading.Lock()
        self.simulated.owners.fail = self._hang
        blocks = PeerBlocks(b"id", 0, self.simulated.ours.block_bytes, self.simulated.exchange)
        self.streams = [CpuStream(f"test-peer-{at}") for at in range(streams)]
        readers = {"memory": self.simulated.owners}
        self.reads = PeerReads(
            readers, blocks, self.simulated.arena, streams=self.streams, timeout_s=TIMEOUT_S, batch_blocks=1
        )

    def _hang(self, address: ExportAddress) -> None:
        which = [exports[0][0] for exports in self.exports].index(address.encode())
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        self.begun[which].set()
        assert self.may_end[which].wait(WAIT_S)
        with self.lock:
            self.under_way -= 1

    def fetch(self, owner: int, *ours: int) -> None:
        self.reads.fetch(self.exports[owner], rows(*((block, block) for block in ours)))

    def comes(self) -> list[int]:
        """What comes next."""
        came: list[int] = []
        eventually(lambda: came.extend(self.reads.finished().fetched.tolist()) or came)
        return came

    def end(self) -> None:
        for may_end in self.may_end:
            may_end.set()
        assert self.reads.drain(WAIT_S)
        self.reads.close(WAIT_S)


def test_a_read_that_hangs_does_not_hold_up_the_worker_nor_its_end() -> None:
    hanging = Hanging(owners=1)
    hanging.fetch(0, 1)
    assert hanging.begun[0].wait(WAIT_S)
    assert not hanging.reads.drain(0.01)
    assert [len(part) for part in hanging.reads.finished()] == [0, 0]
    hanging.reads.close(0.01)
    assert not hanging.simulated.owners.is_closed, "it is in use"
    hanging.may_end[0].set()
    for stream in hanging.streams:
        stream._thread.join(WAIT_S)
    assert hanging.simulated.owners.is_closed


def test_an_owner_that_hangs_holds_up_its_own_blocks_and_no_other_owners() -> None:
    hanging = Hanging(owners=3)
    hanging.fetch(0, 1, 2, 3, 4, 5, 6)
    assert hanging.begun[0].wait(WAIT_S)
    hanging.may_end[1].set()
    hanging.may_end[2].set()
    for _ in range(3):
        hanging.fetch(1, 7)
        assert hanging.comes() == [7]
        hanging.fetch(2, 8)
        assert hanging.comes() == [8]
    assert hanging.simulated.owners.reads.count(b"1") == 1, "of one owner one read follows the other"
    hanging.may_end[0].set()
    assert hanging.reads.drain(WAIT_S)
    assert hanging.reads.finished().fetched.tolist() == [1, 2, 3, 4, 5, 6]
    hanging.end()


def test_so_many_owners_are_read_at_a_time_and_the_next_one_when_one_of_them_is_through() -> None:
    hanging = Hanging(owners=4, streams=3)
    for owner in range(4):
        hanging.fetch(owner, 1 + owner, 5 + owner)
    for owner in range(3):
        assert hanging.begun[owner].wait(WAIT_S)
    assert not hanging.begun[3].is_set()
    hanging.may_end[3].set()
    hanging.may_end[1].set()
    assert hanging.reads.drain(0.0) is False
    eventually(lambda: hanging.begun[3].is_set())
    came = set()
    while len(came) < 4:
        came.update(hanging.comes())
    assert came == {2, 6, 4, 8}
    hanging.end()
    assert hanging.most == 3


@pytest.mark.parametrize("seed", range(20))
def test_whatever_owners_do_each_block_comes_once_and_an_owners_in_order(seed: int) -> None:
    random = Random(seed)
    hanging = Hanging(owners=5, streams=random.randint(1, 4))
    for may_end in hanging.may_end:
        may_end.set()
    asked = [(random.randrange(5), block) for block in random.sample(range(BLOCKS), BLOCKS)]
    for owner, block in asked:
        hanging.fetch(owner, block)
    assert hanging.reads.drain(WAIT_S)
    hanging.end()
    assert sorted(hanging.reads.finished().fetched.tolist()) == list(range(BLOCKS))
    assert (hanging.simulated.arena == hanging.simulated.sources[0]).all()
    assert hanging.most <= len(hanging.streams)
    size, places = hanging.simulated.ours.block_bytes, hanging.simulated.owners.places
    for owner in range(5):
        read = [place // size for location, place in places if location == b"%d" % (owner + 1)]
        assert read == [block for of, block in asked if of == owner]


def test_blocks_of_another_shape_are_refused(simulated) -> None:
    with pytest.raises(ValueError, match=r"blocks \[2, 3\]"):
        simulated.reads.fetch(simulated.exports, np.zeros((2, 3), np.int32))
    simulated.reads.fetch(simulated.exports, rows())
    assert simulated.told() == {}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=12), st.randoms())
def test_merged_runs_have_the_same_bytes(places, random) -> None:
    """Runs that go on from each other now and then, in any order."""
    runs, first, to = [], 0, 0
    for gap, count in places:
        first, to = first + gap // 4, to + gap // 5
        runs.append((first, to, count))
        first, to = first + count, to + count
    random.shuffle(runs)
    asked = np.array(runs, dtype=np.int64).reshape(-1, 3)
    source = np.arange(1, 200, dtype=np.uint8)
    one, other = np.zeros((2, 200), dtype=np.uint8)
    reference_run_copy(source, one, asked)
    reference_run_copy(source, other, merged(asked))
    assert (one == other).all()
    assert len(merged(asked)) <= len(asked)
