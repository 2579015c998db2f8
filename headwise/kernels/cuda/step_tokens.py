"""Tokens that stay on a GPU from one step to the next: the host half of `step_tokens.cu`."""

from __future__ import annotations

from typing import Any

from headwise.kernels.cuda.launch import Kernel, addresses_of
from headwise.kernels.cuda.programs import Programs

Array = Any

SOURCE = "step_tokens.cu"
THREADS = 128


class CudaStepTokens:
    """Of arrays on the device, int32 but for ``best``, C-contiguous, on the current stream. Nothing is allocated."""

    def __init__(self, programs: Programs, threads: int = THREADS) -> None:
        program = programs(SOURCE, {})
        self._threads = threads
        self._fill: Kernel = program.kernel("fill", threads)
        self._keep: Kernel = program.kernel("keep", threads)

    def fill(self, tokens: Array, begins: Array, rows: Array, last: Array) -> None:
        """Put ``last [max_rows]`` in place of those ``tokens [T]`` that stand for it.

        begins: ``[n + 1]``, of the sequences among the tokens; rows: ``[n]``, of each in ``last``
        """
        self._launch(self._fill, len(rows), tokens, begins, rows, last)

    def keep(self, rows: Array, tokens: Array, best: Array, last: Array, told: Array) -> None:
        """Enter the sampled ``tokens [n]`` of ``rows``, the first n of them, in ``last`` and in ``told [n]``: there as
        -1 where the largest logit, ``best`` float32 ``[n]``, is not finite.
        """
        self._launch(self._keep, len(told), rows, tokens, best, last, told)

    def _launch(self, kernel: Kernel, count: int, *arrays: Array) -> None:
        kernel((-(-count // self._threads), 1, 1), (*addresses_of(*arrays), count))
