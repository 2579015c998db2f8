"""Applies the nodes' messages to the prefix index, and finds out when one was missed. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwise.storage.index.allowances import allowances
from headwise.storage.index.messages import (
    HASH_BYTES,
    TIERS,
    Emptied,
    Farewell,
    Flush,
    Gone,
    Heartbeat,
    NodeMessage,
    Snapshot,
)
from headwise.storage.index.prefix_index import MAX_BLOCKS, PrefixIndex
from headwise.storage.index.storable import worth_storing

MAX_AHEAD = 1024
"""Flushes of one node that are kept while an earlier one is missing. A snapshot makes up for the others."""

MAX_GONE = 65_536
"""The store remembers at most so many nodes as gone."""


@dataclass
class _Node:
    """What is known of one node.

    next_seq: number of the first flush that is not applied yet
    heard:    the highest seq that any message of this epoch had
    ahead:    flushes that came before an earlier one
    agrees:   whether the last digests that could be compared were equal; None if none were compared yet
    volume:   the name of its storage
    """

    epoch: int
    next_seq: int = 0
    heard: int = -1
    agrees: bool | None = None
    volume: str = ""
    ahead: dict[int, Flush] = field(default_factory=dict)

    @property
    def behind(self) -> bool:
        return self.agrees is False or self.heard >= self.next_seq


class AttentionStore:
    """Applies the nodes' messages and answers which node holds how much of a prefix.

    After lost, doubled, late or reordered messages, and after a restart of either side, the index becomes equal to
    what the nodes hold, provided that the nodes in `wanting` are asked for snapshots. The index advises: the engine's
    own match decides.

    applied: flushes and snapshots taken in so far
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._index = PrefixIndex(max_blocks)
        self._nodes: dict[str, _Node] = {}
        self._gone: dict[str, int] = {}  # node -> the last epoch of it that is void
        self._behind: set[str] = set()
        self.applied = self._snapshots = 0

    def apply(self, message: NodeMessage | Gone | Farewell | Emptied) -> bool:
        """Apply one message. One of an old epoch is ignored (False); a newer epoch drops what the node said before."""
        if isinstance(message, Gone | Farewell):
            self._void(message)
            return True
        node = self._nodes.get(message.node)
        if isinstance(message, Emptied):
            if node is not None and node.epoch == message.epoch:
                self._index.disinherit(message.node)
            return True
        if node is None or message.epoch > node.epoch:
            if message.epoch <= self._gone.get(message.node, -1):
                return False
            self.drop(message.node)
            node = self._nodes[message.node] = _Node(message.epoch)
        elif message.epoch < node.epoch:
            return False
        if message.seq > node.heard:
            node.heard = message.seq
        if isinstance(message, Flush):
            self._apply_flush(node, message)
        elif isinstance(message, Snapshot):
            self._apply_snapshot(node, message)
        else:
            self._compare(node, message)
        if node.behind:
            self._behind.add(message.node)
        else:
            self._behind.discard(message.node)
        return True

    def epoch(self, node: str) -> int:
        """The node's highest epoch, of those it used and those that `Gone` made void; -1: the node is not known."""
        known = self._nodes.get(node)
        return max(-1 if known is None else known.epoch, self._gone.get(node, -1))

    def has(self, node: str) -> bool:
        """Whether there is a node of this name."""
        return node in self._nodes

    def wanting(self) -> list[str]:
        """The nodes that must send a snapshot, because one of their messages was missed."""
        return list(self._behind)

    def drop(self, node: str) -> bool:
        """Forget a node and all it holds. False: it was not known."""
        self._behind.discard(node)
        self._index.drop(node)
        return self._nodes.pop(node, None) is not None

    def match(self, block_hashes: bytes | Sequence[bytes]) -> dict[str, tuple[int, int, int]]:
        """See `PrefixIndex.match`."""
        return self._index.match(block_hashes)

    def resident(self, node: str, tier: str, resumable: bool = False) -> frozenset[bytes]:
        """See `PrefixIndex.resident`."""
        return self._index.resident(node, tier, resumable)

    def worth(self, without: Collection[str] = ()) -> dict[str, float]:
        """See `PrefixIndex.worth`."""
        return self._index.worth(without)

    def sole_blocks(self, node: str, without: Collection[str], most: int) -> bytes:
        """The hashes of at most ``most`` of the node's sole blocks, the most asked for first: see
        `PrefixIndex.sole_blocks`."""
        held = self._index.sole_blocks(without).get(node, ())
        return b"".join(blocks.hashes for blocks in held)[: most * HASH_BYTES]

    def shares_storage(self, node: str, without: Collection[str]) -> bool:
        """See `PrefixIndex.shares_storage`."""
        return self._index.shares_storage(node, without)

    def worth_storing(self, node: str, without: Collection[str]) -> int:
        """See `headwise.storage.index.storable`."""
        return worth_storing(self._index, node, without)

    def allowances(self, node: str, takers: Collection[str], without: Collection[str]) -> dict[str, int]:
        """See `headwise.storage.index.allowances`."""
        return allowances(self._index, node, takers, without)

    def cool(self, share: float) -> None:
        """See `PrefixIndex.cool`."""
        self._index.cool(share)

    def stats(self) -> dict[str, Any]:
        """Plain data: the index's size, and per node what is known of it.

        nodes: epoch, next_seq; behind: a snapshot is wanted; agrees: whether the last digests were the same; volume;
               blocks and resumable by tier; forgotten: blocks that the node holds and the index has no room for
        """
        index = self._index
        return {
            "nodes": {name: self._node_stats(name, node) for name, node in self._nodes.items()},
            "distinct_blocks": len(index),
            "max_blocks": index.max_blocks,
            "runs": index.num_runs,
            "forgotten_blocks": index.forgotten,
            "statements_applied": self.applied,
            "snapshots_applied": self._snapshots,
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the index agrees with itself: see `PrefixIndex.check_integrity`."""
        self._index.check_integrity()
        behind = {name for name, node in self._nodes.items() if node.behind}
        assert behind == self._behind, f"{sorted(behind)} are behind, known are {sorted(self._behind)}"

    # ---- messages ----

    def _void(self, gone: Gone | Farewell) -> None:
        self._gone[gone.node] = max(gone.epoch, self._gone.pop(gone.node, -1))
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        node = self._nodes.get(gone.node)
        if node is not None and node.epoch <= gone.epoch:
            if isinstance(gone, Farewell):
                self._index.bequeath(gone.node)
            self.drop(gone.node)

    def _apply_flush(self, node: _Node, flush: Flush) -> None:
        if flush.seq == node.next_seq:
            self._keep(node, flush)
            if node.ahead:
                self._catch_up(node)
        elif flush.seq > node.next_seq and len(node.ahead) < MAX_AHEAD:
            node.ahead[flush.seq] = flush

    def _catch_up(self, node: _Node) -> None:
        """Apply the kept flushes up to the next gap."""
        while (flush := node.ahead.pop(node.next_seq, None)) is not None:
            self._keep(node, flush)

    def _keep(self, node: _Node, flush: Flush) -> None:
        self._index.apply(flush.node, flush.tier, flush.block_hashes, flush.resident, flush.resumable)
        node.next_seq += 1
        self.applied += 1

    def _apply_snapshot(self, node: _Node, snapshot: Snapshot) -> None:
        if snapshot.seq + 1 < node.next_seq or not (node.behind or snapshot.seq + 1 > node.next_seq):
            return
        self._index.drop(snapshot.node)
        self._index.set_volume(snapshot.node, node.volume)
        for tier, (block_hashes, resumable) in snapshot.tiers.items():
            self._index.apply(snapshot.node, tier, block_hashes, True, resumable)
        node.next_seq = snapshot.seq + 1
        node.agrees = None
        node.ahead = {seq: flush for seq, flush in node.ahead.items() if seq > snapshot.seq}
        self.applied += 1
        self._snapshots += 1
        self._catch_up(node)

    def _compare(self, node: _Node, heartbeat: Heartbeat) -> None:
        node.volume = heartbeat.volume
        self._index.set_volume(heartbeat.node, heartbeat.volume)
        if heartbeat.seq + 1 == node.next_seq:
            node.agrees = self._index.digests(heartbeat.node) == heartbeat.digests

    def _node_stats(self, name: str, node: _Node) -> dict[str, Any]:
        blocks = self._index.blocks(name)
        return {
            "epoch": node.epoch,
            "next_seq": node.next_seq,
            "behind": node.behind,
            "agrees": node.agrees,
            "volume": node.volume,
            "blocks": dict(zip(TIERS, blocks, strict=False)),
            "resumable": dict(zip(TIERS, blocks[len(TIERS) :], strict=True)),
            "forgotten": self._index.forgotten_blocks(name),
        }
