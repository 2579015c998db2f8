"""Blocks in a Mooncake store: the host memory that processes of a cluster lend to it, under one master.

Each block is one object. A process lends ``segment_bytes`` of its memory, which hold blocks of any process for as long
as it lives; the master evicts by recency. After a lender dies its blocks are still said to exist for some seconds, and
reading them fails at once: that is a miss.

    arena block  <-- copied, checked -->  record in staging memory  <-- Mooncake's threads -->  a lender's memory

Why not straight to and from the arena: a transfer from a process that is stopped, or cut off, fails after a minute, yet
the bytes still arrive when it goes on, at an address where the arena has other blocks by then. In the staging memory
they do no harm: a record ends in a checksum of its name and block, which is verified of what was copied to the arena.

How long calls take: all are bounded by Mooncake, but badly. With the master dead, `write`, `delete` and `clear` fail
after 4 s and the others at once; with the master stopped all fail after 30 s; with a lender stopped a transfer fails
after 60 s, per `STAGING_BYTES`. Those who cannot wait that long must call from a thread of their own.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from headwise.errors import ConfigError, first_line
from headwise.storage.backends.base import (
    Arena,
    BlockStorage,
    Hits,
    StorageNamespace,
    StorageStats,
    block_keys,
    block_views,
)

log = logging.getLogger(__name__)

PROTOCOLS = ("tcp", "rdma")

RECORDS = "headwise/1"
"""Prefix of all names. Its number is the version of the records."""

CHECK_BYTES = 8

MAX_VOLUME = 128

STAGING_BYTES = 16 << 20
"""Bytes moved by one transfer, in either direction; one block if that is larger."""

MIN_SEGMENT_BYTES = 16 << 20
"""Mooncake refuses less."""

CONNECT_TIMEOUT_S = 5.0
"""Mooncake itself tries for a minute and a half."""


@dataclass(frozen=True)
class MooncakeConfig:
    """How to take part in a Mooncake store. Raises ConfigError for what Mooncake would refuse, or take minutes over.

    master:        ``host:port`` of ``mooncake_master``
    segment_bytes: memory this process lends to the store; 0: none, others must
    host:          address under which other processes reach this one; by default the one that reaches the master
    protocol:      ``tcp`` or ``rdma``
    """

    master: str
    segment_bytes: int = 0
    host: str = ""
    protocol: str = "tcp"

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"Mooncake protocol {self.protocol!r} is unknown; choose one of {', '.join(PROTOCOLS)}")
        if 0 < self.segment_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError(
                f"a Mooncake segment of {self.segment_bytes} bytes is too small; lend at least {MIN_SEGMENT_BYTES} "
                "bytes, or 0 to lend nothing"
            )


class MooncakeStorage(BlockStorage):
    """Blocks of a namespace in a Mooncake store.

    Raises ConfigError if Mooncake is not installed, its master cannot be reached, it refuses the configuration, or the
    memory to lend does not hold one block.
    """

    def __init__(self, config: MooncakeConfig, namespace: StorageNamespace, block_bytes: int) -> None:
        super().__init__(namespace, block_bytes)
        if 0 < config.segment_bytes < block_bytes + CHECK_BYTES:
            raise ConfigError(
                f"a Mooncake segment of {config.segment_bytes} bytes does not hold one block of {block_bytes} bytes "
                "with its checksum; lend at least a hundred times that, or 0 to lend nothing"
            )
        self._volume = f"mooncake://{config.master}"[:MAX_VOLUME]
        self._prefix = f"{RECORDS}/{namespace.digest.hex()}/"
        self._store = _connect(config)
        self._incoming, self._outgoing = (_Staging(self._store, block_bytes) for _ in range(2))
        self._count_lock = Lock()
        self._hits = self._misses = self._corrupt = self._written = self._write_failures = 0
        self._logged: set[int] = set()

    @property
    def volume(self) -> str:
        return self._volume

    def register(self, arena: Arena) -> None:
        """Nothing to do: Mooncake reaches the staging memory alone."""

    def contains(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> Hits:
        codes = self._store.batch_is_exist(self._names(hashes, groups))
        return np.array([code == 1 for code in codes], dtype=np.bool_)

    def write(
        self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]
    ) -> Hits:
        names = self._names(hashes, groups)
        views = block_views(arena, blocks, self.block_bytes, len(names))
        codes: list[int] = []
        with self._outgoing.lock:
            for part in self._outgoing.parts(len(names)):
                for slot, (name, view) in enumerate(zip(names[part], views[part], strict=True)):
                    self._outgoing.pack(slot, name, view)
                codes += self._store.batch_put_from(names[part], *self._outgoing.addresses(len(names[part])))
        stored = np.array([code == 0 for code in codes], dtype=np.bool_)
        written = int(np.count_nonzero(stored))
        with self._count_lock:
            self._written += written
            self._write_failures += len(names) - written
            self._log_new(codes)
        return stored

    def read(self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]) -> Hits:
        names = self._names(hashes, groups)
        views = block_views(arena, blocks, self.block_bytes, len(names))
        hits = np.zeros(len(names), dtype=np.bool_)
        corrupt: list[str] = []
        with self._incoming.lock:
            for part in self._incoming.parts(len(names)):
                sizes = self._store.batch_get_into(names[part], *self._incoming.addresses(len(names[part])))
                for slot, (at, size) in enumerate(enumerate(sizes, part.start)):
                    hits[at] = size == self._incoming.record_bytes and self._incoming.unpack(slot, names[at], views[at])
                    if size >= 0 and not hits[at]:
                        corrupt.append(names[at])
        if corrupt:
            self._store.batch_remove(corrupt, True)  # so that they can be stored again
        served = int(np.count_nonzero(hits))
        with self._count_lock:
            self._hits += served
            self._misses += len(names) - served
            self._corrupt += len(corrupt)
        return hits

    def delete(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> None:
        self._store.batch_remove(self._names(hashes, groups), True)

    def clear(self) -> None:
        self._store.remove_by_regex(f"^{re.escape(self._prefix)}", True)

    def close(self) -> None:
        """Leave the store. The memory that this process lent is withdrawn, with the blocks in it."""
        store, self._store = self._store, None  # calling a store that was closed ends the process
        if store is not None:
            store.close()

    def stats(self) -> StorageStats:
        """Only the master knows what is stored: ``blocks`` and ``bytes`` are what this process wrote."""
        with self._count_lock:
            return StorageStats(
                blocks=self._written,
                bytes=self._written * self.block_bytes,
                hits=self._hits,
                misses=self._misses,
                corrupt=self._corrupt,
                evictions=0,
                written=self._written,
                write_failures=self._write_failures,
            )

    def _names(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> list[str]:
        return [self._prefix + key.hex() for key in block_keys(hashes, groups)]

    def _log_new(self, codes: Sequence[int]) -> None:
        for code in {code for code in codes if code} - self._logged:
            self._logged.add(code)
            log.warning("Mooncake did not store a block (code %d); counted, and not logged again", code)


class _Staging:
    """Memory registered with Mooncake, for one transfer at a time. lock: to be held while it is used.

    Each record is a block and then its checksum.
    """

    def __init__(self, store: Any, block_bytes: int) -> None:
        self.lock = Lock()
        self.record_bytes = block_bytes + CHECK_BYTES
        self._records = np.zeros((max(1, STAGING_BYTES // self.record_bytes), self.record_bytes), dtype=np.uint8)
        code = store.register_buffer(self._records.ctypes.data, self._records.nbytes)
        if code:
            raise ConfigError(
                f"Mooncake cannot register {self._records.nbytes} bytes of memory (code {code}); "
                "with RDMA raise `ulimit -l`"
            )

    def parts(self, count: int) -> Iterator[slice]:
        """Of ``count`` blocks, those that one transfer can take."""
        step = len(self._records)
        return (slice(start, min(count, start + step)) for start in range(0, count, step))

    def addresses(self, count: int) -> tuple[list[int], list[int]]:
        """Address and size of the first ``count`` records."""
        start: int = self._records.ctypes.data
        return [start + slot * self.record_bytes for slot in range(count)], [self.record_bytes] * count

    def pack(self, slot: int, name: str, block: memoryview) -> None:
        record = self._records[slot].data
        record[:-CHECK_BYTES] = block
        record[-CHECK_BYTES:] = _check(name, record[:-CHECK_BYTES])

    def unpack(self, slot: int, name: str, block: memoryview) -> bool:
        """Whether ``block`` holds now what was stored under the name. Verified last: the record may still change."""
        record = self._records[slot].data
        block[:] = record[:-CHECK_BYTES]
        return bool(record[-CHECK_BYTES:] == _check(name, block))


def _check(name: str, block: memoryview) -> bytes:
    """Checksum of a block and its name: a late transfer of another block does not match it."""
    return xxh3_64_digest(block, xxh3_64_intdigest(name.encode()))


def _connect(config: MooncakeConfig) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"storage mooncake://{config.master} needs Mooncake ({first_line(error)}); "
            "run `pip install 'headwise[mooncake]'` and, on Debian, `apt-get install libibverbs1`"
        ) from error
    host = _address_towards(config.master)
    store = MooncakeDistributedStore()
    staging = 0  # of Mooncake's own, of which this use of it makes none
    code = store.setup(
        config.host or host, "P2PHANDSHAKE", config.segment_bytes, staging, config.protocol, "", config.master
    )
    if code:
        raise ConfigError(
            f"Mooncake refused {config} (code {code}); check that its version is the master's, that the protocol works "
            "on this machine, and that the segment fits its memory"
        )
    return store


def _address_towards(master: str) -> str:
    """This machine's address towards the master. Connects to the master, so that a wrong address fails at once."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no Mooncake master answers at {master}: {error}; start `mooncake_master --rpc_port={port}` there"
        ) from error
