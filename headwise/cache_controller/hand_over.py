"""What an engine that is about to end puts into storage: blocks that nobody else has, the most valuable first.

    device block   --store-->   host block   --put-->   storage

A slice at a time, so that what is worth most is written first and little is evicted from the host before its turn. What
storage refuses is not tried again; a storage that does not answer ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import numpy as np

from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.radix_tree import NOWHERE, RadixTree
from headwise.cache_controller.tiers import Host

IN_FLIGHT = 0.25
"""Share of the host's blocks that may be on their way to the host and to storage."""


class HandOver:
    """Owned by the engine's thread; nothing moves but by `advance` and the engine's steps.

    hashes:  of the token blocks to put there, in this order, as far as they are cached; None: all that is cached, the
             most recently used first
    most:    of them, the first ones; None: all. What is computed since then goes there besides
    is_over: nothing is left to do
    """

    def __init__(
        self,
        tree: RadixTree,
        device: BlockPool,
        host: Host,
        hashes: Iterable[bytes] | None,
        most: int | None = None,
    ) -> None:
        self.is_over = not host.storage.is_there
        self._tree, self._host = tree, host
        self._known = told_of(tree, device)
        self._queue = deque(islice(most_recent_first(tree, device) if hashes is None else hashes, most))
        self._is_last = False

    def advance(self, is_last: bool) -> None:
        """Start the next copies. ``is_last``: nothing is computed any more, so that what was computed since the
        beginning can go, too."""
        host, storage = self._host.stats(), self._host.storage.stats()
        if host is None or storage is None or storage.is_stalled:
            self.is_over = True
        if self.is_over or host is None or storage is None:
            return
        if is_last and not self._is_last:
            self._is_last = True
            self._queue.extend(block for block in self._tree.nodes if block not in self._known)
        in_flight = host.queued_blocks + storage.queued_puts
        room = max(1, int(IN_FLIGHT * host.total_blocks)) - in_flight
        while self._queue and room > 0:
            count = min(len(self._queue), -(-room // self._tree.device.num_groups))
            room -= self._start([self._queue.popleft() for _ in range(count)])
        self._start(())  # what waits for room on the host may have some now
        self.is_over = self._is_last and not self._queue and not in_flight and self._is_idle()

    def _start(self, hashes: Iterable[bytes]) -> int:
        """Have those of these token blocks copied that storage lacks; how many blocks those are, over all groups."""
        tree = self._tree
        nodes = np.array([tree.nodes[block] for block in hashes if block in tree.nodes], dtype=np.int64)
        lacks = ~tree.storage.has(nodes)
        on_host, on_device = tree.host.blocks[nodes], tree.device.blocks[nodes]
        puts = on_host[lacks & (on_host != NOWHERE)]
        stores = on_device[lacks & (on_host == NOWHERE) & (on_device != NOWHERE)]
        self._host.storage.put(puts)
        self._host.store(stores)
        return len(puts) + len(stores)

    def _is_idle(self) -> bool:
        host, storage = self._host.stats(), self._host.storage.stats()
        return not (host and host.queued_blocks) and not (storage and storage.queued_puts)


def told_of(tree: RadixTree, device: BlockPool) -> set[bytes]:
    """Hashes of the token blocks that the index may know. Of what a running row holds it hears at the row's end."""
    names, nodes = list(tree.nodes), np.fromiter(tree.nodes.values(), dtype=np.int64)
    blocks = tree.device.blocks[nodes]
    is_held = (blocks != NOWHERE) & ~device.are_unheld(blocks)
    return {names[index] for index in (~is_held.any(axis=1)).nonzero()[0].tolist()}


def most_recent_first(tree: RadixTree, device: BlockPool) -> list[bytes]:
    """Hashes of all token blocks that are cached on the device, and then of the others."""
    nodes, _ = tree.device.owners(device.next_evicted(device.num_cached)[::-1])
    recent = dict.fromkeys(tree.hashes[node] for node in nodes.tolist())
    return [*recent, *(block for block in tree.nodes if block not in recent)]
