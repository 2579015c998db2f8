"""Waiting requests' prefixes on their way from storage to the host: asked for when a request is queued."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.storage_tier import Fetch, StorageTier
from headwise.runtime.sequence import Sequence

PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]


class Lookup(Protocol):
    """What storage has, asked in the background: `headwise.storage.lookup.StorageLookup`."""

    def submit(self, key: str, hashes: Items[bytes]) -> None:
        """Ask for the blocks of a path."""

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

    sequence: Sequence
    hashes: list[bytes]
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
        self._policy = policy
        self._timeout_s = timeout_s
        self._prefixes: dict[str, _Prefix] = {}

    @property
    def num_held(self) -> int:
        return sum(prefix.is_held for prefix in self._prefixes.values())

    @property
    def is_asking(self) -> bool:
        """Whether a request waits for storage to say what it has."""
        return any(prefix.is_held and prefix.fetch is None for prefix in self._prefixes.values())

    def begin(self, sequence: Sequence, now: float) -> bool:
        """Ask storage for what the device and the host lack of a sequence's prefix; whether to hold it back."""
        if not self._storage.may_ask:
            return False
        size = self._cache.block_size
        hashes = sequence.block_hashes(sequence.num_tokens - 1, size)
        if self._cache.match(hashes, len(hashes) * size).num_blocks == len(hashes):
            return False
        prefix = _Prefix(sequence, hashes, now, is_held=self._policy != "best_effort")
        self._prefixes[sequence.id] = prefix
        self._lookup.submit(sequence.id, hashes)
        self._storage.ask(sequence.id)
        return prefix.is_held

    def advance(self, now: float) -> list[Sequence]:
        """Start to fetch what storage said it has; the sequences that need not be held back any longer."""
        for key, stored in self._lookup.poll():
            self._storage.answered(key, now)
            prefix = self._prefixes.get(key)
            if prefix is not None:
                prefix.fetch = self._cache.fetch(prefix.hashes, stored) or Fetch(gained=0)
        over = [prefix for prefix in self._prefixes.values() if self._is_over(prefix, now)]
        for prefix in over:  # an answer that is late still tells that there are answers
            del self._prefixes[prefix.sequence.id]
        return [prefix.sequence for prefix in over if prefix.is_held]

    def _is_over(self, prefix: _Prefix, now: float) -> bool:
        if prefix.fetch is not None and not prefix.fetch.left:
            return True
        return now - prefix.since > self._timeout_s

    def forget(self, sequence: Sequence) -> None:
        """A sequence needs nothing from storage any more; what is on its way still comes."""
        prefix = self._prefixes.pop(sequence.id, None)
        if prefix is not None and prefix.fetch is None:
            self._lookup.cancel(sequence.id)
            self._storage.ask_no_more(sequence.id)
