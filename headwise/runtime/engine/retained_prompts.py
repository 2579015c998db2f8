"""What requests have asked to keep of their prompts, beyond their end."""

from __future__ import annotations

import math

from headwise.cache_controller.cache_manager import SECLUDED, CacheManager
from headwise.runtime.engine.sequence import Sequence


class RetainedPrompts:
    """Has the cache protect prompts once they are computed, and anew when their requests leave the batch: the time for
    which they are kept counts from there."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._now = -math.inf
        self._computing: dict[Sequence, None] = {}  # as they came: who is kept first goes first
        self._kept: dict[Sequence, None] = {}

    def advance(self, now: float) -> None:
        """It is ``now``."""
        self._now = now
        self._cache.advance(now)

    def started(self, sequence: Sequence) -> None:
        """A sequence has a row."""
        if sequence.kept_tokens:
            self._computing[sequence] = None

    def computed(self) -> None:
        """Rows have computed more tokens, of which the cache was told."""
        for sequence in [sequence for sequence in self._computing if self._is_computed(sequence)]:
            self._computing.pop(sequence, None)
            self._kept[sequence] = None
            self._keep(sequence)

    def leaves(self, sequence: Sequence) -> None:
        """A sequence is about to give its row back."""
        self._computing.pop(sequence, None)
        if sequence in self._kept:
            del self._kept[sequence]
            self._keep(sequence)

    def _is_computed(self, sequence: Sequence) -> bool:
        registered = int(self._cache.registered[sequence.row])
        return sequence.kept_tokens // self._cache.block_size <= registered < SECLUDED

    def _keep(self, sequence: Sequence) -> None:
        hashes = sequence.block_hashes(sequence.kept_tokens, self._cache.block_size)
        self._cache.protect(hashes, self._now + sequence.kept_s)
