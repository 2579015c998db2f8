"""The end of an actor, for which its owner waits in a call."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from headwise.actors.notice import at_its_node

LAST_WORDS_S = 3.0
"""For what an actor that has left tells at its end, and for its process to end."""


def leave_in_time(leave: Callable[[float], None], timeout_s: float, until: float) -> None:
    """Have this actor end for good once ``leave`` returns, which is called on a thread, with the seconds that it may
    take. Soon after these the actor ends in any case.

    until: when its node is taken away, as `time.time` counts somewhere
    """
    left_s = at_its_node(timeout_s, until, time.time())
    end_this_actor(left_s + 2 * LAST_WORDS_S)  # whatever hangs

    def run() -> None:
        leave(left_s)
        end_this_actor(LAST_WORDS_S)

    threading.Thread(target=run, name="headwise-leaving", daemon=True).start()


def end_this_actor(after_s: float) -> None:
    """Have this process, an actor's, end for good in so many seconds, unless somebody else has ended it by then."""
    me: Any = ray.get_runtime_context().current_actor

    def end() -> None:
        ray.kill(me, no_restart=True)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


def die_when_told_to() -> None:
    """Have SIGTERM end this process, an actor's, as SIGKILL does. To be called by the actor's constructor.

    Ray would wait for the actor's calls to end first. Those in which its owner waits for its end never do: it would
    answer nobody until it is taken for one that hangs.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
