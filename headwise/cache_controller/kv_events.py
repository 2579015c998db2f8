"""What an engine tells the attention store of its cache: where each block is, and where a request can go on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.radix_tree import ROOT, Nodes, RadixTree, Removed
from headwise.cache_controller.resumability import RESIDENT, RESUMABLE, Codes, Resumability, bits
from headwise.cache_controller.segments import Segments, nodes_below, segments_of
from headwise.cache_controller.windows import GroupWindows

_NONE: Nodes = np.empty(0, dtype=np.int64)

_MIN_NOTED = 1 << 16
"""Notes that are kept as they came; more are freed of what they repeat."""


@dataclass(frozen=True)
class IndexUpdate:
    """An absolute statement for the attention store.

    "On this path, from block ``start_block`` on, these blocks are (not) resident on this node's ``tier``."

    resumable: per block 1 if a request can go on right behind it with what this tier and faster ones hold, 0 if a
               window group lacks what it would see there; empty: 1 for all
    """

    tier: str
    start_block: int
    block_hashes: tuple[bytes, ...]
    resident: bool
    resumable: bytes = b""


class _Notes:
    """Nodes, each noted any number of times. Memory stays bounded also if they are never taken."""

    def __init__(self) -> None:
        self._chunks: list[Nodes | list[int]] = []
        self._count = 0
        self._limit = _MIN_NOTED

    def __len__(self) -> int:
        return self._count

    def add(self, nodes: Nodes | list[int]) -> None:
        if len(nodes):
            self._chunks.append(nodes)
            self._count += len(nodes)
        if self._count > self._limit:
            self._chunks = [np.unique(self.take())]
            self._count = len(self._chunks[0])
            self._limit = max(_MIN_NOTED, 2 * self._count)

    def take(self) -> Nodes:
        """The nodes since the last call."""
        chunks, self._chunks, self._count = self._chunks, [], 0
        return np.concatenate(chunks).astype(np.int64, copy=False) if chunks else _NONE


class KVEvents:
    """Hears what tiers gain and lose, and finds out, once a step, what of that the store must be told.

    Every statement is true when it is given. What is lost is taken back with the next `drain`; what a running row
    brings is told when the row closes: until then its windows move on with every few tokens.

    Nodes are judged anew only if what was said of them may have changed: with a block of a window group it is those
    at most a window below it, and all below it if it has a sink. The loss of one that nothing said depends on, as of
    most that running rows leave behind, costs nothing.
    """

    def __init__(self, tree: RadixTree, windows: GroupWindows) -> None:
        self._tree = tree
        tree.on_remove = self._removed_from_tree
        self._judge = Resumability(tree, windows)
        self._names = list(tree.tiers)
        self._said: Codes = np.zeros(tree.capacity, dtype=np.uint8)  # per node; see `Resumability`
        # Nodes whose blocks of window groups something resumable that was said depends on; others by mistake.
        self._needed: NDArray[np.bool_] = np.zeros(tree.capacity, dtype=np.bool_)
        self._waits: NDArray[np.bool_] = np.zeros(tree.capacity, dtype=np.bool_)  # for its row to close
        self._fresh: dict[int, list[int]] = {}  # by row
        self._closed, self._gained, self._lost = _Notes(), _Notes(), _Notes()
        # Nodes that gained or lost blocks of window groups.
        self._moved = _Notes()
        self._gone: list[tuple[Removed, Codes]] = []  # and what was said of them

    # ---- what happened ----

    def gained(self, nodes: Nodes, groups: NDArray[np.int64]) -> None:
        """A tier has got blocks of ``nodes [n]``, each for a group."""
        is_index = self._judge.is_index_group[groups]
        self._gained.add(nodes[is_index])
        if self._judge.has_windows:
            self._moved.add(nodes[self._judge.is_window[groups]])

    def lost(self, nodes: Nodes, groups: NDArray[np.int64]) -> None:
        """A tier loses such blocks. The tree has yet to `prune`."""
        self._fit()
        self._lost.add(nodes[self._judge.is_index_group[groups] & (self._said[nodes] > 0)])
        if self._judge.has_windows:
            self._moved.add(nodes[self._judge.is_window[groups] & self._needed[nodes]])

    def brought(self, rows: Sequence[int], nodes: Nodes) -> None:
        """The device has got blocks of ``nodes [n]``, each from a running row: to be told when that closes."""
        self._fit()
        self._waits[nodes] = True
        for row, node in zip(rows, nodes.tolist(), strict=True):
            self._fresh.setdefault(row, []).append(node)

    def closed(self, row: int) -> None:
        """A row runs no more."""
        if row in self._fresh:
            self._closed.add(self._fresh.pop(row))

    def _removed_from_tree(self, removed: Removed) -> None:
        """Nothing holds these nodes any more; their numbers may be given to others."""
        self._fit()
        nodes = np.array(removed.nodes, dtype=np.int64)
        said = self._said[nodes]
        if said.any():
            self._gone.append((removed, said))
            self._said[nodes] = 0
        self._needed[nodes] = self._waits[nodes] = False

    def _fit(self) -> None:
        """Have room for as many nodes as the tree has."""
        if len(self._said) < self._tree.capacity:
            more = self._tree.capacity - len(self._said)
            self._said = np.pad(self._said, (0, more))
            self._needed = np.pad(self._needed, (0, more))
            self._waits = np.pad(self._waits, (0, more))

    # ---- what is said of it ----

    def drain(self) -> list[IndexUpdate]:
        """What the store must hear since the last call, in order."""
        self._fit()
        gone, self._gone = self._gone, []
        statements = [statement for removed, said in gone for statement in self._taken_back(removed, said)]
        if due := self._due():
            segments = segments_of(self._tree, due, self._judge.context)
            codes, needed = self._judge.judge(segments)
            self._needed[needed] = True
            at = np.flatnonzero(segments.is_due)
            before, now = self._said[segments.nodes[at]], codes[at]
            self._said[segments.nodes[at]] = now
            statements += self._statements(segments, at, before, now)
        return statements

    def everything(self) -> list[IndexUpdate]:
        """All that is true now, those blocks included that running rows have yet to tell of."""
        segments = segments_of(self._tree, self._tree.nodes.values(), self._judge.context)
        codes, _ = self._judge.judge(segments)
        at = np.flatnonzero(segments.is_due)
        return self._statements(segments, at, np.zeros(len(at), dtype=np.uint8), codes[at])

    def _due(self) -> list[int]:
        """The nodes of which something else may be true now than was said."""
        if not (self._closed or self._gained or self._lost or self._moved):
            return []
        closed, gained, lost, moved = (notes.take() for notes in (self._closed, self._gained, self._lost, self._moved))
        self._waits[closed] = False
        due = set(closed.tolist())
        if len(gained):
            due.update(gained[(self._said[gained] > 0) | ~self._waits[gained]].tolist())
        if not self._judge.has_full:
            due |= self._unsaid_above(due)
        if self._judge.has_windows:
            lost = np.concatenate([lost, self._depending_on({*moved.tolist(), *closed.tolist()})])
        due.update(lost[self._said[lost] > 0].tolist())
        hashes = self._tree.hashes
        return [node for node in due if hashes[node]]

    def _unsaid_above(self, nodes: Iterable[int]) -> set[int]:
        """What was entered together with ``nodes``, above them, although no tier has any of it."""
        above: set[int] = set()
        for node in nodes:
            while node != ROOT and node not in above and not (self._said[node] or self._waits[node]):
                above.add(node)
                node = self._tree.parents[node]
        return above

    def _depending_on(self, moved: Iterable[int]) -> Nodes:
        """The nodes that may be resumable, or are so no more, because of blocks that ``moved`` ones gained or lost."""
        hashes = self._tree.hashes
        sources = [node for node in moved if hashes[node]]
        if not sources:
            return _NONE
        self._needed[sources] = False  # to be set again by what still depends on them: all that may is judged
        return np.array([*nodes_below(self._tree, sources, self._judge.context)], dtype=np.int64)

    def _taken_back(self, removed: Removed, said: Codes) -> Iterable[IndexUpdate]:
        """What is no more of what was ``said [n]`` of removed nodes."""
        is_start = np.zeros(len(said), dtype=np.bool_)
        is_start[removed.starts] = True
        for place, name in enumerate(self._names):
            gone = np.flatnonzero(said & (RESIDENT << place))
            for begin, end in _runs(gone, is_start[gone]):
                first, last = int(gone[begin]), int(gone[end - 1])
                run = bisect_right(removed.starts, first) - 1
                depth = removed.depths[run] - (last - removed.starts[run])
                yield IndexUpdate(name, depth, tuple(reversed(removed.hashes[first : last + 1])), resident=False)

    def _statements(self, segments: Segments, at: NDArray[np.int64], before: Codes, now: Codes) -> list[IndexUpdate]:
        """What changed of the nodes at the indices ``at [n]`` of segments, of which ``before`` was said."""
        statements: list[IndexUpdate] = []
        for place, name in enumerate(self._names):
            changed = np.flatnonzero((before ^ now) & bits(place))
            if not len(changed):
                continue
            index, code = at[changed], now[changed] >> place
            resident = (code & RESIDENT) > 0
            is_start = segments.first[index] == index
            is_start[1:] |= resident[1:] != resident[:-1]
            statements += [
                self._statement(name, segments, index[begin:end], code[begin:end])
                for begin, end in _runs(index, is_start)
            ]
        return statements

    def _statement(
        self, tier: str, segments: Segments, index: NDArray[np.int64], code: NDArray[np.integer[Any]]
    ) -> IndexUpdate:
        """What a tier holds of a run of nodes at the indices ``index [n]``, by their codes."""
        resident = bool(code[0] & RESIDENT)
        hashes = tuple(map(self._tree.hashes.__getitem__, segments.nodes[index].tolist()))
        resumable = b""
        if resident and self._judge.has_windows:
            flags = (code & RESUMABLE) > 0
            resumable = b"" if flags.all() else flags.astype(np.uint8).tobytes()
        return IndexUpdate(tier, int(segments.depths[index[0]]), hashes, resident, resumable)


def _runs(index: NDArray[np.int64], is_start: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Cut a rising ``index [n]`` where it skips one and where a run starts: the bounds of each piece."""
    if not len(index):
        return []
    cuts = (np.flatnonzero((np.diff(index) != 1) | is_start[1:]) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(index)], strict=True))
