"""Sequences that wait: for storage to bring their prefix to the host, and then for their turn."""

from __future__ import annotations

from headwise.priority_queue import PriorityQueue
from headwise.runtime.engine.prefetcher import Prefetcher
from headwise.runtime.engine.sequence import Sequence


class WaitingQueue:
    """First come, first served within a priority. A sequence that comes back has its old place.

    prefetcher: brings what storage has of waiting sequences; None: there is no storage
    """

    def __init__(self, prefetcher: Prefetcher | None = None) -> None:
        self.prefetcher = prefetcher
        self._queue: PriorityQueue[Sequence] = PriorityQueue()

    def __len__(self) -> int:
        return len(self._queue) + (self.prefetcher.num_held if self.prefetcher else 0)

    def sequences(self) -> list[Sequence]:
        """All that wait, in no order."""
        return self._queue.items() + (self.prefetcher.held if self.prefetcher else [])

    @property
    def first(self) -> Sequence | None:
        """The sequence whose turn it is; None if there is none."""
        return self._queue.first

    def pop(self) -> Sequence:
        """Take out the sequence whose turn it is."""
        return self._queue.pop()

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a new sequence, once what storage has of it is there."""
        if self.prefetcher is None or not self.prefetcher.begin(sequence, now):
            self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that need not wait for storage."""
        self._queue.push(sequence.order, sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out before its turn, wherever it is."""
        if self.prefetcher is not None:
            self.prefetcher.forget(sequence)
        self._queue.discard(sequence.order)

    # ---- storage ----

    @property
    def is_asking_storage(self) -> bool:
        """Whether a sequence waits for storage to say what it has."""
        return self.prefetcher is not None and self.prefetcher.is_asking

    def advance(self, now: float) -> None:
        """Queue the sequences that need not wait for storage any longer."""
        if self.prefetcher is not None:
            for sequence in self.prefetcher.advance(now):
                self.put_back(sequence)

    def audit_storage(self, now: float) -> None:
        """Have storage asked, now and then, whether it still has what it is known to have."""
        if self.prefetcher is not None:
            self.prefetcher.audit(now)
