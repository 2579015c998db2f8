"""The contract of the connectors: one worker reads runs of bytes of an arena of another worker.

    owner     Export  makes the rank's arena, on host or device, readable, and has an address to hand on
    receiver  Reader  copies runs of bytes from an address into its own host arena

Whether the bytes are still those of the blocks that were asked for, no connector knows: the owner's engine holds blocks
under a lease, and the receiver's engine uses what came only once the owner has said that the lease still held when the
copy was over. So a reader may read without the owner's help (shared memory, RDMA), and late bytes do no harm: they go
where the receiver still holds blocks for them, or nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgpack
import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.memories import DEVICE, HOST
from headwise.errors import HeadwiseError
from headwise.kernels.block_copy import bad_run, outside
from headwise.transfer.connectors.names import OF_FAR_DEVICES

Runs = NDArray[np.int64]
"""``int64 [n, 3]``: (first byte in the owner's arena, first byte in ours, bytes)."""

_VERSION = 2
MAX_ADDRESS_BYTES = 4096


class PeerLostError(HeadwiseError):
    """The owner cannot be read any more, or not in time: what came of the runs is undefined."""


@dataclass(frozen=True)
class ExportAddress:
    """Where an arena of a rank is read.

    transport:   name of the connector
    node:        `this_node` of the owner: what is shared there is reached there alone
    location:    what the connector needs to find it, opaque to all others. May hold a key: not for logs
    identity:    what the arena's blocks are: model, layout, precision; not the TP rank and size
    arena_bytes: of the arena
    memory:      `HOST` or `DEVICE`, whose arena it is
    """

    transport: str
    node: str
    location: bytes = field(repr=False)
    identity: bytes
    arena_bytes: int
    memory: int = HOST

    def encode(self) -> bytes:
        return bytes(msgpack.packb((_VERSION, *astuple(self))))

    @classmethod
    def decode(cls, data: bytes) -> ExportAddress:
        """Raises `PeerLostError` for what is no address of this version."""
        values = unpack(data, [int, str, str, bytes, bytes, int, int])
        if values is None or values[0] != _VERSION or values[5] < 0 or values[6] not in (HOST, DEVICE):
            raise PeerLostError(f"{len(data)} bytes are no address of an arena, as of version {_VERSION}")
        return cls(*values[1:])


def ways_to_devices(exports: Sequence[Sequence[bytes]]) -> tuple[str, ...]:
    """How all ranks' devices are read, given the encoded addresses of each rank: on that node, or by these transports.

    Engines that have one in common read each other's.
    """
    ways = [_ways_to_device(of_rank) for of_rank in exports]
    return tuple(sorted(set.intersection(*ways))) if ways else ()


def _ways_to_device(of_rank: Sequence[bytes]) -> set[str]:
    ways = set()
    for encoded in of_rank:
        try:
            address = ExportAddress.decode(encoded)
        except PeerLostError:
            continue
        if address.memory == DEVICE:
            ways.add(address.transport if address.transport in OF_FAR_DEVICES else address.node)
    return ways


class Export(Protocol):
    """The owner's side. One rank may have several, for both memories, and readers that are near and far."""

    @property
    def address(self) -> ExportAddress: ...

    def close(self) -> None:
        """No more is read from here. Readers find out. The last call."""


@runtime_checkable
class DeviceExport(Export, Protocol):
    """Of a device's arena, which is freed while the worker sleeps."""

    def attach(self, arena: Any | None) -> None:
        """Let this arena be read from now on, if that can be; None: what there was is about to be freed."""


class Reader(Protocol):
    """The receiver's side of one transport, for any number of owners. Several threads use it at a time, each for
    another owner."""

    def reaches(self, address: ExportAddress) -> bool:
        """Whether this transport leads there: it may still turn out that nobody is there."""

    def read(self, address: ExportAddress, runs: Runs, arena: NDArray[np.uint8], timeout_s: float) -> None:
        """Copy ``runs`` from the owner's arena into ``arena``; return when all bytes are there.

        When it raises, nothing writes to ``arena`` any more, either.

        Raises:
            PeerLostError: the owner is gone, does not answer within ``timeout_s``, or is not what the address says.
            ValueError: runs that reach beyond an arena, or overlap in ours.
        """

    def forget(self, address: ExportAddress) -> None:
        """The owner is not read any more: let go of what is kept open for it. Unknown ones are ignored."""

    def close(self) -> None: ...


def unpack(data: bytes, types: list[type]) -> list[Any] | None:
    """The msgpack list of values of just these types that ``data`` is; None if it is anything else."""
    if len(data) > MAX_ADDRESS_BYTES:
        return None
    try:
        values = msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError):
        return None
    return values if type(values) is list and [type(value) for value in values] == types else None


def check_runs(runs: Runs, source_bytes: int, target_bytes: int) -> None:
    """Raises ValueError unless runs lie within both arenas and do not overlap in the target."""
    if runs.ndim != 2 or runs.shape[1] != 3 or runs.dtype != np.int64:
        raise ValueError(f"runs are {runs.dtype} {list(runs.shape)}: give int64 [n, 3]")
    wrong = outside(runs, source_bytes, target_bytes)
    if wrong is not None:
        raise bad_run(runs, wrong, source_bytes, target_bytes)
    ordered = runs[np.argsort(runs[:, 1], kind="stable")]
    over = np.flatnonzero(ordered[:-1, 1] + ordered[:-1, 2] > ordered[1:, 1])
    if len(over):
        first, second = ordered[over[0], 1:].tolist(), ordered[over[0] + 1, 1:].tolist()
        raise ValueError(f"runs overlap in the target: {first} and {second} (first byte, bytes)")


def this_node(root: Path = Path("/")) -> str:
    """The same for processes that can share memory by `/proc`: one boot of one machine, and one PID namespace.

    Unlike every other where the system does not tell.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(root / 'proc/self/ns/pid')}"
    except OSError:
        return f"unknown/{os.getpid()}"
