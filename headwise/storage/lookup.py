"""Asks storage on a thread of its own which blocks of a prefix it holds."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.errors import first_line
from headwise.storage.backends.base import BlockStorage

log = logging.getLogger(__name__)

SIGNAL_BYTES = 1 << 20
"""More than a socket holds."""

CLOSE_S = 1.0
"""Longest wait of `StorageLookup.close` for a call that is under way."""


@dataclass(eq=False)
class _Query:
    """asks_room: it is about that, and nothing else"""

    key: str
    hashes: Sequence[bytes]
    is_cancelled: bool = False
    asks_room: bool = False


class StorageLookup:
    """Finds out, on its own thread and in order of submission, which blocks of a path every rank has in storage.

    Background queries wait for all others. Any thread may call. If the storage hangs, the present query gets no answer,
    and neither do those queued behind it.

    storages: one per rank, of that rank's namespace; `close` closes them
    groups:   head groups of a block
    """

    def __init__(self, storages: Sequence[BlockStorage], groups: int) -> None:
        self._storages = storages
        self._groups = groups
        self._queue: deque[_Query] = deque()
        self._background: deque[_Query] = deque()
        self._asking: _Query | None = None
        self._answers: list[tuple[str, NDArray[np.bool_]]] = []
        self._rooms: dict[_Query, int | None] = {}
        self._is_closed = False
        self._logged: set[type[Exception]] = set()
        lock = threading.Lock()
        self._has_query, self._has_answer = threading.Condition(lock), threading.Condition(lock)
        self._lock = lock
        self._signal, self._signal_end = socket.socketpair()
        self._signal.setblocking(False)
        self._signal_end.setblocking(False)
        # A daemon thread: the process must be able to end while a call hangs.
        self._thread = threading.Thread(target=self._run, name="headwise-lookup", daemon=True)
        self._thread.start()

    @property
    def volume(self) -> str:
        """See `BlockStorage.volume`; as it was when storage was last asked."""
        return self._storages[0].volume

    def submit(self, key: str, hashes: Sequence[bytes], in_background: bool = False) -> None:
        """Queue a query for blocks, by their hashes. Returns at once; ``key`` names the answer.

        in_background: ask only when no other query waits

        Raises:
            RuntimeError: the lookup is closed.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"the storage lookup is closed: {key!r} can no longer be submitted to it")
            (self._background if in_background else self._queue).append(_Query(key, tuple(hashes)))
            self._has_query.notify()

    def room(self, timeout_s: float) -> int | None:
        """Token blocks that storage takes before others go for them; None: not known, or not within ``timeout_s``, for
        which this waits."""
        query = _Query("", (), asks_room=True)
        with self._lock:
            if self._is_closed:
                return None
            self._queue.append(query)
            self._has_query.notify()
            self._has_answer.wait_for(lambda: query in self._rooms or self._is_closed, timeout_s)
            query.is_cancelled = True
            return self._rooms.pop(query, None)

    def poll(self) -> list[tuple[str, NDArray[np.bool_]]]:
        """The answers since the last call, in order. Never waits.

        Each is the key and ``bool [n, groups]``: whether the storages of all ranks contain the block of that hash and
        group. It is False where a storage could not tell.
        """
        with self._lock:
            answers, self._answers = self._answers, []
            with suppress(OSError):  # nothing there, or closed
                self._signal.recv(SIGNAL_BYTES)
            return answers

    def fileno(self) -> int:
        """A file descriptor that is readable while `poll` has an answer to give, for a poller."""
        return self._signal.fileno()

    def cancel(self, key: str) -> None:
        """Cancel the queries submitted under ``key`` so far; unknown keys are ignored."""
        with self._lock:
            self._queue = deque(query for query in self._queue if query.key != key)
            self._background = deque(query for query in self._background if query.key != key)
            self._answers = [answer for answer in self._answers if answer[0] != key]
            if self._asking is not None and self._asking.key == key:
                self._asking.is_cancelled = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has an answer to give; False if there was none in time, or the lookup is closed."""
        with self._lock:
            self._has_answer.wait_for(lambda: bool(self._answers) or self._is_closed, timeout_s)
            return bool(self._answers)

    def close(self) -> None:
        """Drop what is queued, and close the storages; soon, even if a call hangs. May be called again."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._background.clear()
            self._has_query.notify_all()
            self._has_answer.notify_all()
        self._thread.join(CLOSE_S)

    # ---- on the thread ----

    def _run(self) -> None:
        while (query := self._next()) is not None:
            if query.asks_room:
                self._tell_room(query)
                continue
            answer = self._ask(query.hashes)
            with self._lock:
                self._asking = None
                if not query.is_cancelled and not self._is_closed:
                    self._answers.append((query.key, answer))
                    self._has_answer.notify_all()
                    with suppress(OSError):  # full, and so readable
                        self._signal_end.send(b"!")
        for storage in self._storages:
            try:
                storage.close()
            except Exception as error:
                self._log_once(error)
        self._signal.close()
        self._signal_end.close()

    def _tell_room(self, query: _Query) -> None:
        try:
            room = self._storages[0].room
        except Exception as error:
            self._log_once(error)
            room = None
        with self._lock:
            self._asking = None
            if not query.is_cancelled:
                self._rooms[query] = None if room is None else room // (self._groups * len(self._storages))
                self._has_answer.notify_all()

    def _next(self) -> _Query | None:
        """Wait for the next query; None when closed."""
        with self._lock:
            self._has_query.wait_for(lambda: bool(self._queue or self._background) or self._is_closed)
            queue = self._queue or self._background
            self._asking = queue.popleft() if queue else None
            return self._asking

    def _ask(self, hashes: Sequence[bytes]) -> NDArray[np.bool_]:
        found = np.ones(len(hashes) * self._groups, dtype=np.bool_)
        per_group = [block_hash for block_hash in hashes for _ in range(self._groups)]
        groups = np.tile(np.arange(self._groups, dtype=np.int32), len(hashes))
        try:
            for storage in self._storages:
                if found.any():
                    found &= _contained(storage, per_group, groups)
        except Exception as error:  # blocks that are not found are computed
            self._log_once(error)
            found[:] = False
        return found.reshape(len(hashes), self._groups)

    def _log_once(self, error: Exception) -> None:
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.warning(
                "cannot ask storage what it has: %s: %s; counts as nothing, and is not logged again",
                type(error).__name__, first_line(error),
            )  # fmt: skip


def _contained(storage: BlockStorage, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> NDArray[np.bool_]:
    hits = storage.contains(hashes, groups)
    if hits.dtype != np.bool_ or hits.shape != groups.shape:
        raise TypeError(f"the answer for {len(groups)} blocks is {hits.dtype} {list(hits.shape)}")
    return hits
