"""Arenas of processes of the same machine and user, read by mapping them.

The owner's arena is a file in memory, that a reader opens as ``/proc/PID/fd/FD``: the kernel lets processes of the same
user do that alone. Its name is random: a process that got the number of a dead one has no file of that name. What is
mapped stays readable when its owner stops, or dies in the middle of a copy: it cannot shrink.

A mapping also keeps the memory of an owner that died, so a thread waits for that, and lets go of it.

Sources: memfd_create(2), proc(5), ptrace(2) of the Linux man pages.
"""

from __future__ import annotations

import ctypes
import os
import threading

import msgpack
import numpy as np
from numpy.typing import NDArray

from headwise.kernels.block_copy import RunCopy
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Runs, check_runs, this_node, unpack
from headwise.transfer.connectors.endings import Endings
from headwise.transfer.connectors.names import SHARED_MEMORY
from headwise.transfer.host_memory import POPULATE_BYTES, HostArena, MappedArena, SharedArena, map_shared

_MADV_POPULATE_READ = 22


class SharedMemoryExport:
    """`Export` of an arena that is shared. It is readable until the arena is closed.

    Raises:
        ValueError: the arena is not shared.
    """

    def __init__(self, arena: HostArena, identity: bytes) -> None:
        shared = arena.shared
        if shared is None:
            raise ValueError("the host arena is private memory: make it with is_shared")
        location = msgpack.packb((shared.pid, shared.fd, shared.name))
        self.address = ExportAddress(SHARED_MEMORY, this_node(), location, identity, arena.array.size)

    def close(self) -> None:
        """See `Export.close`: the arena's end is this one's."""


def _decoded(location: bytes) -> SharedArena:
    values = unpack(location, [int, int, str])
    if values is None or min(values[:2]) < 0:
        raise PeerLostError("the address has no process and no file to map")
    return SharedArena(*values)


class SharedMemoryReader:
    """`Reader` of owners on this node. copy: without the GIL, beside the forward pass"""

    def __init__(self, copy: RunCopy) -> None:
        self._copy = copy
        self._node = this_node()
        self._libc = ctypes.CDLL(None)
        self._arenas: dict[bytes, MappedArena] = {}  # by location
        self._deaths = Endings(lambda location: self._arenas.pop(location, None))

    def reaches(self, address: ExportAddress) -> bool:
        """See `Reader.reaches`."""
        return address.node == self._node

    def read(self, address: ExportAddress, runs: Runs, arena: NDArray[np.uint8], timeout_s: float) -> None:
        """See `Reader.read`. Copies at the speed of memory, and does not look at the time."""
        check_runs(runs, address.arena_bytes, arena.size)
        mapped = self._arenas.get(address.location)
        if mapped is None:
            mapped = self._map(address)
        elif not mapped.is_shared:
            raise PeerLostError("its host cache is no more")
        self._copy(mapped.array[: address.arena_bytes], arena, runs)

    def _map(self, address: ExportAddress) -> MappedArena:
        location = _decoded(address.location)
        if not self.reaches(address):
            raise PeerLostError(f"its memory is on node {address.node}, and this is {self._node}")
        try:
            # While it is watched, the number is given to no other process that we would not notice: the name is
            # looked at later.
            self._deaths.watch(address.location, os.pidfd_open(location.pid))
            mapped = map_shared(location, address.arena_bytes)
        except OSError as error:
            self._deaths.forget(address.location)
            raise PeerLostError(f"process {location.pid} shares no memory any more: {error.strerror}") from None
        self._arenas[address.location] = mapped
        threading.Thread(
            target=self._make_ready, args=(mapped, address.location), name="headwise-peer-map", daemon=True
        ).start()
        return mapped

    def _make_ready(self, mapped: MappedArena, location: bytes) -> None:
        """Enter its pages into our tables, while it is mapped: a copy that meets new ones is a third slower."""
        start, size = int(mapped.array.ctypes.data), mapped.array.size
        for at in range(0, size, POPULATE_BYTES):
            if self._arenas.get(location) is not mapped:
                return
            length = ctypes.c_size_t(min(POPULATE_BYTES, size - at))
            if self._libc.madvise(ctypes.c_void_p(start + at), length, _MADV_POPULATE_READ):
                return  # before Linux 5.14: pages come as they are read

    def forget(self, address: ExportAddress) -> None:
        """See `Reader.forget`."""
        self._arenas.pop(address.location, None)
        self._deaths.forget(address.location)

    def close(self) -> None:
        self._deaths.close()
        self._arenas.clear()
