"""Arenas on GPUs of the same node, read by mapping them (CUDA IPC): into the reader's pinned host arena.

    owner's device arena  ==the reader's GPU: over NVLink or PCIe, then PCIe==>  reader's host arena

The owner does nothing for it but to say once, over a socket that only processes of its user get an answer from, which
memory that is (`Door`). The socket stays connected: a reader unmaps the memory when its owner hangs up, which CUDA asks
for before that is freed (to sleep, at the end), and when its owner dies, whose memory the driver keeps until then.

What is read is no longer what was asked for once the owner's engine has given a block to somebody else, or is no more:
leases tell, as with every connector.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.memories import DEVICE
from headwise.errors import first_line
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Runs, check_runs, this_node, unpack
from headwise.transfer.connectors.door import Door, has_hung_up, knock
from headwise.transfer.connectors.endings import Endings
from headwise.transfer.connectors.names import CUDA_IPC

log = logging.getLogger(__name__)

HANDLE_BYTES = 64
"""Of a ``cudaIpcMemHandle_t``."""
LET_GO_S = 1.0
"""Longest that an owner waits for readers to unmap what it is about to free."""
ANSWER_S = 3.0
"""Longest that a reader waits for an owner to say where its memory is."""


@dataclass(frozen=True)
class SharedPart:
    """Where a process finds an array of another one.

    handle: of the allocation that it lies in. Not for logs
    offset: of its first byte there
    """

    handle: bytes
    offset: int


class DeviceSharing(Protocol):
    """What a device does for processes that read each other's memory. What its driver refuses, it raises.

    gpu: its number in this process, for libraries that read its memory; negative: it is the host's (an emulated one)
    """

    gpu: int

    def share(self, arena: Any) -> SharedPart:
        """How other processes find this array of the device."""

    def open(self, handle: bytes) -> int:
        """Map another process' allocation; its address here."""

    def close(self, address: int) -> None:
        """Unmap it. Called by any thread."""

    def read(self, address: int, runs: Runs, arena: NDArray[np.uint8]) -> None:
        """Copy ``runs`` from there to the host. When it returns, or raises, nothing is written any more."""


class CudaIpcExport:
    """`DeviceExport`. The arena may go, and another one of the same size come in its place, at the same address.

    Raises what the driver does: of memory that cannot be shared, on a device or in a container that does not.
    """

    def __init__(self, arena: Any, identity: bytes, sharing: DeviceSharing) -> None:
        self._sharing = sharing
        offer = self._offer(arena)
        self._door = Door()
        self._door.open(offer)
        self.address = ExportAddress(
            CUDA_IPC, this_node(), msgpack.packb((self._door.name,)), identity, int(arena.size), DEVICE
        )

    def _offer(self, arena: Any) -> bytes:
        part = self._sharing.share(arena)
        return bytes(msgpack.packb((part.handle, part.offset, int(arena.size))))

    def attach(self, arena: Any | None) -> None:
        """See `DeviceExport.attach`."""
        if arena is not None:
            try:
                self._door.open(self._offer(arena))
            except Exception as error:  # CuPy's own kind: readers find nothing, and take what is on the host
                log.warning("other engines cannot read this worker's device: %s", first_line(error))
        elif not self._door.shut(LET_GO_S):
            log.warning("some engine has this worker's device memory mapped still: the driver frees it after that")

    def close(self) -> None:
        """See `Export.close`."""
        self.attach(None)
        self._door.close()


class CudaIpcReader:
    """`Reader` of owners on this node."""

    def __init__(self, sharing: DeviceSharing) -> None:
        self._sharing = sharing
        self._node = this_node()
        self._arenas: dict[bytes, _Mapped] = {}  # by location
        self._endings = Endings(self._let_go)

    def reaches(self, address: ExportAddress) -> bool:
        """See `Reader.reaches`."""
        return address.node == self._node

    def read(self, address: ExportAddress, runs: Runs, arena: NDArray[np.uint8], timeout_s: float) -> None:
        """See `Reader.read`. Copies at the speed of the links, and does not look at the time."""
        check_runs(runs, address.arena_bytes, arena.size)
        mapped = self._arenas.get(address.location) or self._map(address, min(timeout_s, ANSWER_S))
        mapped.read(runs, arena)

    def _map(self, address: ExportAddress, timeout_s: float) -> _Mapped:
        if not self.reaches(address):
            raise PeerLostError(f"its GPU is on node {address.node}, and this is {self._node}")
        names = unpack(address.location, [str])
        if names is None:
            raise PeerLostError("the address has no socket to connect to")
        connection, offer = knock(names[0], timeout_s)
        self._endings.watch(address.location, connection)
        try:
            mapped = _open(self._sharing, connection, offer, address.arena_bytes)
        except PeerLostError:
            self._endings.forget(address.location)
            raise
        self._arenas[address.location] = mapped
        return mapped

    def _let_go(self, location: bytes) -> None:
        mapped = self._arenas.pop(location, None)
        if mapped is not None:
            mapped.close()

    def forget(self, address: ExportAddress) -> None:
        """See `Reader.forget`."""
        self._let_go(address.location)
        self._endings.forget(address.location)

    def close(self) -> None:
        for location in list(self._arenas):
            self._let_go(location)
        self._endings.close()


def _open(sharing: DeviceSharing, connection: int, offer: bytes, arena_bytes: int) -> _Mapped:
    """Map what an owner offers. Nothing that it says reaches the driver before it was looked at."""
    values = unpack(offer, [bytes, int, int])
    if values is None or len(values[0]) != HANDLE_BYTES or not 0 <= values[1] < 1 << 48:
        raise PeerLostError("it offers what is no memory of a device")
    handle, offset, size = values
    if size != arena_bytes:
        raise PeerLostError(f"it shares {size} bytes, not {arena_bytes}")
    try:
        base = sharing.open(handle)
    except Exception as error:  # CuPy's own kind: no way between these GPUs, an allocation that is gone
        raise PeerLostError(f"the driver does not map its GPU's memory here: {first_line(error)}") from None
    return _Mapped(sharing, connection, base, offset)


class _Mapped:
    """Another process' arena. The connection is open for as long as this is."""

    def __init__(self, sharing: DeviceSharing, connection: int, base: int, offset: int) -> None:
        self._sharing, self._connection = sharing, connection
        self._base: int | None = base
        self._offset = offset
        self._lock = threading.Lock()  # nothing is unmapped while it is read

    def read(self, runs: Runs, arena: NDArray[np.uint8]) -> None:
        with self._lock:
            if self._base is None or has_hung_up(self._connection):
                raise PeerLostError("its device cache is no more")
            try:
                self._sharing.read(self._base + self._offset, runs, arena)
            except Exception as error:  # CuPy's own kind
                raise PeerLostError(f"the copy failed: {first_line(error)}") from None

    def close(self) -> None:
        with self._lock:
            if self._base is None:
                return
            base, self._base = self._base, None
            try:
                self._sharing.close(base)
            except Exception as error:  # CuPy's own kind: the driver closes it with this process, then
                log.warning("another engine's device memory is not unmapped: %s", first_line(error))
