"""Functions on runs: sequences of block hashes, each run one ``bytes`` of joined hashes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache
from struct import Struct

from headwise.storage.index.messages import HASH_BYTES


def stretches(hashes: bytes, resumable: bytes) -> Iterator[tuple[bytes, bool]]:
    """Split a run where the flag changes: each part and its flag. ``resumable`` has one byte per block."""
    first, blocks = 0, len(resumable)
    while first < blocks:
        flag = resumable[first]
        last = resumable.find(b"\0" if flag else b"\1", first)
        if last < 0:
            last = blocks
        yield hashes[first * HASH_BYTES : last * HASH_BYTES], bool(flag)
        first = last


def overlap(hashes: bytes, path: bytes, at: int) -> tuple[int, int]:
    """Where in ``hashes`` the hash at byte ``at`` of ``path`` begins, and how many bytes match from there on."""
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
    """How many leading ``keys`` are new: neither in ``where`` nor earlier among the keys."""
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
"""Run an iterator to its end for its side effects."""
