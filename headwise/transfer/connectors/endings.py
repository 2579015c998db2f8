"""A thread that tells when other processes, or what they keep open for us, are no more."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


class Endings:
    """Watches descriptors that become readable, or hang up, when something ends: of processes, of connections.

    ended: is told, on a thread of its own, the key under which such a descriptor was given. It is watched no more then
    """

    def __init__(self, ended: Callable[[bytes], object]) -> None:
        self._ended = ended
        self._watched: dict[bytes, int] = {}
        self._unwatched: list[int] = []  # to be closed once no `poll` has them
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._is_open = True
        self._thread: threading.Thread | None = None

    def watch(self, key: bytes, fd: int) -> None:
        """Watch a descriptor, and close it when it is watched no more."""
        with self._lock:
            self._unwatch(key)
            self._watched[key] = fd
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headwise-peer-ends", daemon=True)
                self._thread.start()
        os.write(self._wake_write, b"+")

    def forget(self, key: bytes) -> None:
        """Watch it no more; unknown ones are ignored."""
        with self._lock:
            self._unwatch(key)
        if self._thread is not None:
            os.write(self._wake_write, b"+")

    def _unwatch(self, key: bytes) -> None:
        fd = self._watched.pop(key, None)
        if fd is not None:
            self._unwatched.append(fd)

    def close(self) -> None:
        """The last call."""
        self._is_open = False
        if self._thread is not None:
            os.write(self._wake_write, b"-")
            self._thread.join()
        for fd in (*self._watched.values(), *self._unwatched, self._wake_read, self._wake_write):
            os.close(fd)

    def _run(self) -> None:
        while self._is_open:
            with self._lock:
                for fd in self._unwatched:
                    os.close(fd)
                self._unwatched = []
                watched = {fd: key for key, fd in self._watched.items()}
            poll = select.poll()
            for fd in (self._wake_read, *watched):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    os.read(fd, 512)
                else:
                    self._tell(watched[fd], fd)

    def _tell(self, key: bytes, fd: int) -> None:
        with self._lock:
            is_watched = self._watched.get(key) == fd
        if is_watched:
            self._ended(key)
            with self._lock:
                if self._watched.get(key) == fd:
                    self._unwatch(key)
