from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headwise.actors.process import Process, _started

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPS) as child:
        yield child
        child.kill()


def test_a_process_that_is_stopped_can_be_killed_once(child: subprocess.Popen[bytes]) -> None:
    process = Process(child.pid, _started(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    assert process.kill()
    assert child.wait() == -signal.SIGKILL
    assert not process.kill(), "nobody has its number any more"


def test_another_process_that_got_the_number_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    earlier = replace(Process(child.pid, _started(child.pid)), started="1")
    assert not earlier.kill()
    assert child.poll() is None


def test_a_process_knows_itself() -> None:
    assert Process.this() == Process(os.getpid(), _started(os.getpid()))
