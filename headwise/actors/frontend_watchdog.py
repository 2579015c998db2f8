"""Notices a scheduler or a store that hangs: Ray itself only notices actors that die."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from headwise.actors.failover import Answers, FailoverWatchdog
from headwise.actors.names import STANDBY
from headwise.actors.supervisor import Supervisor
from headwise.actors.watchdog import RemoteProgress, Watchdog
from headwise.runtime.config.engine_config import EngineConfig


class FrontendWatchdog:
    """Asks each actor for its server's loop count, and has an actor replaced whose count stands still for
    ``front_timeout_s``: its process may be suspended, or the server's thread may hang. Where another one stands by and
    answers meanwhile, ``failover_timeout_s`` are enough.

    Runs in the process that started the deployment. That process is on the same node as these actors, and it is the
    only one that replaces them, so an actor is not replaced twice.

    roles: of the actors to watch
    have_standby: those of them for which another one stands by
    """

    def __init__(
        self, supervisor: Supervisor, roles: Sequence[str], have_standby: Sequence[str], config: EngineConfig
    ) -> None:
        self._supervisor = supervisor
        watched = [*roles, *(f"{role}{STANDBY}" for role in have_standby)]
        self._watchdogs = [self._watchdog(role, config.front_timeout_s) for role in watched]
        self._watchdogs += [self._failover_watchdog(role, config.failover_timeout_s) for role in have_standby]

    def _watchdog(self, role: str, timeout_s: float) -> Watchdog:
        replace = partial(self._supervisor.replace, role, _silent_for(timeout_s))
        return Watchdog(RemoteProgress(partial(self._ask, role)), timeout_s, replace)

    def _failover_watchdog(self, role: str, timeout_s: float) -> Watchdog:
        def fail_over() -> None:
            if self._supervisor.can_fail_over(role):
                self._supervisor.replace(role, _silent_for(timeout_s))

        witness = Answers(partial(self._ask, f"{role}{STANDBY}"))
        return FailoverWatchdog(RemoteProgress(partial(self._ask, role)), witness, timeout_s, fail_over)

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
