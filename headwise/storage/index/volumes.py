"""Which nodes share a storage, as bit sets of nodes."""

from __future__ import annotations


class Volumes:
    """The nodes of each volume. A node with an empty volume shares its storage with no other node.

    shared: the bit sets of the volumes that have several nodes
    """

    def __init__(self) -> None:
        self.shared: tuple[int, ...] = ()
        self._of: dict[int, str] = {}  # by a node's bit
        self._nodes: dict[str, int] = {}

    def assign(self, bit: int, volume: str) -> None:
        """The node of this bit has this volume from now on; empty: it shares its storage with no other node."""
        before = self._of.pop(bit, "")
        if volume:
            self._of[bit] = volume
        if before == volume:
            return
        if before:
            self._nodes[before] ^= bit
            if not self._nodes[before]:
                del self._nodes[before]
        if volume:
            self._nodes[volume] = self._nodes.get(volume, 0) | bit
        self.shared = tuple(nodes for nodes in self._nodes.values() if nodes & (nodes - 1))

    def of(self, bit: int) -> str:
        """The volume of the node of this bit; empty: it shares its storage with no other node."""
        return self._of.get(bit, "")

    def check_integrity(self, known: int) -> None:
        """Raise `AssertionError` unless both directions agree, for ``known`` nodes only."""
        nodes: dict[str, int] = {}
        for bit, volume in self._of.items():
            assert bit & known, "a volume has an unknown node"
            nodes[volume] = nodes.get(volume, 0) | bit
        assert nodes == self._nodes, "nodes and volumes disagree"
