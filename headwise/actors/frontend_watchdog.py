"""Notices a scheduler or a store that hangs: Ray itself only notices actors that die."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from headwise.actors.failover import Answers, FailoverWatchdog
from headwise.actors.names import SCHEDULER, STANDBY, STORE
from headwise.actors.supervisor import Supervisor
from headwise.actors.watchdog import RemoteProgress, Watchdog
from headwise.runtime.config.engine_config import EngineConfig

_WITNESS = f"{SCHEDULER}{STANDBY}"
STORE_PATIENCE = 2.0
"""The store is replaced after so many times what makes the scheduler be: nobody waits for it, and until the new one has
heard what engines hold, requests miss what they could have hit."""


class FrontendWatchdog:
    """Asks each actor for its server's loop count, and has an actor replaced whose count stands still for
    ``front_timeout_s``: its process may be suspended, or the server's thread may hang. Where a scheduler stands by and
    answers meanwhile, ``failover_timeout_s`` are enough for the one that serves, and `STORE_PATIENCE` times that for
    the store, which is on their node.

    Runs in the process that started the deployment. That process is the only one that replaces these actors, so none
    is replaced twice.

    roles: of the actors to watch
    """

    def __init__(self, supervisor: Supervisor, roles: Sequence[str], config: EngineConfig) -> None:
        self._supervisor = supervisor
        watched = [*roles, *([_WITNESS] if config.standby else [])]
        self._watchdogs = [self._watchdog(role, config.front_timeout_s) for role in watched]
        if config.standby:
            timeout_s = config.failover_timeout_s
            self._watchdogs.append(self._witnessed_watchdog(SCHEDULER, timeout_s))
            self._watchdogs.append(self._witnessed_watchdog(STORE, STORE_PATIENCE * timeout_s))

    def _watchdog(self, role: str, timeout_s: float) -> Watchdog:
        replace = partial(self._supervisor.replace, role, _silent_for(timeout_s))
        return Watchdog(RemoteProgress(partial(self._ask, role)), timeout_s, replace)

    def _witnessed_watchdog(self, role: str, timeout_s: float) -> Watchdog:
        def replace() -> None:
            if self._supervisor.can_replace(role):
                self._supervisor.replace(role, _silent_for(timeout_s))

        witness = Answers(partial(self._ask, _WITNESS))
        return FailoverWatchdog(RemoteProgress(partial(self._ask, role)), witness, timeout_s, replace)

    def start(self) -> None:
        for watchdog in self._watchdogs:
            watchdog.start()
        atexit.register(self.stop)  # runs before Ray's own shutdown: a call during that may crash

    def stop(self) -> None:
        """No actor is asked or replaced any more once this returns. Idempotent."""
        atexit.unregister(self.stop)
        for watchdog in self._watchdogs:
            watchdog.stop()

    def _ask(self, role: str) -> Future[int] | None:
        """None if no actor serves, or if this process has left the cluster: a call would start a new Ray instance."""
        actor: Any | None = self._supervisor.serving(role)
        if actor is None or not ray.is_initialized():
            return None
        question: Future[int] = actor.loop_count.options(enable_task_events=False).remote().future()
        return question


def _silent_for(timeout_s: float) -> str:
    return f"it has done nothing for {timeout_s:g} s"
