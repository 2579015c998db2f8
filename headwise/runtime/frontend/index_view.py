"""The attention store as the scheduler sees it: asked, waited for a moment, done without while it is silent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from headwise.storage.index.messages import IndexStats, Matches

FIND_S = 10.0
"""Longest wait of a question that is about nothing but what the index knows."""

ASK_STATS_S = 1.0
PROBE_S = 0.3
"""How often a store that is silent is asked for a sign of life."""


class Store(Protocol):
    """`headwise.storage.index.store_client.StoreClient`: never waits; `poll` collects answers, late ones too."""

    @property
    def socket(self) -> Any: ...
    def query(self, key: int, block_hashes: Sequence[bytes]) -> bool: ...
    def ask_stats(self, key: int) -> bool: ...
    def gone(self, node: str, epoch: int) -> None: ...
    def poll(self) -> list[Matches | IndexStats]: ...


class IndexView:
    """Counts as silent until it has answered, and again once an answer is late; any answer ends that.

    store:     None: there is no index
    timeout_s: longest wait of a request for what the index knows of it
    """

    def __init__(self, store: Store | None, timeout_s: float) -> None:
        self.is_silent = True
        self.timeout_s = timeout_s
        self.counts = {"answered": 0, "late": 0, "not_asked": 0}
        self._store = store
        self._keys = itertools.count(1)
        self._stats: dict[str, Any] = {}
        self._asked: float | None = None  # for statistics, and not answered yet
        self._ask_at = 0.0
        self._has_answered = False

    @property
    def socket(self) -> Any | None:
        """To wait at until `poll` has something; None: there is no index."""
        return None if self._store is None else self._store.socket

    @property
    def is_there(self) -> bool:
        """Whether there is an index at all; it may be silent."""
        return self._store is not None

    def query(self, path: Sequence[bytes]) -> int | None:
        """Ask who holds how much of a path: the key of the answer that will come, or None if none is to be waited
        for."""
        key = next(self._keys)
        if self._store is not None and not self.is_silent and self._store.query(key, path):
            return key
        self.counts["not_asked"] += 1
        return None

    def poll(self) -> tuple[list[Matches], bool]:
        """The answers that have come, and whether they ended a silence; the one before the first is none."""
        if self._store is None:
            return [], False
        answers, was_silent = self._store.poll(), self.is_silent and self._has_answered
        for answer in answers:
            self.is_silent, self._has_answered = False, True
            if isinstance(answer, IndexStats):
                self._stats, self._asked = answer.stats, None
        matches = [answer for answer in answers if isinstance(answer, Matches)]
        self.counts["answered"] += len(matches)
        return matches, was_silent and not self.is_silent

    def late(self) -> bool:
        """An answer did not come in time; True if this begins a silence."""
        self.counts["late"] += 1
        was_silent, self.is_silent = self.is_silent, True
        return not was_silent

    def service(self, now: float) -> bool:
        """Ask for statistics now and then, which tells whether the store lives; True if this begins a silence."""
        if self._store is None:
            return False
        begins = self._asked is not None and now - self._asked > max(ASK_STATS_S, self.timeout_s) and not self.is_silent
        if begins:
            self.is_silent = True
        if now >= self._ask_at:
            self._ask_at = now + (PROBE_S if self.is_silent else ASK_STATS_S)
            is_sent = self._store.ask_stats(next(self._keys))
            if self._asked is None and (is_sent or not self.is_silent):
                self._asked = now
        return begins

    def gone(self, node: str, epoch: int) -> None:
        """What the node has said until this epoch is void."""
        if self._store is not None:
            self._store.gone(node, epoch)

    def stats(self) -> dict[str, Any]:
        """What the store told of itself last, and whether it is silent now."""
        return {**self._stats, "silent": self.is_silent}
