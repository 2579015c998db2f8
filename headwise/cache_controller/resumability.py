"""What each tier lets a request do, node by node: which of a path's blocks it has, and where one may go on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.radix_tree import Nodes, RadixTree
from headwise.cache_controller.segments import Segments
from headwise.cache_controller.windows import GroupWindows

RESIDENT, RESUMABLE = 1, 8
"""Bits of what a tier is said to hold of a node; shifted by the tier's place, fastest first."""

Codes = NDArray[np.uint8]


def bits(place: int) -> int:
    """Those of the tier at a place."""
    return (RESIDENT | RESUMABLE) << place


@dataclass(frozen=True, eq=False)
class _Sinks:
    """The nodes that may hold sink tokens, of all paths of some segments.

    nodes:    ``[m, num_top]``, per path; where it is shorter, its last node again
    is_there: ``[m, num_top]``, those that are not repeated
    path:     ``[n]``, for each node of the segments its path
    """

    nodes: Nodes
    is_there: NDArray[np.bool_]
    path: Nodes


class Resumability:
    """Judges nodes by what the tiers hold. A tier ``t`` together with the faster ones serves ``n`` blocks of a path iff

    - for each of the ``n``, some tier up to ``t`` is resident: among them they have it for all full groups; and
    - of the last one, some resident tier up to ``t`` is resumable: up to there, every window group has its sink and
      what a query behind the ``n`` blocks sees.

    A tier is said to be resident where it has what all full groups need, or where it adds to the faster ones what
    makes either of the two true. Where all groups are windows, the fastest is so wherever there is a node.

    context: ancestors of a node that decide whether it is resumable, the sinks aside
    is_index_group: ``[groups]``, those whose blocks decide whether a tier is resident
    """

    def __init__(self, tree: RadixTree, windows: GroupWindows) -> None:
        self._tree = tree
        self._full = windows.is_full
        groups = np.flatnonzero(~self._full)
        self._windows = groups
        self._seen, self._sink_blocks = windows.seen_blocks[groups], windows.sink_blocks[groups]
        self.has_windows = len(groups) > 0
        self.has_full = bool(self._full.any())
        self.is_window = ~self._full
        self.is_index_group = self._full if self.has_full else self.is_window
        self.context = max(0, int(self._seen.max(initial=0)) - 1)

    def judge(self, segments: Segments) -> tuple[Codes, Nodes]:
        """``[n]``: the codes of the segments' nodes, right for those that are due; and what the resumable ones need:
        nodes without whose blocks of window groups some of them would not be.
        """
        nodes = segments.nodes
        sinks = self._sinks(segments) if self.has_windows else None
        codes: Codes = np.zeros(len(nodes), dtype=np.uint8)
        held = np.zeros((len(nodes), len(self._full)), dtype=np.bool_)
        resident: NDArray[np.bool_] = np.zeros(len(nodes), dtype=np.bool_)
        resumable = resident
        for place, tier in enumerate(self._tree.tiers.values()):
            own = tier.has(nodes)
            held |= own
            was_resident, was_resumable = resident, resumable
            resident = np.asarray(held[:, self._full].all(axis=1))
            if sinks is not None:
                resumable = self._windows_are_there(held, segments) & self._sinks_are_there(place, sinks)
            adds = (resident & ~was_resident) | (resident & resumable & ~was_resumable)
            said = adds | own[:, self._full].all(axis=1) if self.has_full else adds
            codes |= (said.astype(np.uint8) * RESIDENT) << place
            codes |= ((said & resumable).astype(np.uint8) * RESUMABLE) << place
        if sinks is None:
            return codes, nodes[:0]
        return codes, self._needed(segments, sinks, segments.is_due & (codes >= RESUMABLE))

    def _windows_are_there(self, held: NDArray[np.bool_], segments: Segments) -> NDArray[np.bool_]:
        at = np.arange(len(held))[:, None]
        last_gap = np.maximum.accumulate(np.where(held[:, self._windows], -1, at), axis=0)
        needed = np.minimum(segments.depths[:, None] + 1, self._seen)
        return np.asarray((last_gap <= at - needed).all(axis=1))

    def _sinks(self, segments: Segments) -> _Sinks:
        tops = self._tree.tops
        top = np.array([tops[node] for node in segments.nodes.tolist()], dtype=np.int64)
        last, path = np.unique(top, return_inverse=True)
        nodes = np.repeat(last[:, None], self._tree.num_top, axis=1)
        is_there = np.zeros(nodes.shape, dtype=np.bool_)
        for index, node in enumerate(last.tolist()):
            for depth in range(self._tree.depths[node], -1, -1):
                nodes[index, depth], is_there[index, depth] = node, True
                node = self._tree.parents[node]
        return _Sinks(nodes, is_there, path)

    def _sinks_are_there(self, place: int, sinks: _Sinks) -> NDArray[np.bool_]:
        """``[n]``: whether the tiers up to the one at ``place`` have the sinks of each node's path."""
        held = np.zeros((*sinks.nodes.shape, len(self._windows)), dtype=np.bool_)
        for tier in list(self._tree.tiers.values())[: place + 1]:
            held |= tier.has(sinks.nodes)[..., self._windows]
        is_sink = np.arange(self._tree.num_top)[:, None] < self._sink_blocks
        complete = np.asarray((held | ~is_sink | ~sinks.is_there[..., None]).all(axis=(1, 2)))
        return complete[sinks.path]

    def _needed(self, segments: Segments, sinks: _Sinks, resumable: NDArray[np.bool_]) -> Nodes:
        at = np.flatnonzero(resumable)
        begins = np.zeros(len(resumable) + 1, dtype=np.int64)
        np.add.at(begins, np.maximum(segments.first[at], at - self.context), 1)
        np.subtract.at(begins, at + 1, 1)
        seen = segments.nodes[np.cumsum(begins[:-1]) > 0]
        return np.concatenate([seen, sinks.nodes[np.unique(sinks.path[at])].ravel()])
