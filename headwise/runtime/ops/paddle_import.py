"""Imports Paddle: quietly, and with its libraries told how to run beside others."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from pathlib import Path

__all__ = ["paddle"]


def _prepare_libraries() -> None:
    """Set what Paddle's libraries read from the environment once, when they are loaded.

    OpenMP: idle threads sleep rather than spin, since attention kernels want the cores in between.
    MKL: falls back to SSE on CPUs that are not Intel's, 3 times slower; the variable makes it use AVX2.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        vendor_is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    if vendor_is_amd:
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")


_prepare_libraries()

# Importing Paddle talks of ccache and of OMP_NUM_THREADS, which is set on purpose.
with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")
    import paddle
    import paddle.incubate.nn.functional
