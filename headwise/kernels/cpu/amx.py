"""Intel's matrix tiles (AMX) on x86: whether this process may use them.

A tile is eight times the size of the widest vector register, so a core has 8 KiB more of registers. Linux wants to be
asked before a process has them, as they do not fit on each signal stack.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
"""See https://docs.kernel.org/arch/x86/xstate.html."""


@cache
def is_granted() -> bool:
    """Whether all threads of this process may use tiles, which is asked for if they may not yet.

    Linux before 5.16, a CPU without them, a signal stack that is too small, and sandboxes refuse it.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return refused == 0
