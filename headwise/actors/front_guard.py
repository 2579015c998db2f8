"""Has Ray replace a scheduler or a store that lives and does nothing: Ray itself only notices those that die."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from headwise.runtime.watchdog import RemoteTurns, Watchdog

log = logging.getLogger(__name__)


class FrontGuard:
    """Asks the actors how many turns their servers' threads have taken; ends the process of one that takes none for
    ``timeout_s``, so that Ray starts it again. It may be stopped as a whole, or one of its threads stands still.

    Lives in the process that started the deployment: that is on the node of both, and the only one to judge them, so
    nobody else replaces what has just been replaced.

    actors: their handles, by role
    """

    def __init__(self, actors: Mapping[str, Any], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._watchdogs = [
            Watchdog(RemoteTurns(partial(_ask, actor)), timeout_s, partial(self._replace, role, actor))
            for role, actor in actors.items()
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

    def _replace(self, role: str, actor: Any) -> None:
        log.error("the %s has done nothing for %g s: its process is replaced", role, self._timeout_s)
        try:
            ray.kill(actor, no_restart=False)
        except (ValueError, ray.exceptions.RayError) as error:
            log.error("the %s could not be replaced: %s", role, error)


def _ask(actor: Any) -> Future[int] | None:
    """None if this process has left its cluster: a call would make it start another one."""
    if not ray.is_initialized():
        return None
    question: Future[int] = actor.turns.remote().future()
    return question
