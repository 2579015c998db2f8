"""Blocks of recently routed requests: their engines have them, or soon will, and the index may not know it yet."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache, partial

EXPECTED_S = 120.0
"""Engines tell the index of a request's blocks when it *ends*. So entries live as long as a long generation does, or at
least half as long."""

EXPECTED_BLOCKS = 1 << 19
"""Most blocks expected, of all engines: 33 million tokens in blocks of 64, and some 75 MB."""

EXPECTED_TOKENS = 512
"""Of longer paths, only one block per so many tokens is kept: an expectation need not be exact."""

_Generation = dict[bytes, int]


class ExpectedBlocks:
    """Bit sets of engines by block hash, in two generations. The older one is forgotten as a whole.

    A path is added from its first block on. So, within a generation, an engine that is expected to have a block is
    expected to have all blocks before it: bit sets only shrink along a path, and bisection finds where.

    Of a path, the first ``step`` blocks are kept, and then every ``step``-th, so larger depths are rounded down.

    An engine's bit is its *slot*. An engine whose cache is gone gets another slot. Its old slot is used again only when
    both generations that name it are forgotten.
    """

    def __init__(self, step: int = 1) -> None:
        self._step = step
        self._newer: _Generation = {}
        self._older: _Generation = {}
        self._rotated_at = 0.0
        self._num_slots = 0
        self._free: list[int] = []
        self._freed: tuple[list[int], list[int]] = ([], [])  # freed since the last rotation, and before it

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    # ---- slots ----

    def take_slot(self) -> int:
        """A slot for which no blocks are expected."""
        if self._free:
            return self._free.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def free_slot(self, slot: int) -> None:
        """Forget the blocks that are expected for a slot."""
        self._freed[0].append(slot)

    # ---- paths ----

    def add(self, path: Sequence[bytes], slot: int, now: float) -> None:
        """Expect the blocks of a path, from its first one on, of an engine."""
        path = self._kept(path)[: EXPECTED_BLOCKS // 4]
        if len(self._newer) + len(path) > EXPECTED_BLOCKS // 2:
            self._rotate(now)
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
        kept = self._kept(path)
        newer, older = _depths(self._newer, kept, self._step), _depths(self._older, kept, self._step)
        for slot, depth in older.items():
            if depth > newer.get(slot, 0):
                newer[slot] = depth
        return newer

    def _kept(self, path: Sequence[bytes]) -> Sequence[bytes]:
        step = self._step
        return path if step == 1 else [*path[:step], *path[2 * step - 1 :: step]]

    def expire(self, now: float) -> None:
        """Forget what was added long ago; call it every few seconds."""
        if now - self._rotated_at > EXPECTED_S / 2:
            self._rotate(now)

    def _rotate(self, now: float) -> None:
        self._older, self._newer, self._rotated_at = self._newer, {}, now
        recent, earlier = self._freed
        self._free += earlier
        self._freed = ([], recent)


def _depth(generation: _Generation, from_last: Sequence[bytes]) -> int:
    """How many leading blocks of a path any engine has; ``from_last``: its hashes, the last one first."""
    return len(from_last) - bisect_left(from_last, True, key=generation.__contains__)


def _is_of(generation: _Generation, bits: int, block: bytes) -> bool:
    return generation[block] == bits


def _depths(generation: _Generation, kept: Sequence[bytes], step: int) -> dict[int, int]:
    """By slot, the expected depth of the path of which these blocks are kept."""
    found: dict[int, int] = {}
    if kept[0] not in generation:
        return found
    count, deeper = _depth(generation, kept[::-1]), 0
    while count:
        bits = generation[kept[count - 1]]
        depth = count if count <= step else (count - step + 1) * step
        found.update(dict.fromkeys(_slots(bits & ~deeper), depth))
        # Blocks with the same bit set are not the last one of any engine: skip them.
        same = bisect_left(kept, True, 0, count - 1, key=partial(_is_of, generation, bits))
        count, deeper = same, bits
    return found


@lru_cache(1024)
def _slots(bits: int) -> Sequence[int]:
    slots = []
    while bits:
        lowest = bits & -bits
        slots.append(lowest.bit_length() - 1)
        bits ^= lowest
    return slots
