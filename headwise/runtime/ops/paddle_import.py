"""Imports Paddle without its warnings, and with its libraries set to share the cores with others."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from pathlib import Path

__all__ = ["paddle"]


def _prepare_libraries() -> None:
    """Set the environment variables that Paddle's libraries read when they are loaded.

    OpenMP: idle threads sleep instead of spinning, since attention kernels use the cores in between.
    MKL: on CPUs that are not Intel's it falls back to SSE, 3 times slower; the variable makes it use AVX2.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        vendor_is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    if vendor_is_amd:
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")


_prepare_libraries()

# When it is imported, Paddle warns of ccache, and of OMP_NUM_THREADS, which is set on purpose.
with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")
    import paddle
    import paddle.incubate.nn.functional
