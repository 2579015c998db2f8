"""How fast this machine reads its memory: what bounds a decode step, which reads every weight once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

_LEAST_BYTES, _MOST_BYTES = 256 << 20, 1 << 30
_BYTES_PER_THREAD = 32 << 20
_ROUNDS = 5
_PASSES = 2
"""Of each round, so that threads that start late weigh little."""


@cache
def read_bandwidth(threads: int) -> float:
    """`measure_bandwidth`, once for all that this process wants to know of as many threads."""
    return measure_bandwidth(threads)


def measure_bandwidth(threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second that ``threads`` threads read together, the best of several rounds: about 0.2 s in all.

    An estimate: a machine whose caches hold a part of the memory that is read gives more than its memory does, and
    one that does other work meanwhile less.

    clock: in seconds
    """
    size = min(max(_LEAST_BYTES, threads * _BYTES_PER_THREAD), _MOST_BYTES) // (8 * threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="bandwidth") as pool:
        parts = list(pool.map(lambda _: np.ones(size, np.uint64), range(threads)))  # each thread's own, touched by it
        best = min(_round(pool, parts, clock) for _ in range(_ROUNDS))
    return _PASSES * sum(part.nbytes for part in parts) / best


def _round(pool: ThreadPoolExecutor, parts: list[NDArray[np.uint64]], clock: Callable[[], float]) -> float:
    """Seconds from the start of the first to the end of the last of the threads, each of which reads one part."""
    together = threading.Barrier(len(parts))

    def read(part: NDArray[np.uint64]) -> tuple[float, float]:
        together.wait()
        start = clock()
        for _ in range(_PASSES):
            np.bitwise_xor.reduce(part)  # vectorised, and without the interpreter's lock
        return start, clock()

    starts, ends = zip(*pool.map(read, parts), strict=True)
    return float(max(ends) - min(starts))
