"""How much of what leaving engines alone have is worth its room in storage that is full."""

from __future__ import annotations

from collections.abc import Collection

from headwise.storage.index.prefix_index import PrefixIndex


def worth_storing(index: PrefixIndex, node: str, without: Collection[str] = ()) -> int:
    """How many token blocks of a leaving node, the first of its `PrefixIndex.sole_blocks`, storage should get even if
    each of them evicts another one: as many as gain the most.

    All engines that leave, ``without`` the other ones, are looked at together: the most asked for of what only they
    have goes first. What it evicts is what nobody has written, read or looked for the longest, and is lost with as
    much as it was asked for lately; or with nothing, if an engine that stays has it in memory. Goes through all runs,
    once for each that leaves and once more.
    """
    leaving = {node, *without}
    offered = sorted(
        (-blocks.asked, name != node, blocks.count, blocks.in_storage)
        for name in leaving
        for blocks in index.sole_blocks(leaving - {name}).get(name, ())
    )
    evicted = index.stored(node, leaving)
    gain = best = 0.0
    own = worth = 0
    lost, left = 0.0, 0
    for asked, is_others, count, is_there in offered:
        own += count if is_there and not is_others else 0
        rest = 0 if is_there else count
        while rest:
            if not left:
                lost, left = next(evicted, (0.0, rest))
            taken = min(rest, left)
            rest, left = rest - taken, left - taken
            gain += (-asked - lost) * taken
            own += 0 if is_others else taken
            if gain > best:
                best, worth = gain, own
    return worth
