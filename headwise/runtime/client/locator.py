"""Finds a scheduler that has moved to another address."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from headwise.errors import HeadwiseError

log = logging.getLogger(__name__)

LOCATE_S = 1.0
"""A scheduler that refuses connections for so long is looked for, and so often."""
SILENT_S = 3.0
"""One that says nothing for so long is looked for, too."""


class Locator:
    """Asks on a thread of its own, as an answer may take seconds. Owned by one thread.

    locate: returns the scheduler's endpoint; raises `HeadwiseError` where nobody knows
    found:  is given what it returned, on the other thread
    """

    def __init__(self, locate: Callable[[], str], found: Callable[[str], None]) -> None:
        self._locate = locate
        self._found = found
        self._asked_at = float("-inf")
        self._thread: threading.Thread | None = None

    def look(self, now: float) -> None:
        """Ask, unless the last question was a moment ago or is still open."""
        if now - self._asked_at < LOCATE_S or (self._thread is not None and self._thread.is_alive()):
            return
        self._asked_at = now
        self._thread = threading.Thread(target=self._ask, name="headwise-locator", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._found(self._locate())
        except HeadwiseError as error:
            log.info("the scheduler is not found: %s", error)
        except Exception:
            log.exception("looking for the scheduler failed")
