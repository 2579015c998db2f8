"""What engines, the attention store and the scheduler say to each other.

Messages are absolute statements: each is true without the others. An engine (a *node*) numbers its flushes from 0
within an *epoch*. It starts a new epoch whenever its cache starts empty. Only the node itself says what it holds.

A *run* of block hashes is one ``bytes`` of joined hashes of `HASH_BYTES` each: a run of 157 hashes is copied, compared
and cut as one object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TIERS = ("device", "host", "storage")
"""Where a block can be, fastest first."""

HASH_BYTES = 16

_HASH_BITS = 8 * HASH_BYTES
_ROW_BYTES = 64 * HASH_BYTES


@dataclass(frozen=True)
class Flush:
    """ "On this path, from block ``start_write_block_idx`` on, these blocks are (not) resident on this tier."

    block_hashes: a run of hashes
    resumable:    per block 1 if a request can continue right behind it with what this tier and faster tiers hold,
                  else 0; empty: 1 for all. For blocks that are no longer resident, the flag they had before.
    """

    node: str
    epoch: int
    seq: int
    tier: str
    start_write_block_idx: int
    block_hashes: bytes
    resident: bool
    resumable: bytes = b""


@dataclass(frozen=True)
class Snapshot:
    """Everything that is resident on a node after its flush ``seq`` (-1: before the first).

    tiers: by tier, the hashes as one run and per block whether it is resumable, both as in `Flush`
    """

    node: str
    epoch: int
    seq: int
    tiers: Mapping[str, tuple[bytes, bytes]]


@dataclass(frozen=True)
class Heartbeat:
    """The node lives, its last flush was ``seq`` (-1: none yet), and it then held blocks with these digests.

    digests: per tier in the order of `TIERS`, `digest_of` the resident blocks; then the same of the resumable ones
    volume:  names the node's storage. Nodes with the same volume share what is stored; empty: it is not shared
    """

    node: str
    epoch: int
    seq: int
    digests: tuple[int, ...]
    volume: str = ""


@dataclass(frozen=True)
class Gone:
    """From the scheduler: all that the node said in this and earlier epochs is void."""

    node: str
    epoch: int


@dataclass(frozen=True)
class Farewell:
    """From a node that ends on purpose: it holds nothing any more, and says nothing more in this epoch. What it put
    into a storage that other nodes share stays there. Answered by `Outdated`.
    """

    node: str
    epoch: int


@dataclass(frozen=True)
class Emptied:
    """From a node: its storage was emptied. So what nodes that left had put there is gone. The others speak for
    themselves.
    """

    node: str
    epoch: int


@dataclass(frozen=True)
class SnapshotRequest:
    """From the store: "I missed something of yours; send me a snapshot." """

    node: str


@dataclass(frozen=True)
class Accepted:
    """From the store: the node's messages of this epoch count from now on."""

    node: str
    epoch: int


@dataclass(frozen=True)
class Outdated:
    """From the store: the node's messages are ignored, because its epoch is too low.

    epoch:       the node must take a higher one
    is_replaced: True: another process with this epoch has replaced the node; False: the node was said to be gone
    """

    node: str
    epoch: int
    is_replaced: bool


@dataclass(frozen=True)
class Query:
    """From the scheduler: who holds how much of this path?

    key:          the asker's number of the query, repeated in the answer
    block_hashes: a run of hashes, from the path's first block on
    """

    key: int
    block_hashes: bytes


@dataclass(frozen=True)
class Matches:
    """depths: by node, the blocks that (device, host, storage) could serve: see `PrefixIndex.match`."""

    key: int
    depths: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class GetIndexStats:
    key: int


@dataclass(frozen=True)
class IndexStats:
    key: int
    stats: dict[str, Any]


@dataclass(frozen=True)
class Rejected:
    """From the store, to the sender of a message that it did not accept: the reason."""

    reason: str


NodeMessage = Flush | Snapshot | Heartbeat
Message = (
    NodeMessage
    | Gone
    | Farewell
    | Emptied
    | SnapshotRequest
    | Accepted
    | Outdated
    | Query
    | Matches
    | GetIndexStats
    | IndexStats
    | Rejected
)


def digest_of(block_hashes: bytes) -> int:
    """The digest of a run of hashes, independent of their order: the exclusive or of all, as a big-endian integer.

    About 1 ns a block where there are many.
    """
    rows = len(block_hashes) // _ROW_BYTES
    if rows > 1:
        # Fold whole rows into one row first, then that row and the rest.
        laid = np.frombuffer(block_hashes, np.uint64, rows * _ROW_BYTES // 8).reshape(rows, -1)
        block_hashes = np.bitwise_xor.reduce(laid, axis=0).tobytes() + block_hashes[rows * _ROW_BYTES :]
    blocks = len(block_hashes) // HASH_BYTES
    digest = int.from_bytes(block_hashes, "big")
    while blocks > 1:
        half = blocks // 2
        bits = half * _HASH_BITS
        digest = (digest >> bits) ^ (digest & ((1 << bits) - 1))
        blocks -= half
    return digest


class Digest:
    """`digest_of` a changing set of blocks. A change is cheap: folding waits until the value is asked for.

    Toggling a block that is in the set takes it out.
    """

    __slots__ = ("_folded", "_pending")

    def __init__(self) -> None:
        self._folded = 0
        self._pending: list[bytes] = []

    def toggle(self, block_hashes: bytes) -> None:
        """Add these blocks to the set, or take them out if they are in it."""
        pending = self._pending
        pending.append(block_hashes)
        if len(pending) >= _FOLD_AT:
            self.value()

    def value(self) -> int:
        if self._pending:
            self._folded ^= digest_of(b"".join(self._pending))
            self._pending.clear()
        return self._folded


_FOLD_AT = 64
"""Most runs that a `Digest` collects before it folds them."""
