"""The threads that compiled code runs on: one pool for all kernels of a process, asleep while nobody computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

from headwise.errors import ConfigError


class ThreadPool:
    """Runs a function on several threads at once: the caller's, and some of its own.

    The function must not hold the GIL, and must not wait for a thread to begin: threads share out work among those
    that are there. One caller at a time; another one waits.
    """

    def __init__(self, threads: int) -> None:
        self._calls: list[SimpleQueue[Callable[[], Any]]] = [SimpleQueue() for _ in range(threads - 1)]
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._one_caller = threading.Lock()
        for number, calls in enumerate(self._calls, 1):
            threading.Thread(target=self._serve, args=(calls,), name=f"kernels-{number}", daemon=True).start()

    def run(self, function: Callable[..., Any], threads: int, *args: Any) -> None:
        """Call ``function(*args, thread)`` for ``thread`` from 0 to ``threads`` - 1; returns when all have returned."""
        if threads == 1:
            function(*args, 0)
            return
        with self._one_caller:
            others = self._calls[: threads - 1]
            for thread, calls in enumerate(others, 1):
                calls.put(partial(function, *args, thread))
            try:
                function(*args, 0)
            finally:
                failures = [self._ended.get() for _ in others]
        for failure in failures:
            if failure is not None:
                raise failure

    def _serve(self, calls: SimpleQueue[Callable[[], Any]]) -> None:
        while True:
            call = calls.get()
            try:
                call()
            except BaseException as error:
                self._ended.put(error)
            else:
                self._ended.put(None)


def pool_of_this_process() -> ThreadPool:
    """Threads for as many cores as this process may use."""
    return _pool_of(os.getpid())


@cache
def _pool_of(process: int) -> ThreadPool:
    # By process: one that was forked has its parent's pool, but none of its threads.
    return ThreadPool(len(os.sched_getaffinity(0)))


def check_threads(threads: int) -> None:
    """Raise ConfigError if the pool has fewer threads than that."""
    most = len(os.sched_getaffinity(0))
    if not 1 <= threads <= most:
        raise ConfigError(f"threads={threads} cannot be had: choose from 1 to {most}, the cores of this process")
