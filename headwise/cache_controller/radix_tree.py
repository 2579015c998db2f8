"""The prefix tree: which token blocks are cached, and where, per head group.

A node is one token block of a path; its chained hash names the whole path, so the tree is a dictionary from hash to
node, and a lookup follows the request's own hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NOWHERE = -1


@dataclass(eq=False, slots=True)
class Node:
    """One token block of a path.

    depth:    index of the block in its path
    device:   per group, the device block that holds it, or `NOWHERE`
    resident: number of groups that hold it on the device
    children: number of nodes below
    """

    hash: bytes
    parent: Node | None
    depth: int
    device: list[int]
    resident: int = 0
    children: int = 0


@dataclass
class RadixTree:
    """Nodes by hash, and the owner of every registered device block.

    A node is removed once no tier holds any of it and nothing is below it.
    """

    num_groups: int
    nodes: dict[bytes, Node] = field(default_factory=dict)
    _owners: dict[int, tuple[Node, int]] = field(default_factory=dict)

    def find(self, hashes: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest known prefix of a path, whatever they still hold."""
        found = []
        for block_hash in hashes:
            node = self.nodes.get(block_hash)
            if node is None:
                break
            found.append(node)
        return found

    def insert(self, block_hash: bytes, parent: Node | None, depth: int) -> Node:
        """The node of a hash, made if it is not there."""
        node = self.nodes.get(block_hash)
        if node is None:
            node = Node(block_hash, parent, depth, [NOWHERE] * self.num_groups)
            self.nodes[block_hash] = node
            if parent is not None:
                parent.children += 1
        return node

    def attach(self, node: Node, group: int, block: int) -> None:
        """Say that ``block`` holds ``node`` for ``group``. The group must not be resident yet."""
        node.device[group] = block
        node.resident += 1
        self._owners[block] = (node, group)

    def detach(self, block: int) -> tuple[Node, int]:
        """Forget a device block: its node and the group. Removes nodes that hold nothing any more."""
        node, group = self._owners.pop(block)
        node.device[group] = NOWHERE
        node.resident -= 1
        if node.resident == 0 and node.children == 0:
            self._prune(node)
        return node, group

    def _prune(self, node: Node | None) -> None:
        while node is not None and node.resident == 0 and node.children == 0:
            del self.nodes[node.hash]
            node = node.parent
            if node is not None:
                node.children -= 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, parents and owners agree with the nodes."""
        children: dict[bytes, int] = dict.fromkeys(self.nodes, 0)
        blocks: dict[int, tuple[Node, int]] = {}
        for block_hash, node in self.nodes.items():
            assert node.hash == block_hash
            assert node.resident == sum(block != NOWHERE for block in node.device), "a resident count is wrong"
            if node.parent is not None:
                assert self.nodes.get(node.parent.hash) is node.parent, "a node's parent is not in the tree"
                assert node.depth == node.parent.depth + 1
                children[node.parent.hash] += 1
            for group, block in enumerate(node.device):
                if block != NOWHERE:
                    assert block not in blocks, f"block {block} has two owners"
                    blocks[block] = (node, group)
        assert all(node.children == children[node.hash] for node in self.nodes.values()), "a child count is wrong"
        assert all(node.resident or node.children for node in self.nodes.values()), "an empty leaf was kept"
        assert blocks == self._owners, "owners and nodes disagree"
