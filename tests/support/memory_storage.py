"""A storage in a dictionary, for tests: it loses, fails, hangs and answers nonsense when told to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.storage.backends.base import (
    Arena,
    BlockStorage,
    Hits,
    StorageNamespace,
    StorageStats,
    block_keys,
    block_views,
)

HANG_S = 60.0
"""Longest that a call hangs: never reached unless the test fails."""


NAMESPACE = StorageNamespace("model", "layout")
Shared = dict[StorageNamespace, dict[bytes, bytes]]


class MemoryStorage(BlockStorage):
    """shared:  what several of them store together, by namespace

    blocks:  the bytes stored, by key
    calls:   (method, number of keys) of each call, in order
    threads: those that called
    errors:  by method, what it raises
    answers: by method, what it returns instead of what is true
    full:    whether blocks that are not there cannot be written
    corrupt: keys whose blocks are found altered: misses that leave garbage in the arena
    """

    def __init__(
        self, block_bytes: int = 8, namespace: StorageNamespace = NAMESPACE, shared: Shared | None = None
    ) -> None:
        super().__init__(namespace, block_bytes)
        self.blocks: dict[bytes, bytes] = {} if shared is None else shared.setdefault(namespace, {})
        self.calls: list[tuple[str, int]] = []
        self.threads: set[threading.Thread] = set()
        self.errors: dict[str, Exception] = {}
        self.answers: dict[str, object] = {}
        self.full = False
        self.corrupt: set[bytes] = set()
        self._hits = self._misses = self._written = self._write_failures = 0
        self._hung: dict[str, tuple[threading.Event, threading.Event]] = {}

    def hang(self, method: str) -> threading.Event:
        """Let calls of a method hang until `go_on`; the event returned is set once one does."""
        begun = threading.Event()
        self._hung[method] = begun, threading.Event()
        return begun

    def go_on(self, method: str) -> None:
        self._hung.pop(method)[1].set()

    def register(self, arena: Arena) -> None:
        self._enter("register")

    def contains(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> Hits:
        keys = self._enter("contains", hashes, groups)
        return self._answer("contains", [key in self.blocks for key in keys])

    def write(
        self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]
    ) -> Hits:
        keys = self._enter("write", hashes, groups)
        for key, view in zip(keys, block_views(arena, blocks, self.block_bytes, len(keys)), strict=True):
            if not self.full:
                self.blocks[key] = bytes(view)
        stored = [key in self.blocks for key in keys]
        self._written += sum(stored)
        self._write_failures += len(keys) - sum(stored)
        return self._answer("write", stored)

    def read(self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]) -> Hits:
        keys = self._enter("read", hashes, groups)
        for key, view in zip(keys, block_views(arena, blocks, self.block_bytes, len(keys)), strict=True):
            view[:] = bytes(self.block_bytes) if key in self.corrupt else self.blocks.get(key, view)
        found = [key in self.blocks and key not in self.corrupt for key in keys]
        self._hits += sum(found)
        self._misses += len(keys) - sum(found)
        return self._answer("read", found)

    def delete(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> None:
        for key in self._enter("delete", hashes, groups):
            self.blocks.pop(key, None)

    def clear(self) -> None:
        self._enter("clear")
        self.blocks.clear()

    def stats(self) -> StorageStats:
        counted = {"hits": self._hits, "misses": self._misses}
        counted |= {"written": self._written, "write_failures": self._write_failures}
        held = {"blocks": len(self.blocks), "bytes": len(self.blocks) * self.block_bytes}
        return StorageStats(**held, **counted, evictions=0, corrupt=0)

    def close(self) -> None:
        self._enter("close")

    def _enter(
        self, method: str, hashes: Sequence[bytes] = (), groups: NDArray[np.int32] | tuple[()] = ()
    ) -> list[bytes]:
        keys = block_keys(hashes, np.array(groups, dtype=np.int32))
        self.calls.append((method, len(keys)))
        self.threads.add(threading.current_thread())
        if method in self._hung:
            begun, go_on = self._hung[method]
            begun.set()
            assert go_on.wait(HANG_S)
        if method in self.errors:
            raise self.errors[method]
        return keys

    def _answer(self, method: str, truth: list[bool]) -> Hits:
        return self.answers.get(method, np.array(truth, dtype=np.bool_))
