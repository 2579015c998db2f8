"""Waiting for a word of memory that processes share, and waking who waits for it.

Who waits gives the processor to somebody else until it is woken. To yield in a loop instead gives it to whatever else
runs on this machine, too, for as long as the kernel lets that run: where others compute, milliseconds at a time.

Sources: futex(2); the numbers of system calls are Linux's, ``asm/unistd.h``.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

# Of machines whose words begin with their lowest byte.
_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_CALL = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_NAP_S = 0.0005
"""Where there is no such call."""


class _Time(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_system_call = ctypes.CDLL(None).syscall


def wait_while(address: int, value: int, timeout_s: float) -> None:
    """Return once somebody calls `wake` with ``address``, the 32 bits there are not ``value``, or time is over; and now
    and then for no reason."""
    if _CALL is None:
        time.sleep(min(timeout_s, _NAP_S))
        return
    whole = int(timeout_s)
    limit = _Time(whole, int((timeout_s - whole) * 1e9))
    _system_call(_CALL, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Let all go on that wait for the word at ``address``, in whatever process, which has been changed before."""
    if _CALL is not None:
        _system_call(_CALL, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)
