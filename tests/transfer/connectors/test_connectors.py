"""What all transports promise, with owners in processes of their own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import zmq
from support.gpu.host_ipc import HostGpu, host_sharing
from support.peer_owner import IDENTITY, PeerOwner, content
from support.waiting import PATIENCE_S, eventually

from headwise.cache_controller.memories import DEVICE, HOST
from headwise.errors import ConfigError
from headwise.kernels.select import make_run_copy
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, new_secret, public_key
from headwise.transfer.connectors import mooncake, nixl, tcp
from headwise.transfer.connectors.base import (
    ExportAddress,
    PeerLostError,
    Reader,
    check_runs,
    this_node,
    ways_to_devices,
)
from headwise.transfer.connectors.names import TRANSPORTS, check_plain, has_rdma, parse_transports
from headwise.transfer.connectors.select import Memories, PeerAccess, choose_transports, open_exports, open_readers
from headwise.transfer.connectors.shared_memory import SharedMemoryExport
from headwise.transfer.connectors.staged import MAX_STAGINGS, StagedReader
from headwise.transfer.host_memory import HostArena

NUM_BYTES = 5 << 20
SHORT_S = 0.3
"""For what must not come."""


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each of them; skipped where its package is not installed (`make rdma` brings both)."""
    return installed(str(request.param))


def installed(transport: str) -> str:
    try:
        {"nixl": nixl.load, "mooncake": mooncake.load}.get(transport, lambda: None)()
    except ImportError as error:
        pytest.skip(f"{transport}: {error}; `make rdma` installs it")
    return transport


@pytest.fixture(scope="module")
def shared_owner() -> Iterator[PeerOwner]:
    """One that all tests read which leave it as it is."""
    owner = PeerOwner(NUM_BYTES, TRANSPORTS)
    yield owner
    owner.kill()


@pytest.fixture
def owner(transport: str) -> Iterator[PeerOwner]:
    """One that a test may stop and kill."""
    owner = PeerOwner(NUM_BYTES, [transport])
    yield owner
    owner.kill()


@pytest.fixture
def reader(transport: str) -> Iterator[Reader]:
    reader = make_reader(transport)
    yield reader
    reader.close()


def make_reader(transport: str, keys: ClientKeys | None = None) -> Reader:
    sharing = host_sharing(HostGpu())
    return open_readers([transport], PeerAccess(keys=keys), make_run_copy("numba", 1), sharing)[transport]


def runs(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def scattered(seed: int, count: int, size: int) -> np.ndarray:
    """Runs of up to ``size`` bytes, everywhere in both arenas."""
    rng = np.random.default_rng(seed)
    places = np.column_stack([rng.permutation(NUM_BYTES // size)[:count] * size for _ in range(2)])
    return np.column_stack([places, rng.integers(0, size + 1, count)])


def expected(content: np.ndarray, asked: np.ndarray) -> np.ndarray:
    arena = np.zeros(NUM_BYTES, dtype=np.uint8)
    for first, to, count in asked.tolist():
        arena[to : to + count] = content[first : first + count]
    return arena


WHAT = {
    "nothing": runs(),
    "all at once": runs((0, 0, NUM_BYTES)),
    "the ends": runs((NUM_BYTES - 1, 0, 1), (0, NUM_BYTES - 1, 1)),
    "a run that is not cut evenly": runs((7, 100, (3 << 20) + 5)),
    "short": scattered(1, 3000, 1 << 10),
    "long": scattered(2, 40, 96 << 10),
    "long and short": np.concatenate([runs((0, 0, 2 << 20)), np.add(scattered(3, 300, 1 << 10), [0, 3 << 20, 0])])[
        :120
    ],
}


@pytest.mark.parametrize("what", WHAT)
def test_the_bytes_that_were_asked_for_come_and_no_others(shared_owner, transport, reader, what) -> None:
    asked, arena = WHAT[what], np.zeros(NUM_BYTES, dtype=np.uint8)
    asked = asked[(asked[:, :2] + asked[:, 2:] <= NUM_BYTES).all(axis=1)]
    for _ in range(2):
        arena[:] = 0
        reader.read(shared_owner.addresses[transport], asked, arena, PATIENCE_S)
        assert (arena == expected(shared_owner.content, asked)).all()


def test_two_readers_at_once_get_each_its_own(shared_owner, transport) -> None:
    arenas, failures = np.zeros((2, NUM_BYTES), dtype=np.uint8), []

    def read(which: int) -> None:
        reader = make_reader(transport)
        try:
            for turn in range(6):
                asked = scattered(10 * which + turn, 30, 128 << 10)
                arenas[which] = 0
                reader.read(shared_owner.addresses[transport], asked, arenas[which], PATIENCE_S)
                assert (arenas[which] == expected(shared_owner.content, asked)).all()
        except Exception as error:
            failures.append(error)
        finally:
            reader.close()

    threads = [threading.Thread(target=read, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (runs((NUM_BYTES - 4, 0, 5)), "must lie within both"),
        (runs((0, NUM_BYTES, 1)), "must lie within both"),
        (runs((-1, 0, 1)), "must lie within both"),
        (runs((0, 0, -1)), "must lie within both"),
        (runs((1, 1, (1 << 63) - 1)), "must lie within both"),
        (runs((0, 8, 9), (50, 0, 9)), "overlap in the target"),
        (np.zeros((1, 3), np.int32), "give int64"),
    ],
)
def test_runs_that_reach_beyond_an_arena_or_overlap_are_refused(
    shared_owner, transport, reader, asked, message
) -> None:
    arena = np.zeros(NUM_BYTES, dtype=np.uint8)
    with pytest.raises(ValueError, match=message):
        reader.read(shared_owner.addresses[transport], asked, arena, PATIENCE_S)
    assert not arena.any()


def test_an_owner_that_died_is_lost_at_once(owner, transport, reader) -> None:
    owner.kill()
    before = time.monotonic()
    with pytest.raises(PeerLostError):
        reader.read(owner.addresses[transport], runs((0, 0, 9)), np.zeros(9, np.uint8), PATIENCE_S)
    assert time.monotonic() - before < PATIENCE_S / 2


def test_an_owner_that_dies_after_a_read_is_lost_by_the_next_one(owner, transport, reader) -> None:
    arena = np.zeros(NUM_BYTES, np.uint8)
    reader.read(owner.addresses[transport], runs((0, 0, NUM_BYTES)), arena, PATIENCE_S)
    owner.kill()
    with pytest.raises(PeerLostError):
        reader.read(owner.addresses[transport], runs((0, 0, 9)), arena, PATIENCE_S)
    assert (arena == owner.content).all()


def test_an_owner_that_is_killed_amid_reads_ends_none_but_itself(owner, transport, reader) -> None:
    arena = np.zeros(NUM_BYTES, np.uint8)
    reader.read(owner.addresses[transport], runs((0, 0, NUM_BYTES)), arena, PATIENCE_S)
    timer = threading.Timer(0.2, owner.kill)
    timer.start()
    with pytest.raises(PeerLostError):  # noqa: PT012
        while True:
            reader.read(owner.addresses[transport], runs((0, 0, NUM_BYTES)), arena, PATIENCE_S)
            assert (arena == owner.content).all()
    timer.join()


def test_an_export_that_was_closed_is_read_no_more(owner, transport, reader) -> None:
    arena = np.zeros(9, np.uint8)
    reader.read(owner.addresses[transport], runs((0, 0, 9)), arena, PATIENCE_S)
    owner.close_exports()
    for each in (reader, make_reader(transport)):
        with pytest.raises(PeerLostError):
            each.read(owner.addresses[transport], runs((0, 0, 9)), arena, PATIENCE_S)
    each.close()


def test_an_arena_that_is_smaller_than_its_address_says_is_another_one(shared_owner, transport, reader) -> None:
    address = shared_owner.claims(transport, NUM_BYTES + (1 << 20))
    arena = np.zeros(NUM_BYTES + (1 << 20), np.uint8)
    with pytest.raises(PeerLostError):
        reader.read(address, runs((NUM_BYTES, 0, 9)), arena, PATIENCE_S)
    assert not arena.any()
    reader.read(shared_owner.addresses[transport], runs((0, 0, 9)), arena, PATIENCE_S)


def test_an_address_of_nothing_is_lost(transport, reader) -> None:
    for location in (
        b"",
        b"\x93\x01",
        msgpack.packb((1, 2)),
        msgpack.packb(("tcp://127.0.0.1:1;x", bytes(16))),
        msgpack.packb(("x",)),
    ):
        address = ExportAddress(transport, this_node(), location, IDENTITY, 64)
        with pytest.raises(PeerLostError):
            reader.read(address, runs((0, 0, 9)), np.zeros(9, np.uint8), PATIENCE_S)


# ---- owners that stand still ----


@pytest.mark.parametrize(("name", "is_known"), [("shared_memory", False), ("cuda_ipc", True)])
def test_memory_of_an_owner_that_stands_still_is_read_all_the_same(name, is_known) -> None:
    """On a GPU once it is mapped: where it is, the owner must have said."""
    owner, reader = PeerOwner(NUM_BYTES, [name]), make_reader(name)
    arena = np.zeros(NUM_BYTES, np.uint8)
    if is_known:
        reader.read(owner.addresses[name], runs((0, 0, 9)), arena, PATIENCE_S)
    owner.stop()
    if is_known:
        other = make_reader(name)
        with pytest.raises(PeerLostError, match="did not answer in time"):
            other.read(owner.addresses[name], runs((0, 0, 9)), arena, SHORT_S)
        other.close()
    reader.read(owner.addresses[name], runs((0, 0, NUM_BYTES)), arena, SHORT_S)
    assert (arena == owner.content).all()
    reader.close()
    owner.kill()


@pytest.mark.parametrize("name", ["nixl", "mooncake", "tcp"])
def test_over_a_network_an_owner_that_stands_still_is_late_and_its_late_answers_go_nowhere(name, monkeypatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # NIXL would read a process beside it without its help
    owner, reader = PeerOwner(NUM_BYTES, [installed(name)]), make_reader(name)
    address, arena = owner.addresses[name], np.zeros(NUM_BYTES, np.uint8)
    reader.read(address, runs((0, 0, 9)), arena, PATIENCE_S)
    arena[:] = 0
    owner.stop()
    with pytest.raises(PeerLostError, match="did not answer in time"):
        reader.read(address, runs((0, 0, NUM_BYTES)), arena, SHORT_S)
    owner.go_on()
    reader.read(address, runs((5, 9, 100)), arena, PATIENCE_S)
    assert (arena[9:109] == owner.content[5:105]).all()
    arena[9:109] = 0
    if isinstance(reader, StagedReader):
        late = [piece.staging for piece in reader._late]
        eventually(lambda: (reader._take_back(), not reader._late)[1])
        assert all((staging[:NUM_BYTES] == owner.content).all() for staging in late), "it came after all"
    assert not arena.any()
    reader.close()
    owner.kill()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_owner_that_stands_still_holds_up_no_read_of_another_one(name, monkeypatch) -> None:
    """By the same reader, on two threads."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    still, living = (PeerOwner(NUM_BYTES, [installed(name)], seed=seed) for seed in (1, 2))
    reader, arenas = make_reader(name), np.zeros((2, NUM_BYTES), np.uint8)
    everything = runs((0, 0, NUM_BYTES))
    for owner in (still, living):
        reader.read(owner.addresses[name], runs((0, 0, 9)), arenas[0], PATIENCE_S)
    still.stop()
    late = threading.Thread(target=reader.read, args=(still.addresses[name], everything, arenas[0], PATIENCE_S))
    late.start()
    for _ in range(5):
        arenas[1] = 0
        reader.read(living.addresses[name], everything, arenas[1], PATIENCE_S)
        assert (arenas[1] == living.content).all()
    assert late.is_alive() or name in ("shared_memory", "cuda_ipc"), "a node's memory is read without its owner"
    still.go_on()
    late.join()
    assert (arenas[0] == still.content).all()
    reader.close()
    still.kill()
    living.kill()


# ---- devices of other nodes ----


def test_nixl_reads_a_device_as_it_reads_a_host() -> None:
    arena = np.zeros(64, np.uint8)
    reader = make_reader(installed("nixl"))
    on_device = content(NUM_BYTES, 1)
    export = nixl.NixlDeviceExport(on_device, IDENTITY, nixl.NO_GPU)
    assert export.address.memory == DEVICE
    reader.read(export.address, runs((7, 1, 40)), arena, PATIENCE_S)
    assert (arena[1:41] == on_device[7:47]).all()
    export.attach(None)  # by now no lease holds; what a reader gets meanwhile is of no use to it
    reader.forget(export.address)
    export.close()
    reader.close()


def test_a_gpu_that_nixl_cannot_register_leaves_the_host_to_be_read(caplog) -> None:
    installed("nixl")
    arena, gpu = HostArena(64, is_shared=False), host_sharing(HostGpu())
    gpu.gpu = 0  # which this machine has not
    memories = Memories(arena, content(64, 1), gpu)
    exports = open_exports(["nixl"], PeerAccess(), memories, IDENTITY, make_run_copy("reference", 1))
    assert [export.address.memory for export in exports] == [HOST]
    assert "goes on without nixl to export device caches: " in caplog.text
    exports[0].close()
    arena.close()


def test_engines_read_each_others_devices_on_one_node_or_by_what_leads_to_other_nodes() -> None:
    def address(transport: str, node: str, memory: int = DEVICE) -> bytes:
        return ExportAddress(transport, node, b"", IDENTITY, 1, memory).encode()

    near, far = address("cuda_ipc", "here"), address("nixl", "here")
    host, elsewhere = address("nixl", "here", HOST), address("cuda_ipc", "there")
    assert ways_to_devices([[near, far, host], [near, far]]) == ("here", "nixl")
    assert ways_to_devices([[near, far], [elsewhere, far]]) == ("nixl",)
    assert ways_to_devices([[near, host], [elsewhere, b"no address"]]) == ways_to_devices([[host]]) == ()
    assert ways_to_devices([]) == ()


# ---- libraries that write by themselves ----


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_owners_that_are_lost_use_up_no_memory_for_good(name, monkeypatch) -> None:
    monkeypatch.setattr("headwise.transfer.connectors.staged.MAX_STAGINGS", 2)
    reader, arena = make_reader(installed(name)), np.zeros(NUM_BYTES, np.uint8)
    living = PeerOwner(NUM_BYTES, [name])
    for seed in (1, 2):
        owner = PeerOwner(NUM_BYTES, [name], seed=seed)
        reader.read(owner.addresses[name], runs((0, 0, NUM_BYTES)), arena, PATIENCE_S)
        owner.kill()
        with pytest.raises(PeerLostError):
            reader.read(owner.addresses[name], runs((0, 0, NUM_BYTES)), arena, PATIENCE_S)
        reader.forget(owner.addresses[name])
        reader.read(living.addresses[name], runs((0, 0, NUM_BYTES)), arena, PATIENCE_S)
        assert (arena == living.content).all()
    reader.close()
    living.kill()


class Scripted:
    """A `Library` whose transfers are late, fail, or are done, as they are told to be."""

    max_runs = 10

    def __init__(self, ends_on_errors: bool) -> None:
        self.ends_on_errors, self.is_closed = ends_on_errors, False
        self.started: list[SimpleNamespace] = []
        self.registered: list[np.ndarray] = []
        self.register, self.close, self.forget = self.registered.append, self._close, lambda address: None

    def _close(self) -> None:
        self.is_closed = True

    def start(self, address, runs, staging) -> SimpleNamespace:
        transfer = SimpleNamespace(said=False, staging=staging, runs=runs)

        def is_done() -> bool:
            if isinstance(transfer.said, Exception):
                raise transfer.said
            return transfer.said

        transfer.is_done = is_done
        self.started.append(transfer)
        return transfer


@pytest.mark.parametrize("ends_on_errors", [True, False])
def test_memory_of_a_transfer_is_used_again_once_it_can_write_no_more(ends_on_errors) -> None:
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted(ends_on_errors))
        return made[-1]

    reader = StagedReader("nixl", make, make_run_copy("reference", 1))
    address, arena = ExportAddress("nixl", "", b"", IDENTITY, NUM_BYTES), np.zeros(64, np.uint8)

    def fail() -> None:
        with pytest.raises(PeerLostError):
            reader.read(address, runs((0, 0, 9)), arena, 0.0)

    for _ in range(MAX_STAGINGS + 3):
        fail()
    first = made[0].started
    assert len({id(transfer.staging) for transfer in first}) == len(first) == MAX_STAGINGS, "each has its own memory"
    first[3].said = True
    fail()
    assert first[-1].staging is first[3].staging
    for transfer in first:
        transfer.said = PeerLostError("gone")
    fail()
    assert made[0].is_closed != ends_on_errors, "where nothing else ends what failed, the library is closed"
    used = {id(transfer.staging) for transfer in first[:MAX_STAGINGS]}
    assert (id(made[-1].started[-1].staging) in used) == ends_on_errors
    assert not arena.any()


def test_memory_that_a_library_does_not_register_is_a_way_that_leads_nowhere() -> None:
    library = Scripted(ends_on_errors=True)

    def refuse(memory: np.ndarray) -> None:
        raise RuntimeError("no more of it")

    library.register = refuse
    reader = StagedReader("nixl", lambda: library, make_run_copy("reference", 1))
    address, arena = ExportAddress("nixl", "", b"", IDENTITY, NUM_BYTES), np.zeros(64, np.uint8)
    with pytest.raises(PeerLostError, match="nixl cannot register memory: no more of it"):
        reader.read(address, runs((0, 0, 9)), arena, 0.0)


# ---- shared memory ----


def location_of(address: ExportAddress) -> list:
    return msgpack.unpackb(address.location)


def test_a_process_that_got_the_number_of_another_one_is_refused() -> None:
    arena, reader = HostArena(1 << 16, is_shared=True), make_reader("shared_memory")
    address = SharedMemoryExport(arena, IDENTITY).address
    pid, fd, _ = location_of(address)
    forged = replace(address, location=msgpack.packb((pid, fd, "headwise-" + "0" * 32)))
    with pytest.raises(PeerLostError, match="is another one"):
        reader.read(forged, runs((0, 0, 9)), np.zeros(9, np.uint8), SHORT_S)
    elsewhere = replace(address, node="another/node")
    assert not reader.reaches(elsewhere)
    with pytest.raises(PeerLostError, match="node another/node"):
        reader.read(elsewhere, runs((0, 0, 9)), np.zeros(9, np.uint8), SHORT_S)
    reader.close()
    arena.close()


def test_an_arena_of_an_earlier_life_is_refused_when_a_later_one_has_its_descriptor() -> None:
    arena = HostArena(1 << 16, is_shared=True)
    address = SharedMemoryExport(arena, IDENTITY).address
    arena.close()
    later = HostArena(1 << 16, is_shared=True)
    same_descriptor = location_of(SharedMemoryExport(later, IDENTITY).address)[1] == location_of(address)[1]
    reader = make_reader("shared_memory")
    with pytest.raises(PeerLostError, match="is another one" if same_descriptor else ""):
        reader.read(address, runs((0, 0, 9)), np.zeros(9, np.uint8), SHORT_S)
    reader.close()
    later.close()


def test_what_is_mapped_can_neither_shrink_nor_be_written_to() -> None:
    arena, reader = HostArena(1 << 16, is_shared=True), make_reader("shared_memory")
    address = SharedMemoryExport(arena, IDENTITY).address
    assert arena.shared is not None
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.shared.fd, size)
    reader.read(address, runs((0, 0, 9)), np.zeros(9, np.uint8), SHORT_S)
    mapped = reader._arenas[address.location].array
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
    assert os.fstat(arena.shared.fd).st_mode & 0o077 == 0, "for this user alone"
    reader.close()
    arena.close()


@pytest.mark.parametrize("name", ["shared_memory", "cuda_ipc"])
def test_the_memory_of_an_owner_that_died_is_let_go_of_without_being_asked(name) -> None:
    owner, reader = PeerOwner(NUM_BYTES, [name]), make_reader(name)
    reader.read(owner.addresses[name], runs((0, 0, 9)), np.zeros(9, np.uint8), PATIENCE_S)
    assert len(reader._arenas) == 1
    owner.kill()
    eventually(lambda: not reader._arenas)
    reader.close()


def test_a_private_arena_has_no_export_and_the_worker_goes_on_with_what_there_is(caplog) -> None:
    arena = HostArena(1 << 16)
    copy = make_run_copy("reference", 1)
    exports = open_exports(["shared_memory", "tcp"], PeerAccess(), Memories(arena), IDENTITY, copy)
    assert [export.address.transport for export in exports] == ["tcp"]
    assert "goes on without shared_memory to export host caches: the host arena is private" in caplog.text
    for export in exports:
        export.close()
    arena.close()


# ---- TCP ----


@pytest.fixture
def export() -> Iterator[tcp.TcpExport]:
    arena = np.arange(1 << 16, dtype=np.uint32).view(np.uint8)
    export = tcp.TcpExport(arena, IDENTITY, "tcp://127.0.0.1:*", None, make_run_copy("reference", 1))
    yield export
    export.close()


def test_a_wrong_key_ends_the_connection_and_other_readers_go_on(export) -> None:
    endpoint, key = location_of(export.address)
    forged = replace(export.address, location=msgpack.packb((endpoint, bytes(len(key)))))
    arena, reader = np.zeros(64, np.uint8), make_reader("tcp")
    with pytest.raises(PeerLostError, match="has ended"):
        reader.read(forged, runs((0, 0, 9)), arena, PATIENCE_S)
    assert not arena.any()
    reader.read(export.address, runs((4, 0, 8)), arena, PATIENCE_S)
    assert arena[:8].view(np.uint32).tolist() == [1, 2]
    reader.close()


@pytest.mark.parametrize(
    "question",
    [
        b"",
        bytes(10),
        bytes(24 + 5),
        bytes(1 << 20),
        [b"", b"two frames"],
        [b"\x00" * 24, b"more", b"more"],
    ],
)
def test_whatever_else_is_sent_ends_that_connection_alone(export, question) -> None:
    endpoint, _ = location_of(export.address)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart(question if isinstance(question, list) else [question])
        reader, arena = make_reader("tcp"), np.zeros(64, np.uint8)
        reader.read(export.address, runs((4, 0, 8)), arena, PATIENCE_S)
        assert not socket.poll(0)
    reader.close()


@pytest.mark.parametrize("asked", [(1 << 18, 1), (0, (1 << 18) + 1), (-1, 2), (0, -1), (0, 2 << 20)])
def test_bytes_that_an_arena_does_not_have_are_not_sent(export, asked) -> None:
    endpoint, key = location_of(export.address)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        ended = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)
        socket.send(key + (1).to_bytes(8, "little") + np.array(asked, np.int64).tobytes())
        assert ended.poll(1000 * PATIENCE_S)
        assert not socket.poll(0)
        socket.disable_monitor()
        ended.close()


def test_a_reader_that_takes_nothing_is_dropped_and_others_go_on(export, caplog) -> None:
    endpoint, key = location_of(export.address)
    question = key + (1).to_bytes(8, "little") + np.array((0, 1 << 18), np.int64).tobytes()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.connect(endpoint)

        def is_dropped() -> bool:
            with suppress(zmq.Again):
                socket.send(question, zmq.NOBLOCK)
            return "does not read what it is sent: its connection is closed" in caplog.text

        eventually(is_dropped)
        reader, arena = make_reader("tcp"), np.zeros(64, np.uint8)
        reader.read(export.address, runs((4, 0, 8)), arena, PATIENCE_S)
        reader.close()


def test_a_secure_deployment_reads_with_its_keys_and_nobody_reads_without() -> None:
    secret = new_secret()
    keys = ClientKeys(public_key(secret), "ours")
    owner = PeerOwner(NUM_BYTES, ["tcp"], ServerKeys(secret, frozenset((client_key("ours"),))))
    arena, reader = np.zeros(NUM_BYTES, np.uint8), make_reader("tcp", keys)
    reader.read(owner.addresses["tcp"], runs((0, 0, NUM_BYTES)), arena, PATIENCE_S)
    assert (arena == owner.content).all()
    reader.close()
    arena[:] = 0
    for wrong in (None, ClientKeys(keys.server, "theirs"), ClientKeys(public_key(new_secret()), "ours")):
        reader = make_reader("tcp", wrong)
        with pytest.raises(PeerLostError):
            reader.read(owner.addresses["tcp"], runs((0, 0, 9)), arena, 1.0)
        reader.close()
    assert not arena.any()
    owner.kill()


def test_a_port_is_taken_of_those_that_are_given() -> None:
    arena, copy = np.zeros(64, np.uint8), make_run_copy("reference", 1)
    first = tcp.open_export(arena, IDENTITY, "127.0.0.1", (), None, copy)
    taken = int(location_of(first.address)[0].rpartition(":")[2])
    with pytest.raises(OSError, match=rf"none of the ports {taken}-{taken} is free: give more peer_ports"):
        tcp.open_export(arena, IDENTITY, "127.0.0.1", range(taken, taken + 1), None, copy)
    first.close()
    second = tcp.open_export(arena, IDENTITY, "127.0.0.1", range(taken, taken + 1), None, copy)
    assert location_of(second.address)[0] == f"tcp://127.0.0.1:{taken}"
    second.close()


@pytest.mark.parametrize("what", WHAT)
def test_questions_ask_for_all_and_none_for_too_much(what) -> None:
    asked = WHAT[what]
    parts = list(tcp.questions(asked))
    assert all(part[:, 2].sum() <= tcp.ANSWER_BYTES and len(part) <= tcp.MAX_RUNS for part in parts)
    content = np.random.default_rng(0).integers(1, 256, 9 << 20, dtype=np.uint8)
    arena, wanted = np.zeros((2, 9 << 20), dtype=np.uint8)
    copy = make_run_copy("reference", 1)
    for part in parts:
        copy(content, arena, part)
    copy(content, wanted, asked)
    assert (arena == wanted).all()


# ---- addresses and names ----


def test_an_address_survives_its_way_and_nothing_else_is_one() -> None:
    address = ExportAddress("tcp", "node", b"secret place", IDENTITY, 1 << 40)
    assert ExportAddress.decode(address.encode()) == address
    assert "secret" not in repr(address)
    parts = (2, "tcp", "node", b"", b"", 1, 0)
    assert ExportAddress.decode(msgpack.packb(parts)).arena_bytes == 1
    bad = [b"", b"x", msgpack.packb(parts[:-1]), msgpack.packb((1, *parts[1:])), msgpack.packb((*parts[:5], -1, 0))]
    bad += [msgpack.packb((*parts[:3], "", *parts[4:])), msgpack.packb((*parts[:6], 2))]
    bad += [address.encode() + b"x", bytes(5000)]
    for data in bad:
        with pytest.raises(PeerLostError, match="no address"):
            ExportAddress.decode(data)


def test_a_machine_that_does_not_tell_is_like_no_other(tmp_path) -> None:
    assert this_node() == this_node()
    assert this_node(tmp_path) != this_node()


def test_transports_are_named_and_the_best_comes_first() -> None:
    assert parse_transports("auto") == TRANSPORTS
    assert parse_transports("none") == ()
    assert parse_transports("tcp, shared_memory") == ("shared_memory", "tcp")
    with pytest.raises(ConfigError, match=r"peer_transports has 'rdma': choose auto, none, or some of cuda_ipc"):
        parse_transports("tcp,rdma")
    with pytest.raises(ConfigError, match="peer_transports cuda_ipc: it reads what is on GPUs alone"):
        parse_transports("cuda_ipc")
    with pytest.raises(ConfigError, match="peer_transports has"):
        parse_transports("tcp,rdma")


def test_what_needs_rdma_or_is_not_encrypted_is_chosen_only_where_it_was_asked_for(caplog) -> None:
    caplog.set_level("INFO")
    assert choose_transports("auto", False, lambda: False) == ["shared_memory", "tcp"]
    assert "read by shared_memory,tcp (peer_transports auto; no cuda_ipc: no GPU; no nixl: no RDMA dev" in caplog.text
    assert choose_transports("auto", True, lambda: True) == ["shared_memory", "tcp"]
    assert "no nixl: not encrypted" in caplog.text
    assert choose_transports("none", False) == []
    assert choose_transports("auto", True, lambda: False, shares_device=True) == ["cuda_ipc", "shared_memory", "tcp"]
    with pytest.raises(ConfigError, match="peer_transports cuda_ipc: for device cuda, and this worker's is not"):
        choose_transports("cuda_ipc,tcp", False)


@pytest.mark.parametrize(("name", "remedy"), [("nixl", "--no-deps nixl-cu12"), ("mooncake", r"headwise\[mooncake\]")])
def test_a_package_that_is_not_there_is_named_with_its_remedy(name, remedy, monkeypatch, caplog) -> None:
    for package in ("nixl_cu12", "nixl_cu12._bindings", "nixl_cu13", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"peer_transports {name}: .*; run `pip install .*{remedy}"):
        choose_transports(f"tcp,{name}", False)
    caplog.set_level("INFO")
    assert choose_transports("auto", False, lambda: True) == ["shared_memory", "tcp"]
    assert f"no {name}: not installed" in caplog.text


def test_an_encrypted_deployment_has_no_plain_transports_unless_told_to() -> None:
    with pytest.raises(ConfigError, match="peer_transports nixl: not encrypted and open to whoever"):
        check_plain("nixl,tcp", is_encrypted=True, may_be_plain=False)
    check_plain("nixl,tcp", is_encrypted=True, may_be_plain=True)
    check_plain("nixl,mooncake", is_encrypted=False, may_be_plain=False)
    check_plain("auto", is_encrypted=True, may_be_plain=False)


def test_rdma_is_where_the_system_lists_a_device(tmp_path) -> None:
    assert not has_rdma(tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert has_rdma(tmp_path)


def test_runs_that_touch_do_not_overlap() -> None:
    check_runs(runs((0, 0, 5), (0, 5, 5), (0, 10, 0)), 10, 10)
