"""Copying blocks between two arenas: the contract, and its truth in NumPy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = Any
Runs = NDArray[np.int64]
"""``int64 [n, 3]``: (first byte in the source, first byte in the target, bytes)."""


class BlockCopy(Protocol):
    """Copies parts of blocks from one arena to another; safe to call from several threads at once.

    piece_bytes: bytes of a block that are worth a copy of their own: with less, copies take longer for each byte
    """

    name: str
    piece_bytes: int

    def __call__(
        self, source: Array, target: Array, pairs: NDArray[np.int32], ranges: NDArray[np.int64], block_bytes: int
    ) -> None:
        """Copy bytes ``ranges[group]`` of each source block to the same bytes of its target block.

        source, target: flat uint8 arenas that do not overlap, whole numbers of ``block_bytes``
        pairs:          ``int32 [m, 3]`` (group, source block, target block); no target block twice
        ranges:         ``int64 [groups, 2]``, bytes ``[first, last)`` within a block; may be empty

        Pairs that lie side by side in both arenas, whole blocks each, are one copy. On a GPU the copy is
        enqueued on the current stream. Nothing is written if an argument is refused.

        Raises:
            ValueError: a block outside its arena, an unknown group, or a range outside the block.
        """


class RunCopy(Protocol):
    """Copies runs of bytes from one arena to another; safe to call from several threads at once."""

    def __call__(self, source: Array, target: Array, runs: Runs) -> None:
        """Copy each run. Runs must not overlap in ``target``. Nothing is written if one is refused.

        source, target: flat uint8 arrays that do not overlap
        runs:           ``int64 [n, 3]`` (first byte in source, first byte in target, bytes)

        Raises:
            ValueError: a run outside its array.
        """


class ReferenceBlockCopy:
    """`BlockCopy` in NumPy, slow and plain: what every other implementation is compared with."""

    name = "reference"
    piece_bytes = 0

    def __call__(
        self,
        source: NDArray[np.uint8],
        target: NDArray[np.uint8],
        pairs: NDArray[np.int32],
        ranges: NDArray[np.int64],
        block_bytes: int,
    ) -> None:
        """See `BlockCopy`."""
        check_ranges(ranges, block_bytes)
        counts = (len(ranges), source.size // block_bytes, target.size // block_bytes)
        outside = np.flatnonzero(((pairs < 0) | (pairs >= counts)).any(axis=1))
        if len(outside):
            raise bad_pair(pairs, int(outside[0]), *counts)
        source, target = source.reshape(-1, block_bytes), target.reshape(-1, block_bytes)
        for group, (first, last) in enumerate(ranges.tolist()):
            rows = pairs[pairs[:, 0] == group]
            target[rows[:, 2], first:last] = source[rows[:, 1], first:last]


def reference_run_copy(source: NDArray[np.uint8], target: NDArray[np.uint8], runs: Runs) -> None:
    """`RunCopy` in NumPy."""
    wrong = outside(runs, source.size, target.size)
    if wrong is not None:
        raise bad_run(runs, wrong, source.size, target.size)
    for from_, to, count in runs.tolist():
        target[to : to + count] = source[from_ : from_ + count]


def outside(runs: Runs, source_bytes: int, target_bytes: int) -> int | None:
    """Index of the first run that does not lie within both arrays; None if all do."""
    # Not `first + count`, which may wrap around.
    left = np.array([source_bytes, target_bytes]) - runs[:, :2]
    wrong = np.flatnonzero((runs < 0).any(axis=1) | (left < runs[:, 2:]).any(axis=1))
    return int(wrong[0]) if len(wrong) else None


def bad_run(runs: Runs, index: int, source_bytes: int, target_bytes: int) -> ValueError:
    """The error for a run that is not within its arrays."""
    source, target, count = runs[index].tolist()
    return ValueError(
        f"run {index} copies {count} bytes at {source} of {source_bytes} to {target} of {target_bytes}: runs must lie "
        "within both"
    )


def check_ranges(ranges: NDArray[np.int64], block_bytes: int) -> None:
    """Raise ValueError for a byte range ``[..., 2]`` that does not lie within a block."""
    for at, (first, last) in enumerate(ranges.reshape(-1, 2).tolist()):  # few: NumPy takes longer to begin
        if not 0 <= first <= last <= block_bytes:
            where = [int(index) for index in np.unravel_index(at, ranges.shape[:-1])]
            raise ValueError(
                f"byte range {[first, last]} at {where} does not lie within a block: "
                f"it must be [first, last] with 0 <= first <= last <= {block_bytes}"
            )


def bad_pair(pairs: NDArray[np.int32], index: int, groups: int, source_blocks: int, target_blocks: int) -> ValueError:
    """The error for a pair that names a group or block that is not there."""
    group, source, target = pairs[index].tolist()
    return ValueError(
        f"pair {index} copies source block {source} to target block {target} in group {group}: choose a source in "
        f"[0, {source_blocks}), a target in [0, {target_blocks}) and a group in [0, {groups})"
    )
