"""Prefix hits: how much of a path of blocks every head group can serve, from the device or with the host's help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Fetch
from headwise.cache_controller.copy_costs import CopyCosts
from headwise.cache_controller.eviction import RESUME_SLACK
from headwise.cache_controller.radix_tree import NOWHERE, RadixTree
from headwise.cache_controller.tiers import Host
from headwise.cache_controller.windows import GroupWindows


@dataclass(frozen=True, eq=False)
class PrefixMatch:
    """A prefix that can be served from the cache.

    blocks:  ``int32 [groups, num_blocks]``, what a sequence that starts with it may still see of it and is on the
             device; else `NOWHERE`
    reached: blocks of the prefix that could be served if no window group had lost its own, and no state were missing
    without_states: those that could be if no state were missing
    nodes:   ``[num_blocks]``, the prefix in the tree
    host:    like ``blocks``: what must be brought from the host; None if nothing
    gained:  blocks of the prefix that could not be served without the host
    """

    blocks: NDArray[np.int32]
    reached: int = 0
    without_states: int = 0
    nodes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    host: NDArray[np.int32] | None = None
    gained: int = 0

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.shape[1])

    @property
    def kept(self) -> NDArray[np.int32]:
        """The device blocks that adopting the match puts into a row's table."""
        kept: NDArray[np.int32] = self.blocks[self.blocks != NOWHERE]
        return kept

    @property
    def num_copies(self) -> int:
        """Blocks that must be brought from the host."""
        return 0 if self.host is None else int(np.count_nonzero(self.host != NOWHERE))


class PrefixFinder:
    """Answers for one engine's cache.

    A prefix of ``n`` blocks can be served iff every full group has blocks ``[0, n)``, every window group has its
    sink blocks and the blocks that a query after the prefix may see, and every group of states the one behind it.

    costs:      tell what is worth bringing from the host
    first_live: ``[max_blocks + 1, groups]``, per depth, the first block that a query behind so many blocks sees
    """

    def __init__(self, tree: RadixTree, windows: GroupWindows, host: Host, costs: CopyCosts, max_blocks: int) -> None:
        self._tree, self._windows, self._host, self._costs = tree, windows, host, costs
        self._window_groups = np.flatnonzero(~windows.is_full & ~windows.is_state)
        self._state_groups = np.flatnonzero(windows.is_state)
        self.first_live = windows.first_live(np.arange(max_blocks + 1) * windows.block_size)

    def match(self, hashes: Sequence[bytes]) -> PrefixMatch:
        """The longest prefix of the path ``hashes`` that every group can serve. Changes nothing."""
        nodes = self._tree.find(hashes)
        held = self._tree.device.blocks[nodes]
        count, reached, without_states = self._servable(held != NOWHERE)
        match = PrefixMatch(self._seen_after(held[:count]), reached, without_states, nodes[:count])
        return self._match_with_host(match, nodes, held) if self._host.is_there else match

    def _match_with_host(self, match: PrefixMatch, nodes: NDArray[np.int64], held: NDArray[np.int32]) -> PrefixMatch:
        """A match that goes on with what the host has, where that is worth its copies; else ``match``."""
        on_host = np.where(held == NOWHERE, self._tree.host.blocks[nodes], np.int32(NOWHERE))
        count, reached, without_states = self._servable((held != NOWHERE) | (on_host != NOWHERE))
        if count <= match.num_blocks:
            return match
        needed = self._seen_after(on_host[:count])
        copies = int(np.count_nonzero(needed != NOWHERE))
        if not self._costs.is_worth_loading(copies, (count - match.num_blocks) * self._windows.block_size):
            return match
        gained = count - match.num_blocks
        return PrefixMatch(self._seen_after(held[:count]), reached, without_states, nodes[:count], needed, gained)

    def fetch(self, hashes: Sequence[bytes], stored: NDArray[np.bool_]) -> Fetch | None:
        """Start to bring to the host what lets more of a path be served; None if there is nothing worth it.

        stored: ``[n, groups]``, which blocks of the path ``hashes [n]`` storage has
        """
        storage = self._host.storage
        wanted, tokens = self.lacking(hashes, stored, storage.room)
        if not tokens or not self._costs.is_worth_fetching(int(np.count_nonzero(wanted)), tokens):
            return None
        return storage.fetch(hashes, wanted, tokens)

    def lacking(
        self, hashes: Sequence[bytes], elsewhere: NDArray[np.bool_], room: int
    ) -> tuple[NDArray[np.bool_], int]:
        """What the host and the device lack of a path, for the most of it to be served with at most ``room`` blocks
        more: ``[n, groups]`` of as many of its blocks as it is about, and the tokens gained; none if nothing can be.

        elsewhere: ``[n, groups]``, which blocks of the path ``hashes [n]`` can be had
        """
        here = self._are_here(hashes)
        served, *_ = self._servable(here)
        count, *_ = self._servable(here | elsewhere)
        while count > served:
            wanted = self._are_seen_after(count) & ~here[:count]
            blocks = int(np.count_nonzero(wanted))
            if blocks <= room:
                return wanted, (count - served) * self._windows.block_size
            # What fits of it may still serve more than is here.
            fitting = int(np.searchsorted(wanted.sum(axis=1).cumsum(), room, side="right"))
            in_proportion = served + (count - served) * room // blocks
            count, *_ = self._servable((here | elsewhere)[: min(fitting, in_proportion)])
        return np.zeros((0, here.shape[1]), dtype=np.bool_), 0

    def served(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of a path device, host and what storage is known to have can serve between them."""
        return self._servable(self._are_held(hashes))[0]

    def shorter(self, hashes: Sequence[bytes]) -> list[int]:
        """Depths before the end of a path that `served` counts, the deepest first: with what hits at these and at
        its end need, what is here of the last `RESUME_SLACK` tokens can be served, and the next depth before them.

        A prompt ends there, before its answer, and may be asked again. Without windows and states there are none.
        """
        groups = np.concatenate([self._window_groups, self._state_groups])
        depths, depth = list[int](), len(hashes)
        last = depth - RESUME_SLACK // self._windows.block_size
        servable = self._serving(self._are_held(hashes))[0]
        while len(groups) and depth > max(0, last):
            begin = int(self.first_live[depth, groups].max())  # the shortest window's: no depth between is left out
            depth = _deepest(servable[: min(begin, depth - 1)])
            depths += [depth] if depth else []
        return depths

    def gain(self, hashes: Sequence[bytes], more: NDArray[np.bool_]) -> int:
        """Tokens more of a path that could be served if the host had the blocks ``more [n, groups]`` of it, too."""
        here = self._are_here(hashes)
        return (self._servable(here | more)[0] - self._servable(here)[0]) * self._windows.block_size

    def _are_here(self, hashes: Sequence[bytes]) -> NDArray[np.bool_]:
        """``[n, groups]``: which blocks of a path are on the device or on the host."""
        nodes = self._tree.find(hashes)
        here = np.zeros((len(hashes), self._tree.device.num_groups), dtype=np.bool_)
        here[: len(nodes)] = (self._tree.device.blocks[nodes] != NOWHERE) | (self._tree.host.blocks[nodes] != NOWHERE)
        return here

    def _are_held(self, hashes: Sequence[bytes]) -> NDArray[np.bool_]:
        """The same, or that storage is known to have."""
        held = self._are_here(hashes)
        nodes = self._tree.find(hashes)
        held[: len(nodes)] |= self._tree.storage.has(nodes)
        return held

    def _servable(self, there: NDArray[np.bool_]) -> tuple[int, int, int]:
        """Depths of a path with the blocks ``there [n, groups]``: that every group can serve; that every full one can;
        and that these and the window groups can.
        """
        servable, without_states = self._serving(there)
        return _deepest(servable), len(servable), _deepest(without_states)

    def _serving(self, there: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """``[n]``, as far as every full group can serve: whether the path up to each block can be served by all groups,
        and by those without states."""
        is_full = self._windows.is_full
        complete = (there if is_full.all() else there[:, is_full]).all(axis=1)
        reached = len(there) if complete.all() else int(complete.argmin())
        servable = without_states = self._windows_serve(there[:reached])
        if len(self._state_groups):
            servable = servable & there[:reached, self._state_groups].all(axis=1)
        return servable, without_states

    def _windows_serve(self, there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """``[n]``: whether every window group can serve the path up to each of its blocks ``there [n, groups]``."""
        if not len(self._window_groups):
            return np.ones(len(there), dtype=np.bool_)
        resident = there[:, self._window_groups]
        column = np.arange(len(there))[:, None]
        last_gap = np.maximum.accumulate(np.where(resident, -1, column), axis=0)
        first_gap = np.where(resident, len(there), column).min(axis=0, initial=len(there))
        depths = column[:, 0] + 1
        live = self.first_live[depths[:, None], self._window_groups]
        sinks = np.minimum(self._windows.sink_blocks[self._window_groups], depths[:, None])
        return np.asarray(((last_gap < live) & (first_gap >= sinks)).all(axis=1))

    def _seen_after(self, held: NDArray[np.int32]) -> NDArray[np.int32]:
        """``[groups, n]``: of a path's blocks ``held [n, groups]`` those in a sink or window of a query after it."""
        if self._windows.is_full.all():
            return held.T
        return np.where(self._are_seen_after(len(held)), held, np.int32(NOWHERE)).T

    def _are_seen_after(self, count: int) -> NDArray[np.bool_]:
        """``[count, groups]``: which of a path's first ``count`` blocks a query after them sees."""
        return self.are_seen_around(count, 0)

    def are_seen_around(self, count: int, slack: int) -> NDArray[np.bool_]:
        """``[count, groups]``: which of a path's first ``count`` blocks a query sees that comes after them, or up to
        ``slack`` tokens before their end."""
        column = np.arange(count)[:, None]
        first = max(0, count - -(-slack // self._windows.block_size))
        return np.asarray((column < self._windows.sink_blocks) | (column >= self.first_live[first]))


def _deepest(servable: NDArray[np.bool_]) -> int:
    """How many blocks reach up to the last servable one."""
    return len(servable) if len(servable) and servable[-1] else int(np.flatnonzero(servable).max(initial=-1)) + 1
