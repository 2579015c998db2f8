"""A GPU's memory, read by mapping it: what its owner says, and when it is mapped no more. On an emulated GPU."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from support.gpu.host_ipc import OFFSET, HostGpu, host_sharing
from support.waiting import PATIENCE_S, eventually

from headwise.cache_controller.memories import DEVICE
from headwise.transfer.connectors import door
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, this_node
from headwise.transfer.connectors.cuda_ipc import CudaIpcExport, CudaIpcReader
from headwise.transfer.connectors.door import Door, knock

NUM_BYTES = 1 << 16
ALL = np.array([[0, 0, NUM_BYTES]], dtype=np.int64)


@pytest.fixture
def gpu() -> HostGpu:
    return HostGpu(may_open_own=True)


@pytest.fixture
def export(gpu: HostGpu) -> Iterator[CudaIpcExport]:
    arena = gpu.empty(NUM_BYTES)
    arena[:] = 7
    export = CudaIpcExport(arena, b"id", host_sharing(gpu))
    yield export
    export.close()


@pytest.fixture
def reader(gpu: HostGpu) -> Iterator[CudaIpcReader]:
    reader = CudaIpcReader(host_sharing(gpu))
    yield reader
    reader.close()


def read(reader: CudaIpcReader, address: ExportAddress) -> np.ndarray:
    arena = np.zeros(NUM_BYTES, dtype=np.uint8)
    reader.read(address, ALL, arena, PATIENCE_S)
    return arena


def test_an_address_tells_no_handle_and_leads_to_the_arena_within_its_allocation(gpu, export, reader) -> None:
    address = ExportAddress.decode(export.address.encode())
    assert (address.memory, address.node, address.arena_bytes) == (DEVICE, this_node(), NUM_BYTES)
    assert gpu.ipcGetMemHandle(next(iter(gpu._allocations)))[:48] not in address.encode()
    assert (read(reader, address) == 7).all(), f"and not the {OFFSET} bytes before it"
    read(reader, address)
    assert len(gpu.opened) == 1, "mapped once"


def test_readers_have_let_go_when_an_arena_is_freed_and_find_the_next_one_at_the_same_address(
    gpu, export, reader
) -> None:
    others = [CudaIpcReader(host_sharing(gpu)) for _ in range(2)]
    for each in (reader, *others):
        read(each, export.address)
    assert len(gpu.opened) == 3
    export.attach(None)
    assert not gpu.opened
    with pytest.raises(PeerLostError, match="it shares nothing now"):
        read(reader, export.address)
    again = gpu.empty(NUM_BYTES)
    again[:] = 9
    export.attach(again)
    assert (read(reader, export.address) == 9).all()
    reader.forget(export.address)
    assert not gpu.opened
    for each in others:
        each.close()


def test_an_owner_does_not_wait_for_ever_for_readers_that_keep_its_memory(gpu, export, monkeypatch, caplog) -> None:
    monkeypatch.setattr("headwise.transfer.connectors.cuda_ipc.LET_GO_S", 0.1)
    with socket.socket(fileno=knock(msgpack.unpackb(export.address.location)[0], PATIENCE_S)[0]):
        export.attach(None)
        assert "some engine has this worker's device memory mapped still" in caplog.text


@pytest.mark.parametrize(
    "offer",
    [
        b"\xc1",
        msgpack.packb((bytes(64), 0)),
        msgpack.packb((bytes(63), 0, NUM_BYTES)),
        msgpack.packb((bytes(65), 0, NUM_BYTES)),
        msgpack.packb((bytes(64), -1, NUM_BYTES)),
        msgpack.packb((bytes(64), 1 << 48, NUM_BYTES)),
        msgpack.packb((bytes(64), 0, NUM_BYTES - 1)),
        bytes(4097),
    ],
)
def test_what_is_no_offer_of_memory_does_not_reach_the_driver(gpu, reader, offer, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "ipcOpenMemHandle", lambda handle: pytest.fail("it was asked"))
    forged = Door()
    forged.open(offer)
    address = ExportAddress("cuda_ipc", this_node(), msgpack.packb((forged.name,)), b"id", NUM_BYTES, DEVICE)
    with pytest.raises(PeerLostError):
        read(reader, address)
    eventually(lambda: not forged._readers)  # it was let go of
    forged.close()


def test_memory_that_the_driver_does_not_map_is_lost(gpu, export, reader) -> None:
    own = CudaIpcReader(host_sharing(HostGpu()))
    with pytest.raises(PeerLostError, match="the driver does not map its GPU's memory here: cudaErrorDeviceUninit"):
        read(own, export.address)
    own.close()
    os.close(next(iter(gpu._allocations.values()))[0])  # freed, without a word
    with pytest.raises(PeerLostError, match="the driver does not map its GPU's memory here: cudaErrorInvalidValue"):
        read(reader, export.address)


def test_neither_side_deals_with_another_user(export, reader, monkeypatch) -> None:
    name = msgpack.unpackb(export.address.location)[0]
    monkeypatch.setattr(door.os, "geteuid", lambda: 1 << 30)
    with pytest.raises(PeerLostError, match="another user's"):
        read(reader, export.address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(b"\0" + name.encode())
        assert stranger.recv(4096) == b""


def test_there_is_a_most_of_readers_and_a_place_is_free_again_when_one_has_gone(
    export, reader, gpu, monkeypatch
) -> None:
    monkeypatch.setattr(door, "MAX_READERS", 1)
    read(reader, export.address)
    late = CudaIpcReader(host_sharing(gpu))
    with pytest.raises(PeerLostError, match="shares nothing now"):
        read(late, export.address)
    reader.forget(export.address)
    eventually(lambda: not export._door._readers)
    assert (read(late, export.address) == 7).all()
    late.close()


def test_memory_that_cannot_be_shared_has_no_export_and_one_that_comes_later_is_not_read(
    gpu, export, reader, caplog
) -> None:
    export.attach(None)
    export.attach(HostGpu().empty(NUM_BYTES))
    assert "other engines cannot read this worker's device: the driver knows no allocation" in caplog.text
    with pytest.raises(PeerLostError, match="it shares nothing now"):
        read(reader, export.address)
    with pytest.raises(OSError, match="the driver knows no allocation"):
        CudaIpcExport(HostGpu().empty(64), b"id", host_sharing(gpu))


def test_whoever_comes_while_no_descriptor_is_left_is_let_in_once_there_is_one(monkeypatch, caplog) -> None:
    monkeypatch.setattr(door, "PAUSE_S", 0.01)
    own = Door()
    own.open(b"an offer")
    listener, refusals = own._listener, iter(range(3))

    class Exhausted:
        def accept(self) -> object:
            if next(refusals, None) is not None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return listener.accept()

        fileno, close = listener.fileno, listener.close

    own._listener = Exhausted()
    connection, offer = knock(own.name, PATIENCE_S)
    os.close(connection)
    assert offer == b"an offer"
    assert caplog.text.count("Too many open files") == 3
    own.close()


def test_a_door_whose_thread_has_ended_is_closed_all_the_same(caplog) -> None:
    own = Door()
    own._readers = {1 << 30: None}  # what no poll accepts
    with suppress(PeerLostError):
        os.close(knock(own.name, PATIENCE_S)[0])
    own._thread.join(PATIENCE_S)
    assert "no peer can come" in caplog.text
    own.close()
