"""Blocks on their way to the host, from storage or from other engines: each comes once, whoever asked for it first.

    expect  -->  held, and known to nobody  -->  end: known to the prefix tree, or free again

What comes is held, so that nobody else is given the block, and the tree knows it once its source says that it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.kv_events import KVEvents
from headwise.cache_controller.radix_tree import NOWHERE, ROOT, RadixTree

MAX_IN_FLIGHT = 0.25
"""Share of the host's blocks that may be on their way from one source. Held blocks cannot be evicted."""

MAX_OF_ONE = 0.75
"""Share of them that may come for one request, part after part. What came first would be evicted for the last."""


class Source(Protocol):
    """Where blocks come from."""

    def reported(self, came: Sequence[Arrival], missed: Sequence[Arrival]) -> None:
        """All workers have copied what ``came``, and one at least could not copy what it ``missed``."""

    def hit(self, tokens: int) -> None:
        """All has come that lets so many more tokens of a request be served."""


@dataclass(eq=False)
class Fetch:
    """What was asked for on behalf of one request.

    gained: tokens more that can be served if all of it comes
    source: told if it does
    left:   blocks still on their way
    missed: whether one did not come
    """

    gained: int
    source: Source | None = None
    left: int = 0
    missed: bool = False


@dataclass(eq=False)
class Arrival:
    """A block on its way: where it belongs, where it comes to, who brings it and who waits for it.

    is_void: it was forgotten meanwhile, and counts as missed
    """

    path: Sequence[bytes]
    column: int
    group: int
    block: int
    source: Source
    waiting: list[Fetch]
    is_void: bool = False

    @property
    def hash(self) -> bytes:
        return self.path[self.column]

    @property
    def key(self) -> tuple[bytes, int]:
        return self.path[self.column], self.group


class Arrivals:
    """Owns the host blocks that something is on its way to.

    pool:   the host's
    events: told of nodes that gained blocks on the host
    """

    def __init__(self, tree: RadixTree, pool: BlockPool, events: KVEvents) -> None:
        self._tree, self._pool, self._events = tree, pool, events
        self._most = max(1, int(MAX_IN_FLIGHT * pool.num_blocks))
        self._by_key: dict[tuple[bytes, int], Arrival] = {}
        self._by_block: dict[int, Arrival] = {}

    @property
    def num_blocks(self) -> int:
        """Of the host."""
        return self._pool.num_blocks

    @property
    def most(self) -> int:
        """Blocks that may be on their way from one source."""
        return self._most

    def room_for_one(self, num_come: int) -> int:
        """Blocks that may come yet for a request for which so many have."""
        return max(0, min(int(MAX_OF_ONE * self._pool.num_blocks) - num_come, self._pool.num_available))

    def room(self, num_coming: int) -> int:
        """Blocks that a source may bring now, of which so many are on their way."""
        return max(0, min(self._most - num_coming, self._pool.num_available))

    def expect(
        self, source: Source, path: Sequence[bytes], wanted: NDArray[np.bool_], gained: int
    ) -> tuple[Fetch, list[Arrival]]:
        """Make room for the blocks ``wanted [n, groups]`` of a path; those for the source to bring. The others of them
        are on their way already.

        Raises ValueError if the pool has not so many available.
        """
        fetch = Fetch(gained, source)
        asked = [(column, group) for column, group in np.argwhere(wanted).tolist()]
        new = [at for at in asked if (path[at[0]], at[1]) not in self._by_key]
        arrivals = []
        for (column, group), block in zip(new, self._pool.allocate(len(new)).tolist(), strict=True):
            arrival = Arrival(path, column, group, block, source, [])
            self._by_key[arrival.key] = self._by_block[block] = arrival
            arrivals.append(arrival)
        for column, group in asked:
            self._by_key[path[column], group].waiting.append(fetch)
        fetch.left = len(asked)
        return fetch, arrivals

    def awaited(self, fetch: Fetch) -> list[Arrival]:
        """What a fetch waits for."""
        return [arrival for arrival in self._by_block.values() if fetch in arrival.waiting]

    def leave(self, fetch: Fetch) -> list[Arrival]:
        """Nobody waits for a fetch any more; what it waited for."""
        left = self.awaited(fetch)
        for arrival in left:
            arrival.waiting.remove(fetch)
        return left

    def are_coming(self, path: Sequence[bytes], num_groups: int) -> NDArray[np.bool_]:
        """``[n, groups]``: which blocks of a path are on their way."""
        coming = [[(block_hash, group) in self._by_key for group in range(num_groups)] for block_hash in path]
        return np.array(coming, dtype=np.bool_).reshape(len(path), num_groups)

    def reported(self, came: Sequence[int], missed: Sequence[int]) -> None:
        """Workers have copied to these host blocks, or could not: let the sources know."""
        outcomes: dict[Source, tuple[list[Arrival], list[Arrival]]] = {}
        for index, blocks in enumerate((came, missed)):
            for block in blocks:
                arrival = self._by_block[block]
                outcomes.setdefault(arrival.source, ([], []))[index].append(arrival)
        for source, outcome in outcomes.items():
            source.reported(*outcome)

    def end(self, came: Sequence[Arrival], missed: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
        """Blocks are on the host, or do not come; nobody writes to them any more.

        Returns those that can be served from now on, and the others: of what came, what was forgotten meanwhile is one.
        """
        there = [arrival for arrival in came if not arrival.is_void]
        lacking = [*missed, *(arrival for arrival in came if arrival.is_void)]
        self._attach(there)
        for arrivals, is_missed in ((there, False), (lacking, True)):
            for arrival in arrivals:
                del self._by_key[arrival.key], self._by_block[arrival.block]
                _tell(arrival.waiting, is_missed)
        self._pool.release(_blocks_of([*there, *lacking]))
        return there, lacking

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Nothing that is on its way of these token blocks may be served."""
        forgotten = set(hashes)
        for arrival in self._by_block.values():
            arrival.is_void |= arrival.hash in forgotten

    def _attach(self, came: Sequence[Arrival]) -> None:
        """Let the tree know the blocks, but for those that the host has got otherwise meanwhile."""
        node = np.array([self._node_of(arrival.path, arrival.column) for arrival in came], dtype=np.int64)
        group = np.array([arrival.group for arrival in came], dtype=np.int64)
        blocks = _blocks_of(came)
        lacked = self._tree.host.blocks[node, group] == NOWHERE
        self._tree.host.attach_one_by_one(node[lacked], group[lacked], blocks[lacked])
        self._pool.register(blocks[lacked])
        self._events.gained(node[lacked], group[lacked])

    def _node_of(self, path: Sequence[bytes], column: int) -> int:
        """The node of a path's block; made where it is not there, as are those above it."""
        nodes, first = self._tree.nodes, column
        while first >= 0 and path[first] not in nodes:
            first -= 1
        parent = nodes[path[first]] if first >= 0 else ROOT
        return [parent, *self._tree.insert(path[first + 1 : column + 1], parent, first + 1)][-1]

    def held_host_blocks(self) -> set[int]:
        """The host blocks to which something is on its way."""
        return set(self._by_block)


def _blocks_of(arrivals: Sequence[Arrival]) -> NDArray[np.int32]:
    return np.array([arrival.block for arrival in arrivals], dtype=np.int32)


def _tell(waiting: Iterable[Fetch], is_missed: bool) -> None:
    """Let those who waited for a block know that it came, or did not."""
    for fetch in waiting:
        fetch.left -= 1
        fetch.missed |= is_missed
        if not fetch.left and not fetch.missed and fetch.source is not None:
            fetch.source.hit(fetch.gained)
