"""The contract of the connectors: one worker reads runs of bytes of another worker's host arena.

    owner     Export  makes the rank's host arena readable, and has an address to hand on
    receiver  Reader  copies runs of bytes from an address into its own host arena

Whether the bytes are still those of the blocks that were asked for, no connector knows: the owner's engine holds blocks
under a lease, and the receiver's engine uses what came only once the owner has said that the lease still held when the
copy was over. So a reader may read without the owner's help (shared memory, RDMA), and late bytes do no harm: they go
where the receiver still holds blocks for them, or nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError

Runs = NDArray[np.int64]
"""``int64 [n, 3]``: (first byte in the owner's arena, first byte in ours, bytes)."""


class PeerLostError(HeadwiseError):
    """The owner cannot be read any more, or not in time: what came of the runs is undefined."""


@dataclass(frozen=True)
class ExportAddress:
    """Where a rank's host arena is read.

    transport:   name of the connector
    node:        of the machine (boot id): what is shared there is reached on it alone
    location:    what the connector needs to find it, opaque to all others
    identity:    what the arena's blocks are: model, layout, precision; not the TP rank and size
    arena_bytes: of the arena
    """

    transport: str
    node: str
    location: bytes
    identity: bytes
    arena_bytes: int


class Export(Protocol):
    """The owner's side. One rank may have several, for readers that are near and far."""

    @property
    def address(self) -> ExportAddress: ...

    def close(self) -> None:
        """No more is read from here. Readers find out. The last call."""


class Reader(Protocol):
    """The receiver's side of one transport, for any number of owners. Used by one thread, that of a stream."""

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
