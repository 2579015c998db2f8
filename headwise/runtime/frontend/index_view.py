"""The attention store as the scheduler uses it: asked with a short timeout, and ignored while it is silent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from headwise.storage.index.messages import IndexStats, Matches

LOOKUP_TIMEOUT_S = 10.0
"""Longest wait of a prefix lookup for the index's answer."""

ASK_STATS_S = 1.0
PROBE_S = 0.3
"""How often a silent store is asked whether it lives."""


class IndexClient(Protocol):
    """`headwise.storage.index.store_client.StoreClient`: never waits; `poll` collects answers, late ones too."""

    @property
    def socket(self) -> Any: ...
    def query(self, key: int, block_hashes: Sequence[bytes]) -> bool: ...
    def ask_stats(self, key: int) -> bool: ...
    def gone(self, node: str, epoch: int) -> None: ...
    def poll(self) -> list[Matches | IndexStats]: ...


class IndexView:
    """The index counts as silent until its first answer, and again when an answer is late. Any answer ends the silence.

    store:     None: there is no index
    timeout_s: longest wait of a request for the index's answer
    """

    def __init__(self, store: IndexClient | None, timeout_s: float) -> None:
        self.is_silent = True
        self.timeout_s = timeout_s
        self.counts = {"answered": 0, "late": 0, "not_asked": 0}
        self._store = store
        self._keys = itertools.count(1)
        self._stats: dict[str, Any] = {}
        self._asked: float | None = None  # when statistics were asked for; None: no answer is awaited
        self._ask_at = 0.0
        self._has_answered = False

    @property
    def socket(self) -> Any | None:
        """Readable when `poll` has something; None: there is no index."""
        return None if self._store is None else self._store.socket

    @property
    def is_there(self) -> bool:
        """Whether there is an index at all; it may be silent."""
        return self._store is not None

    def query(self, path: Sequence[bytes]) -> int | None:
        """Ask who holds how much of a path. Returns the key of the answer, or None if there is none to wait for."""
        key = next(self._keys)
        if self._store is not None and not self.is_silent and self._store.query(key, path):
            return key
        self.counts["not_asked"] += 1
        return None

    def poll(self) -> tuple[list[Matches], bool]:
        """The answers that have come, and whether they ended a silence. Before the first answer there is no silence."""
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

    def note_late(self) -> bool:
        """Note that an answer did not come in time; True if a silence begins with it."""
        self.counts["late"] += 1
        was_silent, self.is_silent = self.is_silent, True
        return not was_silent

    def service(self, now: float) -> bool:
        """Ask for statistics now and then, which shows whether the store lives; True if a silence begins now."""
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
        """Tell the store that all the node said up to this epoch is void."""
        if self._store is not None:
            self._store.gone(node, epoch)

    def stats(self) -> dict[str, Any]:
        """The store's latest statistics, and whether it is silent now."""
        return {**self._stats, "silent": self.is_silent}
