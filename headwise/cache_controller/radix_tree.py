"""The prefix tree: which token blocks are cached, and where, per head group.

A node is one token block of a path; its chained hash names the whole path, so the tree is a dictionary from hash to
node, and a lookup follows the request's own hashes. Nodes are numbers, and what they hold is a row of an array: a
whole path is matched, registered or evicted with a few array operations, whatever the number of groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1
ROOT = -1
"""The parent of a path's first block."""

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

    def grow(self) -> None:
        """Make room for twice as many nodes."""
        self.blocks = np.concatenate([self.blocks, np.full_like(self.blocks, NOWHERE)])

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
        self._owner[blocks] = nodes * self.num_groups + groups

    def move(self, old: NDArray[np.int32], new: NDArray[np.int32]) -> None:
        """Let ``new`` blocks hold what the attached ``old`` ones did."""
        owner = self._owner[old]
        self._owner[old] = NOWHERE
        self._owner[new] = owner
        self.blocks[np.divmod(owner, self.num_groups)] = new

    def owner(self, block: np.int32) -> int:
        """What a block holds, as a number that no other node and group has; `NOWHERE` if it holds nothing."""
        return int(self._owner[block])

    def owner_ids(self, blocks: NDArray[np.int32]) -> Nodes:
        """`owner` of each of ``blocks``."""
        return self._owner[blocks]

    def owners(self, blocks: NDArray[np.int32]) -> tuple[Nodes, Nodes]:
        """Node and group of each of ``blocks``, which must be attached."""
        node, group = np.divmod(self._owner[blocks], self.num_groups)
        return node, group

    def are_attached(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.asarray(self._owner[blocks] != NOWHERE)

    def detach(self, blocks: NDArray[np.int32]) -> Nodes:
        """Forget ``blocks``; the nodes that they held. `RadixTree.prune` must hear of those."""
        nodes, groups = self.owners(blocks)
        self._owner[blocks] = NOWHERE
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


class RadixTree:
    """Nodes by hash, and what holds them on each tier.

    A node is removed once no tier holds any of it and nothing is below it; its number is given anew then.

    nodes: the number of each known hash
    hashes, depths, parents: per node; a depth is the index of the block in its path
    uses:  per node, how often it was computed or served
    """

    def __init__(self, num_groups: int, device_blocks: int, host_blocks: int = 0) -> None:
        self.nodes: dict[bytes, int] = {}
        self.device = Residency(_CAPACITY, num_groups, device_blocks)
        self.host = Residency(_CAPACITY, num_groups, host_blocks)
        self.hashes: list[bytes] = []
        self.depths: list[int] = []
        self.parents: list[int] = []
        self.uses: list[int] = []
        self._children: list[int] = []
        self._unused: list[int] = []
        self._tiers = (self.device, self.host) if host_blocks else (self.device,)

    def find(self, hashes: Sequence[bytes]) -> Nodes:
        """The nodes of the longest known prefix of a path, whatever they still hold."""
        known = map(self.nodes.get, hashes)
        return np.fromiter(iter(known.__next__, None), dtype=np.int64)  # up to the first that is not there

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
            self.uses.append(1)
            self._children.append(0)
            if node == len(self.device.blocks):
                for tier in (self.device, self.host):
                    tier.grow()
        self.nodes[block_hash] = node
        if parent != ROOT:
            self._children[parent] += 1
        return node

    def prune(self, nodes: Nodes) -> None:
        """Remove those of ``nodes`` that no tier holds any more, if nothing is below them."""
        self._prune(nodes[self._are_empty(nodes)].tolist())

    def _prune(self, leaves: Sequence[int]) -> None:
        """Remove those of the empty ``leaves`` that have nothing below them, and what that leaves empty above them."""
        known, hashes, parents, children = self.nodes, self.hashes, self.parents, self._children
        empty = set(leaves)
        for leaf in leaves:
            node = leaf
            while hashes[node] and not children[node]:
                del known[hashes[node]]
                hashes[node] = b""
                self._unused.append(node)
                node = parents[node]
                if node == ROOT:
                    break
                children[node] -= 1
                if node not in empty and not self._is_empty(node):
                    break

    def _is_empty(self, node: int) -> bool:
        return all((tier.blocks[node] == NOWHERE).all() for tier in self._tiers)

    def _are_empty(self, nodes: Nodes) -> NDArray[np.bool_]:
        empty = (self.device.blocks[nodes] == NOWHERE).all(axis=1)
        for tier in self._tiers[1:]:
            empty &= (tier.blocks[nodes] == NOWHERE).all(axis=1)
        return np.asarray(empty)

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, parents and owners agree with the nodes."""
        children = [0] * len(self.hashes)
        for block_hash, node in self.nodes.items():
            assert self.hashes[node] == block_hash
            parent = self.parents[node]
            if parent != ROOT:
                assert self.nodes.get(self.hashes[parent]) == parent, "a node's parent is not in the tree"
                assert self.depths[node] == self.depths[parent] + 1
                children[parent] += 1
        for node in self.nodes.values():
            assert self._children[node] == children[node], "a child count is wrong"
            assert children[node] or not self._is_empty(node), "an empty leaf was kept"
        gone = sorted(set(range(len(self.hashes))) - set(self.nodes.values()))
        assert gone == sorted(self._unused), "a node is lost"
        for tier in (self.device, self.host):
            tier.check_integrity(self.nodes.values())
