from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.waiting import PATIENCE_S

from headwise.runtime.worker import futex


@pytest.fixture(params=["futex", "naps"])
def word(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Of machines that have the call, and of others."""
    if request.param == "naps":
        monkeypatch.setattr(futex, "_CALL", None)
    return np.zeros(1, np.uint32)


def test_who_waits_is_woken_by_who_changes_the_word(word: np.ndarray) -> None:
    seen = threading.Event()

    def wait() -> None:
        while word[0] == 0:
            futex.wait_while(word.ctypes.data, 0, PATIENCE_S)
        seen.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    word[0] = 2**32 - 1
    futex.wake(word.ctypes.data)
    waiting.join(PATIENCE_S)
    assert seen.is_set()


def test_nobody_waits_for_what_has_been(word: np.ndarray) -> None:
    word[0] = 2**31 + 5
    futex.wait_while(word.ctypes.data, 2**31 + 4, PATIENCE_S)


def test_nobody_waits_longer_than_it_wants_to(word: np.ndarray) -> None:
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        futex.wait_while(word.ctypes.data, 0, 0.05)
    futex.wake(word.ctypes.data)
