"""Parts of the prefix tree's paths, laid one behind the other: what holds along many paths is computed at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.radix_tree import NOWHERE, ROOT, Nodes, RadixTree

ALL_BELOW = 1 << 40
"""More levels than a path has."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Nodes in the order of their paths; within a segment each is the parent of the next.

    nodes:  ``[n]``; a node may be in several segments, and is due in one of them at most
    first:  ``[n]``, where each one's segment begins
    depths: ``[n]``
    is_due: ``[n]``, those that were asked for; the others are what is above them
    """

    nodes: Nodes
    first: NDArray[np.int64]
    depths: NDArray[np.int64]
    is_due: NDArray[np.bool_]


def segments_of(tree: RadixTree, due: Collection[int], context: int) -> Segments:
    """The nodes ``due``, each with at least ``context`` of its ancestors, or all of them, before it."""
    parents, depths = tree.parents, tree.depths
    left = set(due)
    nodes: list[int] = []
    is_due: list[bool] = []
    lengths: list[int] = []
    for start in sorted(left, key=depths.__getitem__, reverse=True):
        if start not in left:
            continue
        segment, marks = [], []
        node, above = start, 0
        while node != ROOT:
            if node in left:
                left.remove(node)
                above = 0
            elif above == context:
                break
            else:
                above += 1
            segment.append(node)
            marks.append(not above)
            node = parents[node]
        nodes += reversed(segment)
        is_due += reversed(marks)
        lengths.append(len(segment))
    counts = np.array(lengths, dtype=np.int64)
    first = np.cumsum(counts) - counts
    top = np.array([depths[nodes[at]] for at in first.tolist()], dtype=np.int64)
    first_of = np.repeat(first, counts)
    depth = np.repeat(top - first, counts) + np.arange(len(nodes))
    return Segments(np.array(nodes, dtype=np.int64), first_of, depth, np.array(is_due, dtype=np.bool_))


def nodes_below(tree: RadixTree, sources: Iterable[int], levels: int) -> Iterable[int]:
    """Each of ``sources``, and what is up to so many levels below it; all that is below the tops of paths."""
    first_child, next_sibling, depths = tree.first_child, tree.next_sibling, tree.depths
    left: dict[int, int] = {}  # levels to go from a node on; what the deeper sources reach is not walked again
    for source in sorted(sources, key=depths.__getitem__, reverse=True):
        stack = [(source, ALL_BELOW if depths[source] < tree.num_top else levels)]
        while stack:
            node, reach = stack.pop()
            if left.get(node, -1) >= reach:
                continue
            left[node] = reach
            child = first_child[node] if reach else NOWHERE
            while child != NOWHERE:
                stack.append((child, reach - 1))
                child = next_sibling[child]
    return left.keys()
