"""The prefix tree: which token blocks are cached, and where, per head group.

A node is one token block of a path; its chained hash names the whole path, so the tree is a dictionary from hash to
node, and a lookup follows the request's own hashes. Nodes are numbers, and what they hold is a row of an array: a
whole path is matched, registered or evicted with a few array operations, whatever the number of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1
ROOT = -1
"""The parent of a path's first block."""

DEVICE_TIER, HOST_TIER, STORAGE_TIER = "device", "host", "storage"
"""Where a block can be, fastest first."""

_CAPACITY = 1024
"""Nodes that there is room for at first."""

Nodes = NDArray[np.int64]


class Residency:
    """Which blocks of one tier hold which nodes of the tree, per head group.

    blocks: ``int32 [capacity, groups]``, the block that holds a node for a group, or `NOWHERE`
    """

    def __init__(self, capacity: int, num_groups: int, num_blocks: int) -> None:
        self.num_groups = num_groups
        self.blocks: NDArray[np.int32] = np.full((capacity, num_groups), NOWHERE, dtype=np.int32)
        self._owner: Nodes = np.full(num_blocks, NOWHERE, dtype=np.int64)  # node * groups + group
        self._generation: NDArray[np.int64] = np.full(num_blocks, NOWHERE, dtype=np.int64)
        self._attached = 0  # generations so far

    def grow(self) -> None:
        """Make room for twice as many nodes."""
        self.blocks = np.concatenate([self.blocks, np.full_like(self.blocks, NOWHERE)])

    def has(self, nodes: Nodes) -> NDArray[np.bool_]:
        """``[n, groups]``: which of ``nodes [n]`` the tier holds, per group."""
        return np.asarray(self.blocks[nodes] != NOWHERE)

    def attach(self, nodes: Nodes, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Let ``blocks [n, groups]`` hold the distinct ``nodes [n]`` where nothing does yet; those that now do.

        An entry of `NOWHERE` holds nothing.
        """
        taken: NDArray[np.bool_] = (blocks != NOWHERE) & (self.blocks[nodes] == NOWHERE)
        index, group = taken.nonzero()
        self.attach_one_by_one(nodes[index], group, blocks[index, group])
        return taken

    def attach_one_by_one(self, nodes: Nodes, groups: Nodes, blocks: NDArray[np.int32]) -> None:
        """Let each of ``blocks`` hold a node for a group, for which nothing does yet."""
        self.blocks[nodes, groups] = blocks
        self._set_owners(blocks, nodes * self.num_groups + groups)

    def move(self, old: NDArray[np.int32], new: NDArray[np.int32]) -> None:
        """Let ``new`` blocks hold what the attached ``old`` ones did."""
        owner = self._owner[old]
        self._owner[old] = self._generation[old] = NOWHERE
        self._set_owners(new, owner)
        self.blocks[np.divmod(owner, self.num_groups)] = new

    def _set_owners(self, blocks: NDArray[np.int32], owners: Nodes) -> None:
        self._owner[blocks] = owners
        self._generation[blocks] = self._attached
        self._attached += 1

    @property
    def num_generations(self) -> int:
        """All generations so far are below that number."""
        return self._attached

    def generations(self, blocks: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Per block a number that changes whenever it comes to hold something; `NOWHERE` if it holds nothing.

        Whoever comes back to a block knows by it whether the block has held the same all the while: its node and
        group do not tell, for numbers of nodes are given anew.
        """
        generations: NDArray[np.int64] = self._generation[blocks]
        return generations

    def owners(self, blocks: NDArray[np.int32]) -> tuple[Nodes, Nodes]:
        """Node and group of each of ``blocks``, which must be attached."""
        node, group = np.divmod(self._owner[blocks], self.num_groups)
        return node, group

    def are_attached(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.asarray(self._owner[blocks] != NOWHERE)

    def detach(self, blocks: NDArray[np.int32]) -> Nodes:
        """Forget ``blocks``; the nodes that they held. `RadixTree.prune` must hear of those."""
        nodes, groups = self.owners(blocks)
        self._owner[blocks] = self._generation[blocks] = NOWHERE
        self.blocks[nodes, groups] = NOWHERE
        return nodes

    def check_integrity(self, nodes: Iterable[int]) -> None:
        """Raise AssertionError unless owners and blocks agree, and none but ``nodes`` are held."""
        owner = np.full_like(self._owner, NOWHERE)
        known = np.zeros(len(self.blocks), dtype=np.bool_)
        known[list(nodes)] = True
        assert (self.blocks[~known] == NOWHERE).all(), "a removed node holds blocks"
        for node, group in zip(*(self.blocks != NOWHERE).nonzero(), strict=True):
            block = self.blocks[node, group]
            assert owner[block] == NOWHERE, f"block {block} has two owners"
            owner[block] = node * self.num_groups + group
        assert (owner == self._owner).all(), "owners and nodes disagree"
        assert ((self._generation == NOWHERE) == (owner == NOWHERE)).all(), "a block's generation outlived what it held"


class Presence:
    """Which nodes of the tree a tier holds, per head group, where nobody need know in which block.

    held: ``bool [capacity, groups]``
    """

    def __init__(self, capacity: int, num_groups: int) -> None:
        self.held: NDArray[np.bool_] = np.zeros((capacity, num_groups), dtype=np.bool_)

    def grow(self) -> None:
        """Make room for twice as many nodes."""
        self.held = np.concatenate([self.held, np.zeros_like(self.held)])

    def has(self, nodes: Nodes) -> NDArray[np.bool_]:
        """``[n, groups]``: which of ``nodes [n]`` the tier holds, per group."""
        return self.held[nodes]


@dataclass(frozen=True, eq=False)
class Removed:
    """Nodes that have left the tree, and the hashes they had, in runs: each goes up a path, block by block.

    starts: where the runs begin
    depths: of the first of each run
    """

    nodes: list[int]
    hashes: list[bytes]
    starts: list[int]
    depths: list[int]


class RadixTree:
    """Nodes by hash, and what holds them on each tier.

    A node is removed once no tier holds any of it and nothing is below it; its number is given anew then.

    nodes:     the number of each known hash
    storage:   what storage is known to have; of no account without ``has_storage``
    tiers:     those that there are by name, fastest first
    capacity:  nodes that the arrays have room for
    hashes, depths, parents: per node; a depth is the index of the block in its path
    first_child, next_sibling: per node, `NOWHERE` behind the last
    tops:      per node, the last of its path's first ``num_top`` nodes: itself if it is one of them
    uses:      per node, how often it was computed or served
    on_remove: told of nodes once they have left the tree
    """

    def __init__(
        self,
        num_groups: int,
        device_blocks: int,
        host_blocks: int = 0,
        *,
        has_storage: bool = False,
        num_top: int = 1,
        on_remove: Callable[[Removed], None] | None = None,
    ) -> None:
        self.nodes: dict[bytes, int] = {}
        self.device = Residency(_CAPACITY, num_groups, device_blocks)
        self.host = Residency(_CAPACITY, num_groups, host_blocks)
        self.storage = Presence(_CAPACITY, num_groups)
        self.tiers: dict[str, Residency | Presence] = {DEVICE_TIER: self.device}
        if host_blocks:
            self.tiers[HOST_TIER] = self.host
        if has_storage:
            self.tiers[STORAGE_TIER] = self.storage
        self.capacity = _CAPACITY
        self.num_top = num_top
        self.on_remove = on_remove
        self.hashes: list[bytes] = []
        self.depths: list[int] = []
        self.parents: list[int] = []
        self.tops: list[int] = []
        self.uses: list[int] = []
        self.first_child: list[int] = []
        self.next_sibling: list[int] = []
        self._previous_sibling: list[int] = []
        self._unused: list[int] = []

    def find(self, hashes: Sequence[bytes]) -> Nodes:
        """The nodes of the longest known prefix of a path, whatever they still hold."""
        known = map(self.nodes.get, hashes)
        return np.fromiter(iter(known.__next__, None), dtype=np.int64)  # up to the first that is not there

    def parent_of(self, block_hash: bytes) -> bytes | None:
        """The hash of the block before one; None: it is the first of its path, or it is not known."""
        parent = self.parents[self.nodes[block_hash]] if block_hash in self.nodes else ROOT
        return None if parent == ROOT else self.hashes[parent]

    def insert(self, path: Sequence[bytes], parent: int, depth: int) -> list[int]:
        """The nodes of a path's blocks from ``depth`` on, below ``parent``; made where they are not there."""
        made = []
        for block_hash in path:
            node = self.nodes.get(block_hash)
            if node is None:
                node = self._make(block_hash, parent, depth)
            made.append(node)
            parent, depth = node, depth + 1
        return made

    def _make(self, block_hash: bytes, parent: int, depth: int) -> int:
        if self._unused:
            node = self._unused.pop()
            self.hashes[node], self.depths[node], self.parents[node], self.uses[node] = block_hash, depth, parent, 1
        else:
            node = len(self.hashes)
            self.hashes.append(block_hash)
            self.depths.append(depth)
            self.parents.append(parent)
            self.tops.append(node)
            self.uses.append(1)
            self.first_child.append(NOWHERE)
            self.next_sibling.append(NOWHERE)
            self._previous_sibling.append(NOWHERE)
            if node == self.capacity:
                self._grow()
        self.nodes[block_hash] = node
        sibling = NOWHERE
        if parent != ROOT:
            sibling = self.first_child[parent]
            self.first_child[parent] = node
            if sibling != NOWHERE:
                self._previous_sibling[sibling] = node
        self.next_sibling[node], self._previous_sibling[node] = sibling, NOWHERE
        self.tops[node] = node if depth < self.num_top else self.tops[parent]
        return node

    def _grow(self) -> None:
        self.capacity *= 2
        for tier in (self.device, self.host, self.storage):
            tier.grow()

    def prune(self, nodes: Nodes) -> None:
        """Remove those of ``nodes`` that no tier holds any more, if nothing is below them."""
        self._prune(nodes[self._are_empty(nodes)].tolist())

    def _prune(self, leaves: Sequence[int]) -> None:
        """Remove those of the empty ``leaves`` that have nothing below them, and what that leaves empty above them."""
        known, hashes, parents, first_child = self.nodes, self.hashes, self.parents, self.first_child
        before, behind = self._previous_sibling, self.next_sibling
        empty = set(leaves)
        runs = Removed([], [], [], [])
        for leaf in leaves:
            if not hashes[leaf] or first_child[leaf] != NOWHERE:
                continue
            runs.starts.append(len(runs.nodes))
            runs.depths.append(self.depths[leaf])
            node = leaf
            while True:
                block_hash, parent = hashes[node], parents[node]
                del known[block_hash]
                runs.nodes.append(node)
                runs.hashes.append(block_hash)
                hashes[node] = b""
                if parent == ROOT:
                    break
                if before[node] == behind[node]:  # both nowhere: an only child
                    first_child[parent] = NOWHERE
                else:
                    self._unlink(node, parent)
                    if first_child[parent] != NOWHERE:
                        break
                if parent not in empty and not self._are_empty(np.array([parent]))[0]:
                    break
                node = parent
        self._unused += runs.nodes
        if runs.nodes and self.on_remove is not None:
            self.on_remove(runs)

    def _unlink(self, node: int, parent: int) -> None:
        """Take a node out of the list of its parent's children."""
        before, behind = self._previous_sibling[node], self.next_sibling[node]
        if before == NOWHERE:
            self.first_child[parent] = behind
        else:
            self.next_sibling[before] = behind
        if behind != NOWHERE:
            self._previous_sibling[behind] = before

    def children(self, node: int) -> list[int]:
        """The nodes right below one."""
        children, child = [], self.first_child[node]
        while child != NOWHERE:
            children.append(child)
            child = self.next_sibling[child]
        return children

    def _are_empty(self, nodes: Nodes) -> NDArray[np.bool_]:
        held = np.zeros(len(nodes), dtype=np.bool_)
        for tier in self.tiers.values():
            held |= tier.has(nodes).any(axis=1)
        return ~held

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, parents and owners agree with the nodes."""
        children: dict[int, set[int]] = {node: set() for node in self.nodes.values()}
        for block_hash, node in self.nodes.items():
            assert self.hashes[node] == block_hash
            parent = self.parents[node]
            if parent != ROOT:
                assert self.nodes.get(self.hashes[parent]) == parent, "a node's parent is not in the tree"
                assert self.depths[node] == self.depths[parent] + 1
                children[parent].add(node)
            is_top = self.depths[node] < self.num_top
            assert self.tops[node] == (node if is_top else self.tops[parent]), "a node has lost the top of its path"
        for node in self.nodes.values():
            assert sorted(self.children(node)) == sorted(children[node]), "a list of children is wrong"
            assert children[node] or not self._are_empty(np.array([node]))[0], "an empty leaf was kept"
        gone = sorted(set(range(len(self.hashes))) - set(self.nodes.values()))
        assert gone == sorted(self._unused), "a node is lost"
        for tier in (self.device, self.host):
            tier.check_integrity(self.nodes.values())
