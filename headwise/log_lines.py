"""headwise's log lines, as people read them."""

from __future__ import annotations

import logging
import sys
from collections import deque
from typing import TextIO

MOST_LINES = 100
"""Of a process's last lines that are kept for others."""


def show_log_lines() -> None:
    """Let them through to stderr, each with its time. In an actor, that is a file of Ray's."""
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("headwise")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _ToStderr(logging.StreamHandler[TextIO]):
    """To what `sys.stderr` is at the moment: while there are bars, what they write their own lines around."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class LatestLines(logging.Handler):
    """The last lines of this process, for another one that asks now and then."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[tuple[int, str]] = deque(maxlen=MOST_LINES)
        self._count = 0

    @classmethod
    def kept(cls) -> LatestLines:
        """Those of headwise's loggers from now on, besides being shown: call it after `show_log_lines`."""
        lines = cls()
        logging.getLogger("headwise").addHandler(lines)
        return lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = record.levelno, record.getMessage()
        except Exception:
            self.handleError(record)
            return
        self._lines.append(line)
        self._count += 1

    def since(self, count: int) -> tuple[int, list[tuple[int, str]]]:
        """How many lines there were, and level and text of those after the first ``count``, as far as they are kept."""
        assert self.lock is not None, "a handler has one"
        with self.lock:
            new = min(self._count - count, len(self._lines))
            return self._count, list(self._lines)[len(self._lines) - new :] if new > 0 else []
