"""Sequences that wait until a running one has computed what they share with it.

Requests that come together often begin alike: questions about one document, several answers to one prompt. Started at
once, each would compute that beginning, at the cost of the others; so the first one does, and the others start behind
it. Whoever they wait for comes before them in every step, from then on where its turn was later, so they are through a
step or two later than by themselves at most, which are on their way when it is computed. So they wait only where that
spares a whole chunk of a prompt.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headwise.cache_controller.cache_manager import CacheManager
from headwise.runtime.engine.sequence import Phase, Sequence

_Place = tuple[int, tuple[int, float, int], Sequence]
"""Of a follower behind its leader: the depth at which it starts, and its order, which no other one has."""


@dataclass(frozen=True, eq=False)
class Shared:
    """What a waiting sequence shares with a running one: the first ``depth`` blocks, of which some are to come."""

    leader: Sequence
    depth: int


class Followers:
    """Those that wait. What a step asks of them takes no longer the more they are.

    least_tokens: that each is spared
    """

    def __init__(self, cache: CacheManager, least_tokens: int) -> None:
        self._cache, self._least_blocks = cache, -(-least_tokens // cache.block_size)
        self._followers: dict[Sequence, Shared] = {}
        self._led: dict[Sequence, list[_Place]] = {}  # by leader a heap, in which may be some that are gone

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

    def find(self, sequence: Sequence, prompts: Iterable[Sequence], served: Callable[[], int]) -> Shared | None:
        """What a waiting sequence had better wait for; None: nothing.

        prompts: running sequences, parts of whose prompts are not computed yet
        served:  tells how many blocks of the waiting one the cache could serve now; asked only where some are shared
        """
        hashes = sequence.block_hashes(sequence.servable, self._cache.block_size)
        most: Shared | None = None
        for leader in prompts:
            if leader.arrival[0] > sequence.arrival[0] or leader.is_prompt_asked:  # it would be slower
                continue
            depth, computed = common_blocks(hashes, leader.hashes), int(self._cache.registered[leader.row])
            if depth > computed and depth >= (self._least_blocks if most is None else most.depth + 1):
                most = Shared(leader, depth)
        if most is None or most.depth < (least := served() + self._least_blocks):
            return None
        depth = self._cache.will_part(most.leader.row, most.depth)
        return Shared(most.leader, depth) if depth >= least else None

    def begin(self, sequence: Sequence, shared: Shared) -> None:
        self._followers[sequence] = shared
        heapq.heappush(self._led.setdefault(shared.leader, []), (shared.depth, sequence.order, sequence))

    def forget(self, sequence: Sequence) -> None:
        self._followers.pop(sequence, None)

    def advance(self) -> list[Sequence]:
        """The sequences that need not wait any longer: what they share is computed, or will not be."""
        over = list[Sequence]()
        for leader in list(self._led):
            led, computed = self._led[leader], self._cache.registered[leader.row]
            while led and (leader.phase is not Phase.RUNNING or led[0][0] <= computed):
                *_, sequence = heapq.heappop(led)
                if self._followers.pop(sequence, None) is not None:
                    over.append(sequence)
            if not led:
                del self._led[leader]
        return over


def common_blocks(first: list[bytes], second: list[bytes]) -> int:
    """How many blocks two sequences begin with in common, by their hashes, each of which is of all before it, too."""
    return bisect.bisect_left(
        range(min(len(first), len(second))), True, key=lambda block: first[block] != second[block]
    )
