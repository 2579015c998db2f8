"""Copies of blocks and runs on CPU cores: the thin Python half (the compiled half is `block_copy_jit`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.kernels.block_copy import Runs, bad_pair, bad_run, check_ranges, outside

THREAD_BYTES = 512 << 10
"""Bytes that are worth handing to another thread: fewer are copied in the time that waking it takes (50 us)."""


class NumbaBlockCopy:
    """`BlockCopy` between arrays in host memory. Copies without the GIL, past the processor's caches.

    The calling thread copies, and with large copies ``threads - 1`` more do. All arrays must be C-contiguous.
    Making the first one on a machine compiles the kernel (a second; Numba keeps the machine code on disk).

    Raises:
        ConfigError: ``threads`` is less than 1.
    """

    name = "numba"
    piece_bytes = 0

    def __init__(self, threads: int) -> None:
        from headwise.kernels import block_copy_jit

        self._measure, self._copy_share = block_copy_jit.measure, block_copy_jit.copy_share
        self._fine = block_copy_jit.FINE
        self._sharing = _Sharing(threads)

    def __call__(
        self,
        source: NDArray[np.uint8],
        target: NDArray[np.uint8],
        pairs: NDArray[np.int32],
        ranges: NDArray[np.int64],
        block_bytes: int,
    ) -> None:
        """See `BlockCopy`."""
        counts = source.size // block_bytes, target.size // block_bytes
        total, wrong = self._measure(pairs, ranges, *counts, block_bytes)
        if wrong >= 0:
            raise bad_pair(pairs, wrong, len(ranges), *counts)
        if wrong != self._fine:
            check_ranges(ranges, block_bytes)
        self._sharing(self._copy_share, total, source, target, pairs, ranges, block_bytes)

    def close(self) -> None:
        """End the threads. The last call."""
        self._sharing.close()


class NumbaRunCopy:
    """`RunCopy` between arrays in host memory, as `NumbaBlockCopy` copies blocks; it raises the same."""

    def __init__(self, threads: int) -> None:
        from headwise.kernels import block_copy_jit

        self._copy_share = block_copy_jit.copy_run_share
        self._sharing = _Sharing(threads)

    def __call__(self, source: NDArray[np.uint8], target: NDArray[np.uint8], runs: Runs) -> None:
        """See `RunCopy`."""
        wrong = outside(runs, source.size, target.size)
        if wrong is not None:
            raise bad_run(runs, wrong, source.size, target.size)
        self._sharing(self._copy_share, int(runs[:, 2].sum()), source, target, runs)

    def close(self) -> None:
        """End the threads. The last call."""
        self._sharing.close()


class _Sharing:
    """Shares a copy of some bytes between the calling thread and ``threads - 1`` more."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ConfigError(f"threads={threads} cannot copy blocks: use 1 or more")
        self._threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "block-copy") if threads > 1 else None

    def __call__(self, copy_share: Callable[..., None], total: int, *arguments: Any) -> None:
        """Call ``copy_share(*arguments, begin, end)`` on each thread, with its share of ``total`` bytes."""
        shares = max(1, min(self._threads, total // THREAD_BYTES))
        bounds = [total * share // shares for share in range(shares + 1)]
        others = [
            self._others.submit(copy_share, *arguments, *bounds[share : share + 2])
            for share in range(1, shares)
            if self._others
        ]
        copy_share(*arguments, *bounds[:2])
        for other in others:
            other.result()

    def close(self) -> None:
        if self._others:
            self._others.shutdown()
