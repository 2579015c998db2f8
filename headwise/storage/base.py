"""What engines and the attention store say to each other. Statements are absolute: each is true on its own.

An engine (a *node*) numbers its flushes from 0 within an *epoch*, which is new whenever its cache starts empty. The
node alone writes what is true of it; the store only repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TIERS = ("device", "host", "storage")
"""Where a block can be, fastest first."""

HASH_BYTES = 16


@dataclass(frozen=True)
class Flush:
    """ "On this path, from block ``start_write_block_idx`` on, these blocks are (not) resident on this tier." """

    node: str
    epoch: int
    seq: int
    tier: str
    start_write_block_idx: int
    block_hashes: tuple[bytes, ...]
    resident: bool


@dataclass(frozen=True)
class Snapshot:
    """Everything that is resident on a node after its flush ``seq`` (-1: before the first), by tier."""

    node: str
    epoch: int
    seq: int
    tiers: Mapping[str, frozenset[bytes]]


@dataclass(frozen=True)
class Heartbeat:
    """The node lives, its last flush was ``seq`` (-1: none yet), and this is the digest of what it then held.

    digests: per tier the exclusive or of the block hashes, read as big-endian integers; tiers at 0 are left out
    """

    node: str
    epoch: int
    seq: int
    digests: Mapping[str, int]


@dataclass(frozen=True)
class SnapshotRequest:
    """From the store: "I missed something of yours; send me a snapshot." """

    node: str


Statement = Flush | Snapshot | Heartbeat
Message = Flush | Snapshot | Heartbeat | SnapshotRequest


def digest_of(block_hashes: frozenset[bytes] | set[bytes]) -> int:
    """The digest of a set of block hashes, independent of order."""
    digest = 0
    for block_hash in block_hashes:
        digest ^= int.from_bytes(block_hash, "big")
    return digest
