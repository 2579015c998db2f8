"""Waiting for what another process is to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(
    condition: Callable[[], Any], within_s: float = 30.0, otherwise: Callable[[], Any] = lambda: "no more is known"
) -> None:
    """Return once the condition holds; raise AssertionError with what ``otherwise`` tells if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {within_s} s: {otherwise()}"
        time.sleep(0.05)
