"""The end of an actor, for which its owner waits in a call."""

from __future__ import annotations

import threading


class Ending:
    """Comes once. One caller waits for it: a later one takes the place of an earlier one, whose process has died; else
    the calls of dead owners would take up the actor's threads one by one.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_over = False
        self._callers = 0

    def come(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when it has come, or when another caller waits."""
        with self._changed:
            self._callers += 1
            mine = self._callers
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self._callers > mine)
