"""Ray's own processes: started as users do, and ended without a trace."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

OBJECT_STORE_BYTES = 80 << 20


def start(
    *options: str, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """``ray start --block`` with these options, nothing of this process's own Ray settings, and no authentication."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **(environment or {})}
    return subprocess.Popen(
        [*prefix, *command, f"--object-store-memory={OBJECT_STORE_BYTES}", *options],
        env={**inherited, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes], temp: Path) -> None:
    """End a head, and what it left behind: its processes are known by the directory that they name."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    process.kill()
    process.wait()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(temp).encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
