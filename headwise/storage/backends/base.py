"""The contract of a storage backend: cache blocks by key, beyond the life of a process.

    key = namespace (model, layout, rank and ranks)    fixed when the storage is opened
        + block hash (16 bytes) + group                given with every call, as two parallel sequences

Blocks travel between the storage and blocks of a flat host arena. What is stored may be lost at any time: a block that
is gone, short or corrupt is a miss, and no call raises for it. What is read as a hit is what was written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.storage.index.messages import HASH_BYTES

KEY_BYTES = HASH_BYTES + 4

Arena = NDArray[np.uint8]
Hits = NDArray[np.bool_]


@dataclass(frozen=True)
class StorageNamespace:
    """Which model and layout blocks belong to. Blocks of one namespace are never found in another.

    model:  identity of the weights, and of whatever else decides their keys and values
    layout: `BlockLayout.identity`, together with whatever else decides what a group's block holds
    """

    model: str
    layout: str
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("blocks are stored for a model whose identity is known")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"rank {self.tp_rank} of {self.tp_size}: a rank must be at least 0 and below the size")

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ between namespaces. Parts are length-prefixed, so no two namespaces give one digest."""
        digest = sha256()
        for part in (self.model, self.layout, str(self.tp_rank), str(self.tp_size)):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.digest()[:HASH_BYTES]

    def __str__(self) -> str:
        return f"model {self.model}, layout {self.layout}, rank {self.tp_rank} of {self.tp_size}"


@dataclass(frozen=True)
class StorageStats:
    """What a process knows of its namespace, and its counts since it opened the storage.

    blocks, bytes:  stored, as far as this process knows
    misses:         blocks asked for and not served; includes ``corrupt``: those found short or altered
    evictions:      blocks of the namespace that any process evicted, or that vanished
    write_failures: blocks that could not be stored
    disk_full:      times that the disk or a quota had no room for a write, though the capacity was not reached
    """

    blocks: int
    bytes: int
    hits: int
    misses: int
    corrupt: int
    evictions: int
    written: int
    write_failures: int
    disk_full: int = 0


class BlockStorage(ABC):
    """Blocks of one namespace, all of ``block_bytes`` bytes. Every method may be called from any thread.

    A call takes as long as the file system or the network takes, for ever if that hangs. Callers that cannot wait use a
    thread of their own, and must not touch the blocks of the arena until the call returns.

    hashes: n hashes of `HASH_BYTES` bytes
    groups: int32 [n], each the group of the hash at its place; no two keys of a call are the same
    arena:  uint8 [blocks * block_bytes], C-contiguous
    blocks: int32 [n], indices of the arena's blocks

    Methods raise ValueError for arguments that do not fit together, and for nothing else.
    """

    def __init__(self, namespace: StorageNamespace, block_bytes: int) -> None:
        if block_bytes <= 0:
            raise ConfigError(f"a block of {block_bytes} bytes cannot be stored; a block must have at least 1 byte")
        self.namespace = namespace
        self.block_bytes = block_bytes

    @property
    def volume(self) -> str:
        """Storages with the same volume find each other's blocks; empty: not known to be shared."""
        return ""

    @property
    def room(self) -> int | None:
        """Blocks that can be written before any other goes for them, of whichever namespace; None: not known."""
        return None

    @abstractmethod
    def contains(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> Hits:
        """bool [n]: whether a read would hit, as far as this process knows. Cheap: reads no block."""

    @abstractmethod
    def write(
        self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]
    ) -> Hits:
        """Store blocks of the arena; bool [n]: whether each is stored now, by this or an earlier write, as far as this
        process knows.
        """

    @abstractmethod
    def read(self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]) -> Hits:
        """Fill blocks of the arena; bool [n]: which were filled. The content of the others is undefined."""

    @abstractmethod
    def delete(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> None:
        """Forget blocks; unknown ones are ignored. Other processes may learn of it only when they read them."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block of the namespace, for every process."""

    @abstractmethod
    def stats(self) -> StorageStats: ...

    @abstractmethod
    def register(self, arena: Arena) -> None:
        """Announce an arena, before the first call that reads from or writes to it; it must live until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections; the stored blocks stay. May be called again.

        No other call may be under way, or follow.
        """


def block_keys(hashes: Sequence[bytes], groups: NDArray[np.int32]) -> list[bytes]:
    """The key of each block within its namespace: `KEY_BYTES` bytes, the hash and then the group."""
    if len(hashes) != len(groups):
        raise ValueError(f"{len(hashes)} block hashes with {len(groups)} groups; each hash needs its group")
    for block_hash in hashes:
        if len(block_hash) != HASH_BYTES:
            raise ValueError(f"a block hash of {len(block_hash)} bytes; it must have {HASH_BYTES}")
    return [h + g.to_bytes(4, "little", signed=True) for h, g in zip(hashes, groups.tolist(), strict=True)]


def block_views(arena: Arena, blocks: NDArray[np.int32], block_bytes: int, count: int) -> list[memoryview]:
    """The bytes of each of ``count`` blocks, within the arena."""
    if arena.dtype != np.uint8 or arena.ndim != 1 or not arena.flags.c_contiguous:
        raise ValueError(f"an arena of {arena.dtype} {list(arena.shape)}; it must be flat, contiguous uint8")
    if len(blocks) != count:
        raise ValueError(f"{count} keys with {len(blocks)} blocks; each key needs its block")
    limit = len(arena) // block_bytes
    if count and not 0 <= blocks.min() <= blocks.max() < limit:
        raise ValueError(
            f"blocks {blocks.min()} to {blocks.max()} of an arena that has {limit}, of {block_bytes} bytes"
        )
    view = arena.data
    return [view[block * block_bytes : (block + 1) * block_bytes] for block in blocks.tolist()]
