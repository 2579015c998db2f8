"""Sequences that wait until a running one has computed what they share with it.

Requests that come together often begin alike: questions about one document, several answers to one prompt. Started at
once, each would compute that beginning, at the cost of the others; so the first one does, and the others start behind
it. None of them starts later for it than it would be through by itself: the one that it waits for comes before it in
every step.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from headwise.cache_controller.cache_manager import CacheManager
from headwise.runtime.engine.sequence import Phase, Sequence


@dataclass(frozen=True, eq=False)
class Shared:
    """What a waiting sequence shares with a running one: the first ``depth`` blocks, of which some are to come."""

    leader: Sequence
    depth: int


class Followers:
    """Those that wait."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._followers: dict[Sequence, Shared] = {}

    @property
    def held(self) -> list[Sequence]:
        """All of them."""
        return list(self._followers)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._followers

    @property
    def num_held(self) -> int:
        return len(self._followers)

    @property
    def shared_tokens(self) -> int:
        """How many of their tokens running sequences have computed, or will."""
        return sum(shared.depth for shared in self._followers.values()) * self._cache.block_size

    def find(self, sequence: Sequence, prompts: Iterable[Sequence], served: int) -> Shared | None:
        """What a waiting sequence had better wait for; None: nothing.

        prompts: running sequences, parts of whose prompts are not computed yet
        served:  blocks of the waiting one that the cache could serve now
        """
        hashes = sequence.block_hashes(sequence.servable, self._cache.block_size)
        most = Shared(sequence, served)
        for leader in prompts:
            if leader.order > sequence.order or leader.is_prompt_asked:  # it would be slower
                continue
            depth = common_blocks(hashes, leader.hashes)
            if depth > max(most.depth, int(self._cache.registered[leader.row])):
                most = Shared(leader, depth)
        if most.leader is sequence:
            return None
        depth = self._cache.will_part(most.leader.row, most.depth)
        return Shared(most.leader, depth) if depth > served else None

    def begin(self, sequence: Sequence, shared: Shared) -> None:
        self._followers[sequence] = shared

    def forget(self, sequence: Sequence) -> None:
        self._followers.pop(sequence, None)

    def advance(self) -> list[Sequence]:
        """The sequences that need not wait any longer: what they share is computed, or will not be."""
        over = [sequence for sequence, shared in self._followers.items() if self._is_over(shared)]
        for sequence in over:
            del self._followers[sequence]
        return over

    def _is_over(self, shared: Shared) -> bool:
        leader = shared.leader
        return leader.phase is not Phase.RUNNING or bool(self._cache.registered[leader.row] >= shared.depth)


def common_blocks(first: list[bytes], second: list[bytes]) -> int:
    """How many blocks two sequences begin with in common, by their hashes, each of which is of all before it, too."""
    return bisect.bisect_left(
        range(min(len(first), len(second))), True, key=lambda block: first[block] != second[block]
    )
