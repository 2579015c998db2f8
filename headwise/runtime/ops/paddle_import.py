"""Imports Paddle without its warnings, without its signal handlers, and with its libraries set to share the cores with
others.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

__all__ = ["paddle"]

_HANDLED = (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM)
_SIGACTION_BYTES = 256
"""At least those of C's `struct sigaction`: 152 on Linux."""


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


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Leave what handles signals of the whole process as it was, also where it is none of Python's.

    When it is imported, Paddle handles crashes and SIGTERM by a handler that allocates memory. A process that aborts
    within `malloc` or `free`, where its heap is broken, then waits for that lock for ever in place of ending, and
    nobody learns of it; and Ray's and Python's handlers, which would say where it was, are not run.
    """
    library = ctypes.CDLL(None)
    former = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in _HANDLED}
    for number, handler in former.items():
        library.sigaction(number, None, handler)
    try:
        yield
    finally:
        for number, handler in former.items():
            library.sigaction(number, handler, None)


_prepare_libraries()

# When it is imported, Paddle warns of ccache, and of OMP_NUM_THREADS, which is set on purpose.
with _kept_handlers(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")
    import paddle
    import paddle.incubate.nn.functional
