"""The threads that compiled code runs on: one pool for all kernels of a process, asleep while nobody computes."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.kernels.cpu import pool_jit, records

Jobs = NDArray[Any]
"""`records.JOB` of each thread."""


class ThreadPool:
    """Runs a compiled function on several threads at once: the caller's, and some of its own.

    These wait in compiled code, so that none needs the interpreter's lock to begin or to end. The function must not
    wait for a thread to begin: threads share out work among those that are there. One caller at a time; another one
    waits. The threads end with the pool.
    """

    def __init__(self, threads: int) -> None:
        self._jobs: Jobs = np.zeros(threads - 1, records.JOB)
        self._jobs["state"] = pool_jit.IDLE
        self._run = pool_jit.run().ctypes
        self._one_caller = threading.Lock()
        for number, job in enumerate(_addresses(self._jobs), 1):
            _make_semaphore(job + pool_jit.SEMAPHORE_AT)
            thread = threading.Thread(target=_serve, args=(self._jobs, job), name=f"kernels-{number}", daemon=True)
            thread.start()
        weakref.finalize(self, _end, self._jobs).atexit = False  # they are daemons: asleep, they end with the process

    def run(self, function: int, threads: int, argument: int) -> None:
        """Call the C function at an address with ``argument`` and a number, which is 0 on the caller's thread.

        Up to ``threads`` - 1 other threads call it with numbers of their own: those that have a core before the caller
        is through. Returns when all calls have.
        """
        if threads == 1:
            self._run(0, function, argument, 1)
            return
        with self._one_caller:
            self._run(self._jobs.ctypes.data, function, argument, threads)


def _serve(jobs: Jobs, job: int) -> None:
    """Do a thread's jobs; ``jobs`` is held for as long as it may look there."""
    pool_jit.serve().ctypes(job)


def _end(jobs: Jobs) -> None:
    for job in _addresses(jobs):
        pool_jit.post().ctypes(job, 0, 0, 0)


def _addresses(jobs: Jobs) -> list[int]:
    return [jobs.ctypes.data + number * records.JOB.itemsize for number in range(len(jobs))]


def _make_semaphore(address: int) -> None:
    if ctypes.CDLL(None, use_errno=True).sem_init(ctypes.c_void_p(address), 0, 0):
        raise OSError(ctypes.get_errno(), "no semaphore for a thread of the kernels")


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
