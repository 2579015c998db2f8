"""Sequences that wait: for other engines or storage to bring their prefix to the host, then for their turn, and then
for a running one to compute what they share with it.
"""

from __future__ import annotations

from collections.abc import Callable

from headwise.priority_queue import PriorityQueue
from headwise.prompt_turns import Present
from headwise.runtime.engine.followers import Followers, Shared
from headwise.runtime.engine.peers.loads import PeerLoads
from headwise.runtime.engine.prefetcher import Prefetcher
from headwise.runtime.engine.sequence import Sequence


class WaitingQueue:
    """By `Sequence.order`. A sequence that comes back has its old place.

    followers:  those that wait for running ones
    take_turn:  gives a sequence that has not run yet its turn, once what it waited for is there
    peer_loads: brings what other engines have of waiting sequences, where they come with a hint; None: nothing does
    prefetcher: brings what storage has of them; None: there is no storage
    """

    def __init__(
        self,
        followers: Followers,
        take_turn: Callable[[Sequence], None],
        prefetcher: Prefetcher | None = None,
        peer_loads: PeerLoads | None = None,
    ) -> None:
        self.followers, self._take_turn = followers, take_turn
        self.prefetcher, self.peer_loads = prefetcher, peer_loads
        self.present = Present()
        """Those that wait for their turn alone."""
        self._queue: PriorityQueue[Sequence] = PriorityQueue()

    def __len__(self) -> int:
        return len(self._queue) + self.num_held

    @property
    def num_held(self) -> int:
        """How many wait for what another engine or storage has of them, or for what a running sequence computes."""
        return sum(source.num_held for source in (self.peer_loads, self.prefetcher, self.followers) if source)

    def sequences(self) -> list[Sequence]:
        """All that wait, in no order."""
        held = [source.held for source in (self.peer_loads, self.prefetcher, self.followers) if source]
        return sum(held, self._queue.items())

    @property
    def first(self) -> Sequence | None:
        """The sequence whose turn it is; None if there is none."""
        return self._queue.first

    def pop(self) -> Sequence:
        """Take out the sequence whose turn it is."""
        sequence = self._queue.pop()
        self.present.remove(sequence.tenant, sequence.lacking)
        return sequence

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a new sequence, once what another engine and then what storage has of it is there."""
        if self.peer_loads is None or not self.peer_loads.begin(sequence, now):
            self._prefetch(sequence, now)

    def _prefetch(self, sequence: Sequence, now: float) -> None:
        if self.prefetcher is None or not self.prefetcher.begin(sequence, now):
            self.put_back(sequence)

    def follow(self, shared: Shared) -> None:
        """Set the sequence whose turn it is aside, until what it shares with a running one is computed."""
        self.followers.begin(self.pop(), shared)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that need not wait for anything to come."""
        if sequence.first_scheduled is None:
            self._take_turn(sequence)
        self._queue.push(sequence.order, sequence)
        self.present.add(sequence.tenant, sequence.lacking)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out before its turn, wherever it is."""
        for source in (self.peer_loads, self.prefetcher, self.followers):
            if source is not None:
                source.forget(sequence)
        if self._queue.discard(sequence.order):
            self.present.remove(sequence.tenant, sequence.lacking)

    # ---- what comes from elsewhere ----

    @property
    def is_asking_storage(self) -> bool:
        """Whether a sequence waits for storage to say what it has."""
        return self.prefetcher is not None and self.prefetcher.is_asking

    def advance(self, now: float) -> None:
        """Queue the sequences that need not wait for others, storage or what runs any longer."""
        for sequence in self.followers.advance():
            self.put_back(sequence)
        if self.peer_loads is not None:
            for sequence in self.peer_loads.advance(now):
                self._prefetch(sequence, now)
        if self.prefetcher is not None:
            for sequence in self.prefetcher.advance(now):
                self.put_back(sequence)

    def audit_storage(self, now: float) -> None:
        """Have storage asked, now and then, whether it still has what it is known to have."""
        if self.prefetcher is not None:
            self.prefetcher.audit(now)
