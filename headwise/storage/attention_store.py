"""The index of who holds which token block, on which tier. No I/O and no clock: the server hands in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwise.storage.base import TIERS, Flush, Heartbeat, Snapshot, Statement, digest_of

MAX_AHEAD = 1024
"""Flushes of one node kept while an earlier one is missing; those beyond come back with the snapshot."""


@dataclass
class _Node:
    """What one node said last.

    bit:      its bit in the holders' bit sets
    next_seq: of the first flush that is not applied yet
    heard:    the highest seq that any message of this epoch spoke of
    ahead:    flushes that came before an earlier one
    diverged: the digests differed, although no flush is missing
    """

    bit: int
    epoch: int
    next_seq: int = 0
    heard: int = -1
    diverged: bool = False
    ahead: dict[int, Flush] = field(default_factory=dict)
    blocks: dict[str, set[bytes]] = field(default_factory=lambda: {tier: set() for tier in TIERS})
    digests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    @property
    def behind(self) -> bool:
        return self.diverged or self.heard >= self.next_seq


class AttentionStore:
    """Applies the nodes' statements and answers which node holds how much of a prefix.

    Lost, doubled, late and reordered messages, and restarts of either side, converge to what the nodes hold, as
    long as snapshots are asked for from the nodes that `wanting` names. The index advises: the engine's own match
    decides.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # block hash -> per tier, the bit set of nodes that hold it
        self._holders: dict[bytes, list[int]] = {}
        self._applied = 0

    def apply(self, statement: Statement) -> None:
        """Take in one statement. An old epoch's is ignored, a newer epoch drops what the node said before."""
        node = self._nodes.get(statement.node)
        if node is None or statement.epoch > node.epoch:
            self.drop(statement.node)
            node = self._nodes[statement.node] = _Node(self._free_bit(), statement.epoch)
        elif statement.epoch < node.epoch:
            return
        node.heard = max(node.heard, statement.seq)
        if isinstance(statement, Flush):
            self._apply_flush(node, statement)
        elif isinstance(statement, Snapshot):
            self._apply_snapshot(node, statement)
        else:
            self._compare(node, statement)

    def wanting(self) -> list[str]:
        """Nodes of which something was missed: a snapshot of theirs is wanted."""
        return [name for name, node in self._nodes.items() if node.behind]

    def drop(self, node: str) -> None:
        """Forget a node and all it holds; unknown nodes are ignored."""
        gone = self._nodes.pop(node, None)
        if gone is not None:
            for tier in TIERS:
                self._set(gone, tier, tuple(gone.blocks[tier]), resident=False)

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, dict[str, int]]:
        """For every node that holds block 0: how many leading blocks of the path each tier could serve.

        A tier serves what it holds itself together with what faster tiers hold, so counts grow from tier to tier.
        """
        alive = [self._all_bits()] * len(TIERS)
        depths: list[dict[int, int]] = [{} for _ in TIERS]
        for depth, block_hash in enumerate(block_hashes):
            served = 0
            for tier, holders in enumerate(self._holders.get(block_hash, (0,) * len(TIERS))):
                served |= holders
                _record(depths[tier], alive[tier] & ~served, depth)
                alive[tier] &= served
            if not alive[-1]:
                break
        for tier, bits in enumerate(alive):
            _record(depths[tier], bits, len(block_hashes))
        counts = {
            name: {tier: depths[index][node.bit] for index, tier in enumerate(TIERS)}
            for name, node in self._nodes.items()
        }
        return {name: tiers for name, tiers in counts.items() if tiers[TIERS[-1]]}

    def resident(self, node: str, tier: str) -> frozenset[bytes]:
        """The blocks that the index holds resident on a node's tier."""
        known = self._nodes.get(node)
        return frozenset(known.blocks[tier]) if known else frozenset()

    def stats(self) -> dict[str, Any]:
        """Plain data: per node its epoch, next seq, whether a snapshot is wanted, and blocks per tier."""
        nodes = {
            name: {
                "epoch": node.epoch,
                "next_seq": node.next_seq,
                "behind": node.behind,
                "blocks": {tier: len(node.blocks[tier]) for tier in TIERS},
            }
            for name, node in self._nodes.items()
        }
        return {"nodes": nodes, "distinct_blocks": len(self._holders), "statements_applied": self._applied}

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the bit sets, the nodes' sets and the digests say the same."""
        expected: dict[bytes, list[int]] = {}
        for node in self._nodes.values():
            for index, tier in enumerate(TIERS):
                assert node.digests[tier] == digest_of(node.blocks[tier]), f"digest of {tier} is stale"
                for block_hash in node.blocks[tier]:
                    expected.setdefault(block_hash, [0] * len(TIERS))[index] |= 1 << node.bit
        assert expected == self._holders, "holders differ from what the nodes said"

    # ---- statements ----

    def _apply_flush(self, node: _Node, flush: Flush) -> None:
        if flush.seq >= node.next_seq and len(node.ahead) < MAX_AHEAD:
            node.ahead[flush.seq] = flush
        self._catch_up(node)

    def _catch_up(self, node: _Node) -> None:
        """Apply the kept flushes up to the next gap."""
        while (flush := node.ahead.pop(node.next_seq, None)) is not None:
            self._set(node, flush.tier, flush.block_hashes, flush.resident)
            node.next_seq += 1
            self._applied += 1

    def _apply_snapshot(self, node: _Node, snapshot: Snapshot) -> None:
        if snapshot.seq + 1 < node.next_seq:
            return
        for tier in TIERS:
            held = snapshot.tiers.get(tier, frozenset())
            self._set(node, tier, tuple(node.blocks[tier] - held), resident=False)
            self._set(node, tier, tuple(held - node.blocks[tier]), resident=True)
        node.next_seq = snapshot.seq + 1
        node.diverged = False
        node.ahead = {seq: flush for seq, flush in node.ahead.items() if seq > snapshot.seq}
        self._applied += 1
        self._catch_up(node)

    def _compare(self, node: _Node, heartbeat: Heartbeat) -> None:
        if heartbeat.seq + 1 == node.next_seq:
            node.diverged = any(node.digests[tier] != heartbeat.digests.get(tier, 0) for tier in TIERS)

    def _set(self, node: _Node, tier: str, block_hashes: Iterable[bytes], resident: bool) -> None:
        held, index, bit = node.blocks[tier], TIERS.index(tier), 1 << node.bit
        for block_hash in block_hashes:
            if (block_hash in held) == resident:
                continue
            node.digests[tier] ^= int.from_bytes(block_hash, "big")
            holders = self._holders.setdefault(block_hash, [0] * len(TIERS))
            holders[index] ^= bit
            if resident:
                held.add(block_hash)
            else:
                held.remove(block_hash)
                if not any(holders):
                    del self._holders[block_hash]

    # ---- bit sets ----

    def _all_bits(self) -> int:
        bits = 0
        for node in self._nodes.values():
            bits |= 1 << node.bit
        return bits

    def _free_bit(self) -> int:
        taken = self._all_bits()
        return (~taken & (taken + 1)).bit_length() - 1


def _record(depths: dict[int, int], bits: int, depth: int) -> None:
    """Note ``depth`` for every node whose bit is set."""
    while bits:
        low = bits & -bits
        depths[low.bit_length() - 1] = depth
        bits ^= low
