"""What engines may evict for the blocks of one that leaves: nothing that is worth more than what comes for it."""

from __future__ import annotations

from collections.abc import Collection

from headwise.storage.index.messages import TIERS
from headwise.storage.index.prefix_index import PrefixIndex, SoleBlocks

_HOST = TIERS.index("host")


def allowances(index: PrefixIndex, node: str, takers: Collection[str], without: Collection[str] = ()) -> dict[str, int]:
    """By taker, how many token blocks of its host are worth less than what the leaving ``node`` alone has, the most
    asked for of the one set against the least asked for of the other.

    A taker's block is worth how often it was asked for lately, or nothing if another engine that stays, or storage,
    has it, too. ``without``: nodes that leave as well. Goes through all runs, twice.
    """
    offered = index.sole_blocks(without).get(node, ())
    staying = index.sole_blocks({*without, node})
    names = [name for name in takers if name in staying]
    evictable = sorted(entry for name in names for entry in _evictable(index, name, staying[name]))
    allowed = dict.fromkeys(takers, 0)
    more = ((blocks.asked, blocks.count) for blocks in offered)
    asked, left = next(more, (0.0, 0))
    for worth, name, count in evictable:
        while count and worth < asked:
            taken = min(count, left)
            allowed[name] += taken
            count, left = count - taken, left - taken
            if not left:
                asked, left = next(more, (0.0, 0))
    return allowed


def _evictable(index: PrefixIndex, name: str, sole: Collection[SoleBlocks]) -> list[tuple[float, str, int]]:
    """Worth, name and number of a taker's blocks; those that others or its storage have, too, are worth nothing."""
    on_host = index.blocks(name)[_HOST]
    alone = [(blocks.asked, name, blocks.count) for blocks in sole if not blocks.in_storage]
    return [(0.0, name, max(0, on_host - sum(count for _, _, count in alone))), *alone]
