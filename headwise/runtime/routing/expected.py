"""What was routed a moment ago: those engines' caches have it, or soon will, and the index may not know yet."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

EXPECTED_S = 120.0
"""Engines tell the index of a request's blocks when it *ends*: entries live for a long generation, and half of that at
least."""

EXPECTED_BLOCKS = 1 << 19
"""Most blocks expected, of all engines: 33 million tokens in blocks of 64, and some 75 MB."""

_Generation = dict[bytes, int]


class ExpectedBlocks:
    """Bit sets of engines by block hash, in two generations, of which the older is forgotten as a whole.

    A path is added from its first block on. So, within a generation, whoever is expected to have a block is expected to
    have all before it: bit sets only shrink along a path, and bisection finds where.

    An engine's bit is its *slot*. An engine whose cache is gone gets another slot, and what its old one says counts for
    nothing until it is free again.
    """

    def __init__(self) -> None:
        self._newer: _Generation = {}
        self._older: _Generation = {}
        self._turned = 0.0
        self._num_slots = 0
        self._free: list[int] = []
        self._leaving: tuple[list[int], list[int]] = ([], [])  # given back since the last turn, before it

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    # ---- slots ----

    def take_slot(self) -> int:
        """A slot of which nothing is expected."""
        if self._free:
            return self._free.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def give_back(self, slot: int) -> None:
        """Forget what is expected of a slot."""
        self._leaving[0].append(slot)

    # ---- paths ----

    def add(self, path: Sequence[bytes], slot: int, now: float) -> None:
        """Expect the blocks of a path, from its first one on, of an engine."""
        path = path[: EXPECTED_BLOCKS // 4]
        if len(self._newer) + len(path) > EXPECTED_BLOCKS // 2:
            self._turn(now)
        newer, bit = self._newer, 1 << slot
        known = _depth(newer, path[::-1])
        has = bisect_left(path, True, 0, known, key=lambda block_hash: not newer[block_hash] & bit)
        for block_hash in path[has:known]:
            newer[block_hash] |= bit
        newer.update(dict.fromkeys(path[known:], bit))

    def depths(self, path: Sequence[bytes]) -> dict[int, int]:
        """By slot, how many leading blocks of the path are expected of its engine."""
        if not path:
            return {}
        first = path[0]
        found: dict[int, int] = {}
        for generation in (self._older, self._newer):
            if first in generation:
                for slot, depth in _depths(generation, path).items():
                    found[slot] = max(depth, found.get(slot, 0))
        return found

    def expire(self, now: float) -> None:
        """Forget what was added long ago; to be called every few seconds."""
        if now - self._turned > EXPECTED_S / 2:
            self._turn(now)

    def _turn(self, now: float) -> None:
        self._older, self._newer, self._turned = self._newer, {}, now
        recent, earlier = self._leaving
        self._free += earlier
        self._leaving = ([], recent)


def _depth(generation: _Generation, from_last: Sequence[bytes]) -> int:
    """How many leading blocks of a path anyone has; ``from_last``: its hashes, the last one first."""
    return len(from_last) - bisect_left(from_last, True, key=generation.__contains__)


def _depths(generation: _Generation, path: Sequence[bytes]) -> dict[int, int]:
    """By slot; block 0 is there."""
    found: dict[int, int] = {}
    depth, deeper = _depth(generation, path[::-1]), 0
    while depth:
        bits = generation[path[depth - 1]]
        for slot in _slots(bits & ~deeper):
            found[slot] = depth
        depth, deeper = _where_more(generation, path[:depth], bits), bits
    return found


def _where_more(generation: _Generation, path: Sequence[bytes], bits: int) -> int:
    """How many leading blocks of the path are expected of more than ``bits``, of whom all its blocks are."""
    return bisect_left(path, True, key=lambda block_hash: generation[block_hash] == bits)


def _slots(bits: int) -> list[int]:
    slots = []
    while bits:
        lowest = bits & -bits
        slots.append(lowest.bit_length() - 1)
        bits ^= lowest
    return slots
