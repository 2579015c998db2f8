"""Waiting for what another thread or process is to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0
"""Longest wait for what takes a moment on an idle machine: a busy one must not fail a test."""


def eventually(
    condition: Callable[[], Any],
    within_s: float = PATIENCE_S,
    otherwise: Callable[[], Any] = lambda: "no more is known",
) -> None:
    """Return once the condition holds; raise AssertionError with what ``otherwise`` tells if it does not in time."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < within_s, f"did not come true within {within_s} s: {otherwise()}"
        time.sleep(min(max(0.01, waited / 10), 0.2))  # what is waited for needs the cores, too
