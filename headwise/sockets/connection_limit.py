"""How many connections a server keeps, and the log line that tells of those it refused."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
"""Of a server; fewer where the process may open few files. A connection costs its memory, and up to three files."""
LOG_INTERVAL_S = 10.0
"""At most one log line per interval."""


def max_connections() -> int:
    """`MAX_CONNECTIONS`, or a quarter of the files that this process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 4)


class ConnectionLimit:
    """Tells whether a server has too many connections, and logs how many it refused.

    where: the server's address, for the log
    most:  connections that are kept
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = max_connections()
        self._where = where
        self._clock = clock
        self._log_at = clock()
        self._refused = 0

    def refuses(self, num: int) -> bool:
        """Whether the newest of so many connections is to be closed."""
        if num <= self.most:
            return False
        self._refused += 1
        if self._clock() >= self._log_at:
            self._log_at = self._clock() + LOG_INTERVAL_S
            log.warning("%s keeps %d connections and has closed %d newer ones", self._where, self.most, self._refused)
        return True
