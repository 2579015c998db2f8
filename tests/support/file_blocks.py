"""Small blocks that tests write to file storage and read back; their contents follow from their numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwise.storage.backends.base import StorageNamespace
from headwise.storage.backends.file import FileStorage

BLOCK_BYTES = 256
CAPACITY = 64 * 10 * BLOCK_BYTES  # segments of ten blocks
NAMESPACE = StorageNamespace("model", "layout")


def open_at(
    path: Path, namespace: StorageNamespace = NAMESPACE, capacity: int = CAPACITY, notes: Path | None = None
) -> FileStorage:
    return FileStorage(path, capacity, namespace, BLOCK_BYTES, notes)


def content_of(number: int) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_128(str(number).encode()).digest(BLOCK_BYTES), dtype=np.uint8)


def keys_of(numbers: Sequence[int]) -> tuple[list[bytes], NDArray[np.int32]]:
    return [number.to_bytes(16, "big") for number in numbers], np.zeros(len(numbers), dtype=np.int32)


def write(storage: FileStorage, numbers: Sequence[int]) -> list[bool]:
    arena = np.concatenate([content_of(number) for number in numbers])
    return storage.write(*keys_of(numbers), arena, np.arange(len(numbers), dtype=np.int32)).tolist()


def read(storage: FileStorage, numbers: Sequence[int]) -> list[int]:
    """Which blocks were hits; their contents are checked."""
    arena = np.zeros(len(numbers) * BLOCK_BYTES, dtype=np.uint8)
    hits = storage.read(*keys_of(numbers), arena, np.arange(len(numbers), dtype=np.int32))
    for number, hit, block in zip(numbers, hits, arena.reshape(-1, BLOCK_BYTES), strict=True):
        assert not hit or (block == content_of(number)).all(), f"block {number} has other bytes than were written"
    return [number for number, hit in zip(numbers, hits, strict=True) if hit]
