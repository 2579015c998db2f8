"""What the index must say, the slow way: sets and dictionaries, a block at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.flusher import Ledger
from headwise.storage.index.messages import TIERS

Held = Mapping[str, Mapping[str, Mapping[bytes, bool]]]
"""By node and tier, the resident blocks, and whether each is resumable."""


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


@dataclass(frozen=True)
class Update:
    """An update as the cache manager makes them."""

    tier: str
    start_block: int
    block_hashes: tuple[bytes, ...]
    resident: bool
    resumable: bytes = b""


def paths(count: int, blocks: int) -> list[list[bytes]]:
    """Paths of a tree: path ``i`` shares with path 0 its first ``i * blocks / count`` blocks."""
    first = [block(1 + depth) for depth in range(blocks)]
    fork = [index * blocks // count for index in range(count)]
    return [
        first
        if not index
        else first[: fork[index]] + [block(1000 * index + depth) for depth in range(fork[index], blocks)]
        for index in range(count)
    ]


def depths(held: Held, path: Sequence[bytes]) -> dict[str, tuple[int, int, int]]:
    """By node, what each tier could serve of ``path``: straight from the definition."""
    found = {}
    for node, tiers in held.items():
        counts = []
        for slowest in range(len(TIERS)):
            served = [tiers.get(tier, {}) for tier in TIERS[: slowest + 1]]
            depth = 0
            for index, block_hash in enumerate(path):
                if not any(block_hash in tier for tier in served):
                    break
                if any(tier.get(block_hash) for tier in served):
                    depth = index + 1
            counts.append(depth)
        if any(counts):
            found[node] = (counts[0], counts[1], counts[2])
    return found


def kept(store: AttentionStore, nodes: Iterable[str]) -> Held:
    """What the store keeps."""
    return {
        node: {
            tier: dict.fromkeys(store.resident(node, tier), False)
            | dict.fromkeys(store.resident(node, tier, True), True)
            for tier in TIERS
        }
        for node in nodes
    }


def truth(ledgers: Iterable[Ledger]) -> Held:
    """What the nodes hold."""
    return {
        ledger.node: {tier: {h: bool(flag) for h, flag in held.items()} for tier, held in ledger.blocks.items()}
        for ledger in ledgers
    }
