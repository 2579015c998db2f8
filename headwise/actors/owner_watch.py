"""Notices that the owner of a detached deployment hangs: Ray itself only notices owners that die."""

from __future__ import annotations

import logging
from typing import Any

import ray

from headwise.actors.names import NAMESPACE, OWNER, actor_name
from headwise.actors.watchdog import Watchdog

log = logging.getLogger(__name__)


class OwnerWatch:
    """Has Ray start the owner again when it has not called the scheduler for ``timeout_s``, and then for twice as long
    each time: it may take that long to find what runs. That is adopted, so to end an owner that was only slow does no
    harm.

    Where `headwise serve` owns the deployment, nobody else can do what it does, and nothing happens.

    deployment: its name
    first_s:    the first call may take so long, if that is longer
    """

    def __init__(self, deployment: str, timeout_s: float, first_s: float = 0.0) -> None:
        self._owner = actor_name(deployment, OWNER)
        self._timeout_s, self._first_s = timeout_s, first_s
        self._calls = 0
        self._calls_then = 0  # when it was last found silent
        self._silences = 0
        self._watchdog = Watchdog(lambda: self._calls, timeout_s, self._silent)

    def start(self) -> None:
        self._watchdog.start()

    def close(self) -> None:
        self._watchdog.stop()

    def called(self) -> None:
        """The owner has called."""
        self._calls += 1

    def _silent(self) -> None:
        self._silences = 1 if self._calls != self._calls_then else self._silences + 1
        self._calls_then = self._calls
        if not self._calls and self._silences * self._timeout_s < self._first_s:
            return
        if self._silences & (self._silences + 1):  # not after 1, 3, 7, 15, ... times the timeout
            return
        try:
            owner: Any = ray.get_actor(self._owner, namespace=NAMESPACE)
        except ValueError:  # there is none
            return
        silent_s = self._silences * self._timeout_s
        log.error("%s has said nothing for %g s: Ray is to start it again", self._owner, silent_s)
        ray.kill(owner, no_restart=False)
