"""Notices a scheduler or a store that lives and does nothing: Ray itself only notices those that die."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from headwise.actors.watchdog import RemoteTurns, Watchdog


class FrontendWatchdog:
    """Asks the actors how many turns their servers' threads have taken; has one replaced that takes none for
    ``timeout_s``. It may be stopped as a whole, or one of its threads stands still.

    Lives in the process that started the deployment: that is on the node of both, and the only one to judge them, so
    nobody else replaces what has just been replaced.

    roles:    of the actors
    current:  the handle of a role's actor; None while there is none that serves
    on_stuck: called with the role and what is wrong with it, on a thread of the guard
    """

    def __init__(
        self,
        roles: Sequence[str],
        current: Callable[[str], Any | None],
        timeout_s: float,
        on_stuck: Callable[[str, str], None],
    ) -> None:
        cause = f"it has done nothing for {timeout_s:g} s"
        self._watchdogs = [
            Watchdog(RemoteTurns(partial(_ask, current, role)), timeout_s, partial(on_stuck, role, cause))
            for role in roles
        ]

    def start(self) -> None:
        for watchdog in self._watchdogs:
            watchdog.start()
        atexit.register(self.stop)  # which comes before Ray's own end: a call in the middle of that may crash

    def stop(self) -> None:
        """No actor is asked or replaced any more once this returns. Idempotent."""
        atexit.unregister(self.stop)
        for watchdog in self._watchdogs:
            watchdog.stop()


def _ask(current: Callable[[str], Any | None], role: str) -> Future[int] | None:
    """None if there is nobody to be asked, or this process has left its cluster: a call would start another one."""
    actor = current(role)
    if actor is None or not ray.is_initialized():
        return None
    question: Future[int] = actor.turns.options(enable_task_events=False).remote().future()
    return question
