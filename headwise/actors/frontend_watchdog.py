"""Notices a scheduler or a store that hangs: Ray itself only notices actors that die."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from headwise.actors.watchdog import RemoteProgress, Watchdog


class FrontendWatchdog:
    """Asks each actor for its server's loop count, and has an actor replaced whose count stands still for
    ``timeout_s``: its process may be suspended, or the server's thread may hang.

    Runs in the process that started the deployment. That process is on the same node as both actors, and it is the
    only one that replaces them, so an actor is not replaced twice.

    roles:    of the actors to watch
    current:  the handle of a role's actor; None while no actor of that role serves
    on_stuck: called with the role and the cause, on a thread of the watchdog
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
            Watchdog(RemoteProgress(partial(_ask, current, role)), timeout_s, partial(on_stuck, role, cause))
            for role in roles
        ]

    def start(self) -> None:
        for watchdog in self._watchdogs:
            watchdog.start()
        atexit.register(self.stop)  # runs before Ray's own shutdown: a call during that may crash

    def stop(self) -> None:
        """No actor is asked or replaced any more once this returns. Idempotent."""
        atexit.unregister(self.stop)
        for watchdog in self._watchdogs:
            watchdog.stop()


def _ask(current: Callable[[str], Any | None], role: str) -> Future[int] | None:
    """None if no actor serves, or if this process has left the cluster: a call would then start a new Ray instance."""
    actor = current(role)
    if actor is None or not ray.is_initialized():
        return None
    question: Future[int] = actor.loop_count.options(enable_task_events=False).remote().future()
    return question
