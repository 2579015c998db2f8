"""What Paddle does to a process that imports it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytest.importorskip("headwise.runtime.ops.paddle_import")

BREAK_THE_HEAP = """
import ctypes, faulthandler, signal
faulthandler.enable()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from headwise.runtime.ops.paddle_import import paddle
signal.raise_signal(signal.SIGTERM)  # still ignored
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
blocks = [library.malloc(1056) for _ in range(32)]
for block in blocks:
    ctypes.memset(block, 65, 1152)  # and what the allocator keeps behind it
for block in blocks:
    library.free(block)
"""


def test_a_process_whose_heap_is_broken_ends_and_says_where() -> None:
    """Paddle's own handler waits for the lock that the aborted `free` holds."""
    ended = subprocess.run([sys.executable, "-c", BREAK_THE_HEAP], capture_output=True, timeout=60, check=False)

    assert ended.returncode == -signal.SIGABRT
    assert b"Fatal Python error: Aborted" in ended.stderr
