"""Pools of threads as they behave on a busy machine."""

from __future__ import annotations

import numpy as np

from headwise.kernels.cpu.pool_jit import IDLE, run
from headwise.kernels.cpu.records import JOB


class NoCoreForOthers:
    """A `ThreadPool` whose threads never get a core: the caller does all there is to do."""

    def run(self, function: int, threads: int, argument: int) -> None:
        jobs = np.zeros(threads - 1, JOB)
        jobs["state"] = IDLE
        run().ctypes(jobs.ctypes.data, function, argument, threads)
