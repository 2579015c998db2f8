"""Runs of block hashes, as one ``bytes`` each: where they are alike, and what they consist of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache
from struct import Struct

from headwise.storage.index.messages import HASH_BYTES


def stretches(hashes: bytes, resumable: bytes) -> Iterator[tuple[bytes, bool]]:
    """The parts of a run of hashes that have equal flags, and the flag of each; ``resumable``: one byte a block."""
    first, blocks = 0, len(resumable)
    while first < blocks:
        flag = resumable[first]
        last = resumable.find(b"\0" if flag else b"\1", first)
        if last < 0:
            last = blocks
        yield hashes[first * HASH_BYTES : last * HASH_BYTES], bool(flag)
        first = last


def overlap(hashes: bytes, path: bytes, at: int) -> tuple[int, int]:
    """Where in ``hashes`` the hash at byte ``at`` of ``path`` is, and how many bytes are the same from there on."""
    if path.startswith(hashes, at):
        return 0, len(hashes)
    start = 0
    first = path[at : at + HASH_BYTES]
    if not hashes.startswith(first):
        start = hashes.find(first)
        while start % HASH_BYTES:
            start = hashes.find(first, start + 1)
    length = min(len(hashes) - start, len(path) - at)
    if path.startswith(hashes[start : start + length], at):
        return start, length
    same, differs = 1, length // HASH_BYTES
    while differs - same > 1:
        middle = (same + differs) // 2
        if path.startswith(hashes[start : start + middle * HASH_BYTES], at):
            same = middle
        else:
            differs = middle
    return start, same * HASH_BYTES


def count_unknown(keys: Sequence[bytes], where: Container[bytes]) -> int:
    """How many leading ``keys`` are neither known nor named before."""
    seen: set[bytes] = set()
    for index, key in enumerate(keys):
        if key in where or key in seen:
            return index
        seen.add(key)
    return len(keys)


def split(hashes: bytes) -> tuple[bytes, ...]:
    """The hashes of a run of at most `MAX_RUN`."""
    return _splitter(len(hashes) // HASH_BYTES)(hashes)


@cache
def _splitter(blocks: int) -> Callable[[bytes], tuple[bytes, ...]]:
    return Struct(f"{HASH_BYTES}s" * blocks).unpack


exhaust = deque[object](maxlen=0).extend
"""Run an iterator to its end, for what it does."""
