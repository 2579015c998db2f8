"""Work that Python shares out among the threads of this process's pool."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from headwise.kernels.cpu.pool import pool_of_this_process

_TAKE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
"""What the pool's threads call: Python, whose lock is let go of within compiled code and NumPy's products."""


def share_out(function: Callable[[int, int], object], count: int, workers: int) -> None:
    """Call ``function(first, last)`` on all of ``count``, by as many threads of the pool as ``workers`` says."""
    workers = max(1, min(workers, count))
    if workers == 1:
        function(0, count)
        return
    shares = iter([(count * share // workers, count * (share + 1) // workers) for share in range(workers)])
    failures: list[BaseException] = []

    def take(argument: int, thread: int) -> None:
        try:
            for first, last in shares:  # one at a time: threads that have no core take none
                function(first, last)
        except BaseException as error:
            failures.append(error)

    compiled = _TAKE(take)
    pool_of_this_process().run(ctypes.cast(compiled, ctypes.c_void_p).value or 0, workers, 0)
    if failures:
        raise failures[0]
