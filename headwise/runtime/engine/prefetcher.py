"""Waiting requests' prefixes on their way from storage to the host: asked for when a request is queued."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Fetch
from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.storage_tier import StorageTier
from headwise.runtime.engine.sequence import Sequence

PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]

_questions = itertools.count()
"""Names of questions. A lookup outlives an engine's core: what it answers to an earlier one must not be taken for ours.
"""


class Lookup(Protocol):
    """What storage has, asked in the background: `headwise.storage.lookup.StorageLookup`."""

    def submit(self, key: str, hashes: Items[bytes], in_background: bool = False) -> None:
        """Ask for the blocks of these hashes; ``in_background``: when nothing else is to be asked."""

    def poll(self) -> list[tuple[str, NDArray[np.bool_]]]:
        """Answers since the last call: the key, and ``[n, groups]``, which blocks are there."""

    def cancel(self, key: str) -> None:
        """Its answer is not needed any more."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is an answer."""

    def close(self) -> None: ...


@dataclass(eq=False)
class _Prefix:
    """A waiting sequence's. fetch: None until storage has said what it has."""

    question: str
    sequence: Sequence
    hashes: tuple[bytes, ...]
    since: float
    is_held: bool
    fetch: Fetch | None = None


class Prefetcher:
    """Has prefixes fetched that storage holds, and holds requests back until they are there.

    policy:    ``best_effort`` holds no request back; ``wait_complete`` until all has come that was found, and
               ``timeout`` for at most ``timeout_s``
    timeout_s: also bounds ``wait_complete``, which then is for a storage that does not answer
    """

    def __init__(
        self, cache: CacheManager, storage: StorageTier, lookup: Lookup, policy: PrefetchPolicy, timeout_s: float
    ) -> None:
        self._cache, self._storage, self._lookup = cache, storage, lookup
        self._holds_back = policy != "best_effort"
        self._timeout_s = timeout_s
        self._prefixes: dict[str, _Prefix] = {}
        self._unanswered: dict[str, _Prefix] = {}  # by question
        self._audit = ""  # likewise: the one that is not over, or the last

    @property
    def held(self) -> list[Sequence]:
        """The sequences that are held back."""
        return [prefix.sequence for prefix in self._prefixes.values() if prefix.is_held]

    @property
    def num_held(self) -> int:
        return len(self._prefixes) if self._holds_back else 0

    @property
    def is_asking(self) -> bool:
        """Whether a request waits for storage to say what it has."""
        return any(prefix.is_held and prefix.fetch is None for prefix in self._prefixes.values())

    def begin(self, sequence: Sequence, now: float) -> bool:
        """Ask storage for what the device and the host lack of a sequence's prefix; whether to hold it back."""
        if not self._storage.may_ask:
            return False
        size = self._cache.block_size
        hashes = tuple(sequence.block_hashes(sequence.servable, size))  # the sequence may grow meanwhile
        if self._cache.match(hashes, len(hashes) * size).num_blocks == len(hashes):
            return False
        prefix = _Prefix(str(next(_questions)), sequence, hashes, now, is_held=self._holds_back)
        self._prefixes[sequence.id] = self._unanswered[prefix.question] = prefix
        self._lookup.submit(prefix.question, hashes)
        self._storage.ask(prefix.question, now)
        return prefix.is_held

    def advance(self, now: float) -> list[Sequence]:
        """Start to fetch what storage said it has; the sequences that need not be held back any longer."""
        self._hear()
        over = [prefix for prefix in self._prefixes.values() if self._is_over(prefix, now)]
        for prefix in over:  # an answer that is late still tells that there are answers
            del self._prefixes[prefix.sequence.id]
        return [prefix.sequence for prefix in over if prefix.is_held]

    def _hear(self) -> None:
        """Take in what storage has answered."""
        for key, stored in self._lookup.poll():
            prefix = self._unanswered.pop(key, None)
            if prefix is not None:
                self._storage.answered(key, prefix.hashes, stored)
                if self._prefixes.get(prefix.sequence.id) is prefix:  # else it came too late
                    prefix.fetch = self._cache.fetch(prefix.hashes, stored) or Fetch(gained=0)
            elif key == self._audit:
                self._storage.end_audit(stored)

    def audit(self, now: float) -> None:
        """Ask storage again for some of what it is known to have, and for what it owes, if it is time."""
        self._storage.probe(now)
        if self._unanswered or self._storage.stored.is_auditing:
            self._hear()
        if hashes := self._storage.begin_audit(now):
            self._audit = str(next(_questions))
            self._lookup.submit(self._audit, hashes, in_background=True)

    def _is_over(self, prefix: _Prefix, now: float) -> bool:
        if prefix.fetch is not None and not prefix.fetch.left:
            return True
        return now - prefix.since > self._timeout_s

    def forget(self, sequence: Sequence) -> None:
        """A sequence needs nothing from storage any more; what is on its way still comes."""
        prefix = self._prefixes.pop(sequence.id, None)
        if prefix is not None and prefix.fetch is None:
            self._lookup.cancel(prefix.question)
            self._storage.ask_no_more(prefix.question)
            del self._unanswered[prefix.question]
