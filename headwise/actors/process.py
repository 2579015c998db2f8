"""A process of a node, which may be killed by whoever runs there: Ray gives one that does nothing five seconds."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """One process, never another one that got its number later.

    started: when it was started, in clock ticks since its machine was: as the kernel says it
    """

    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        """Raises `OSError` where the kernel does not tell."""
        return cls(os.getpid(), _started(os.getpid()))

    def kill(self) -> bool:
        """Kill it, also if it is stopped. False: there is no such process any more, or this one may not kill it."""
        try:
            handle = os.pidfd_open(self.pid)  # from here on the number is not given to another one
        except (AttributeError, OSError):  # no Linux of these years, or no such process
            return False
        try:
            if _started(self.pid) != self.started:
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
        except OSError:
            return False
        finally:
            os.close(handle)


def process_of(actor: Any) -> Process | None:
    """For `__ray_call__`: the actor's process; None where the kernel does not tell."""
    try:
        return Process.this()
    except OSError:
        return None


def _started(pid: int) -> str:
    """Field 22 of ``/proc/PID/stat``; the second one, a name in brackets, may have anything in it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
