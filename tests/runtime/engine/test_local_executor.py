"""The executor whose worker is a thread of this process, on a machine that gives it no core now and then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

_LOOKS = """
import sys, time
from headwise.runtime.engine.local_executor import LocalExecutor
class Worker:
    def begin(self, batch): raise AssertionError
print("begins", flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    executor = LocalExecutor(Worker())
    assert executor._take(0.00002) is None
print("ends", flush=True)
"""


@pytest.mark.soak
def test_to_look_for_a_step_ends_however_often_the_thread_loses_its_core() -> None:
    """A `SimpleQueue` looked for ever, within seconds."""
    looking = subprocess.Popen([sys.executable, "-c", _LOOKS, "20"], stdout=subprocess.PIPE, text=True)
    try:
        assert looking.stdout is not None
        assert looking.stdout.readline() == "begins\n"
        until = time.monotonic() + 40
        while looking.poll() is None and time.monotonic() < until:
            for number, seconds in ((signal.SIGSTOP, 0.0006), (signal.SIGCONT, 0.0007)):
                os.kill(looking.pid, number)
                time.sleep(seconds)
        assert looking.stdout.readline() == "ends\n"
        assert looking.wait(60) == 0
    finally:
        looking.kill()
        looking.wait()
