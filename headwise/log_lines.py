"""headwise's log lines, as people read them."""

from __future__ import annotations

import logging


def show_log_lines() -> None:
    """Let them through to stderr, each with its time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("headwise")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
