"""What engines, the attention store and the scheduler say to each other.

Statements are absolute: each is true on its own. An engine (a *node*) numbers its flushes from 0 within an *epoch*,
which is new whenever its cache starts empty. The node alone writes what is true of it; the store only repeats it.

Wherever block hashes go by the run, they are one ``bytes`` of `HASH_BYTES` each: a run of 157 hashes is copied,
compared and cut as one object.
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
    resumable:    per block 1 if a request can go on right behind it with what this tier and faster ones hold, else 0;
                  empty: 1 for all. Of blocks that are no longer resident: what was said of them before.
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
    """The node lives, its last flush was ``seq`` (-1: none yet), and these are the digests of what it then held.

    digests: per tier in the order of `TIERS`, `digest_of` the resident blocks; then the same of the resumable ones
    volume:  names the node's storage: nodes of one volume find there what each of them wrote; empty: no other does
    """

    node: str
    epoch: int
    seq: int
    digests: tuple[int, ...]
    volume: str = ""


@dataclass(frozen=True)
class Gone:
    """From the scheduler: all that the node said in this epoch and earlier ones is void."""

    node: str
    epoch: int


@dataclass(frozen=True)
class SnapshotRequest:
    """From the store: "I missed something of yours; send me a snapshot." """

    node: str


@dataclass(frozen=True)
class Accepted:
    """From the store: the node's statements of this epoch count from now on."""

    node: str
    epoch: int


@dataclass(frozen=True)
class Outdated:
    """From the store: the node is not heard.

    epoch:       it must take a higher one
    is_replaced: that one is of a node in its place, which is heard; else the node was said to be gone
    """

    node: str
    epoch: int
    is_replaced: bool


@dataclass(frozen=True)
class Query:
    """From the scheduler: who holds how much of this path?

    key:          the asker's number of the question, repeated in the answer
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
    """From the store, to whoever sent what it did not take, and why."""

    reason: str


Statement = Flush | Snapshot | Heartbeat
Message = (
    Statement | Gone | SnapshotRequest | Accepted | Outdated | Query | Matches | GetIndexStats | IndexStats | Rejected
)


def digest_of(block_hashes: bytes) -> int:
    """The digest of a run of hashes, independent of their order: the exclusive or of all, as a big-endian integer.

    About 1 ns a block where there are many.
    """
    rows = len(block_hashes) // _ROW_BYTES
    if rows > 1:
        # Whole rows are laid over each other, then what is left over and the row that remains.
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
    """`digest_of` a set of blocks that changes. A change costs next to nothing: folding waits until it is asked for.

    Adding a block that is in the set takes it out.
    """

    __slots__ = ("_folded", "_pending")

    def __init__(self) -> None:
        self._folded = 0
        self._pending: list[bytes] = []

    def toggle(self, block_hashes: bytes) -> None:
        """These blocks come into the set, or leave it."""
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
"""Runs that a `Digest` gathers at most."""
