"""What storage is known to have of the paths that an engine has met.

Storage belongs to others too and evicts by itself: what it was known to have is asked again in the background, and
what it has of paths that nobody here asked for is not known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.kv_events import KVEvents
from headwise.cache_controller.radix_tree import ROOT, Nodes, RadixTree

MAX_NODES = 1 << 18
"""Most token blocks of which it is known what storage has."""

AUDIT_S = 2.0
"""Seconds from one audit to the next."""

AUDIT_BLOCKS = 512
"""Most blocks that an audit asks for, of all groups."""


class StoredBlocks:
    """Keeps ``tree.storage``. Of the nodes there, the one confirmed longest ago is the next to be audited, and the
    first to be forgotten when there are more than ``max_nodes``.
    """

    def __init__(self, tree: RadixTree, events: KVEvents, max_nodes: int = MAX_NODES) -> None:
        self._tree, self._events = tree, events
        self._max_nodes = max_nodes
        self._confirmed: OrderedDict[int, None] = OrderedDict()  # nodes, the one confirmed longest ago first
        self._audit_at = 0.0
        self._audited: tuple[list[bytes], NDArray[np.bool_]] | None = None  # what was asked, and known then

    def __len__(self) -> int:
        return len(self._confirmed)

    # ---- what storage said ----

    def found(self, path: Sequence[bytes], stored: NDArray[np.bool_]) -> None:
        """Storage has ``stored [n, groups]`` of the first ``n`` blocks of a path, and nothing else of these."""
        last = int(np.flatnonzero(stored.any(axis=1)).max(initial=-1))
        self._tree.insert(path[: last + 1], ROOT, 0)
        nodes = self._tree.find(path[: len(stored)])
        self._set(nodes, stored[: len(nodes)])

    def put(self, nodes: Nodes, groups: NDArray[np.int64]) -> None:
        """Storage has taken a block of each of ``nodes [n]``, for a group."""
        distinct, index = np.unique(nodes, return_inverse=True)
        held = self._tree.storage.has(distinct)
        held[index, groups] = True
        self._set(distinct, held)

    def missed(self, block_hash: bytes, group: int) -> None:
        """Storage did not have a block that was fetched."""
        node = self._tree.nodes.get(block_hash)
        if node is not None:
            nodes = np.array([node])
            held = self._tree.storage.has(nodes)
            held[:, group] = False
            self._set(nodes, held)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Storage has nothing of these token blocks any more."""
        self._forget([self._tree.nodes[block_hash] for block_hash in hashes if block_hash in self._tree.nodes])

    def reset(self) -> None:
        """Storage has nothing any more, or nothing is known of it."""
        self._forget(list(self._confirmed))
        if self._audited is not None:
            self._audited = [], self._audited[1][:0]  # its answer will come, and says nothing

    # ---- audits ----

    @property
    def is_auditing(self) -> bool:
        """Whether storage has yet to answer an audit."""
        return self._audited is not None

    def begin_audit(self, now: float) -> list[bytes]:
        """Hashes of which to ask storage again; none if it is too early, or the last audit is not over."""
        if now < self._audit_at or self.is_auditing or not self._confirmed:
            return []
        self._audit_at = now + AUDIT_S
        count = max(1, AUDIT_BLOCKS // self._tree.storage.held.shape[1])
        nodes = list(islice(self._confirmed, count))
        hashes = [self._tree.hashes[node] for node in nodes]
        self._audited = hashes, self._tree.storage.has(np.array(nodes))
        return hashes

    def end_audit(self, stored: NDArray[np.bool_]) -> None:
        """Storage has ``stored [n, groups]`` of what the audit asked for. What came there meanwhile is not doubted."""
        assert self._audited is not None, "no audit has begun"
        (hashes, known), self._audited = self._audited, None
        index = [i for i, block_hash in enumerate(hashes) if block_hash in self._tree.nodes]
        nodes = np.array([self._tree.nodes[hashes[i]] for i in index], dtype=np.int64)
        self._set(nodes, self._tree.storage.has(nodes) & ~(known[index] & ~stored[index]))

    # ---- what is known ----

    def _set(self, nodes: Nodes, held: NDArray[np.bool_]) -> None:
        """Let storage have ``held [n, groups]`` of the distinct ``nodes [n]``, and have confirmed it."""
        before = self._tree.storage.has(nodes)
        self._tree.storage.held[nodes] = held
        for node in nodes[held.any(axis=1)][::-1].tolist():  # of a path, the last block is forgotten first
            self._confirmed[node] = None
            self._confirmed.move_to_end(node)
        gained, lost = (held & ~before).nonzero(), (before & ~held).nonzero()
        if len(gained[0]):
            self._events.gained(nodes[gained[0]], gained[1])
        if len(lost[0]):
            self._lost(nodes[lost[0]], lost[1])
        if len(self) > self._max_nodes:
            self._forget(list(islice(self._confirmed, len(self) - self._max_nodes)))

    def _forget(self, forgotten: list[int]) -> None:
        nodes = np.array(forgotten, dtype=np.int64)
        index, groups = self._tree.storage.has(nodes).nonzero()
        self._tree.storage.held[nodes] = False
        self._lost(nodes[index], groups)

    def _lost(self, nodes: Nodes, groups: NDArray[np.int64]) -> None:
        """Storage has lost a block of each of ``nodes [n]``, which may have left them with nothing."""
        for node in nodes[~self._tree.storage.has(nodes).any(axis=1)].tolist():
            self._confirmed.pop(node, None)
        self._events.lost(nodes, groups)
        self._tree.prune(nodes)
