"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
"""Of a container: where it sees its own limits."""


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """The cores that this process may run on, or fewer where its container's limit is less time than they have.

    Threads beyond that would stand still in the middle of their work, and others wait for them. Limits of cgroups above
    the container's, which it cannot see, do not count.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(cores, _limit(cgroup))))


def _limit(cgroup: Path) -> float:
    """Seconds of CPU that the cgroup may take in a second."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return float(quota) / float(period) if quota != "max" else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # no such controller: the first version of cgroups, or none
        pass
    try:
        quota, period = ((cgroup / "cpu" / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
