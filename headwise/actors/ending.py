"""The end of an actor, for which its owner waits in a call."""

from __future__ import annotations

import threading
from typing import Any

import ray


def end_this_actor(after_s: float) -> None:
    """Have this process, an actor's, end for good in so many seconds, unless somebody else has ended it by then."""
    me: Any = ray.get_runtime_context().current_actor

    def end() -> None:
        ray.kill(me, no_restart=True)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


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
