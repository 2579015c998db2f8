"""One part of a deployment: its present actor, and how to make the next."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import ray

from headwise.actors.names import NAMESPACE, actor_name
from headwise.actors.restarts import Life, Phase
from headwise.errors import HeadwiseError


class Site(Protocol):
    """Where an actor runs: `EngineSite` or `FrontendSite`."""

    node: str
    address: str

    def choose(self, life: Life) -> None: ...
    def is_alive(self) -> bool: ...
    def is_placed(self) -> bool: ...
    def options(self) -> dict[str, Any]: ...
    def needs(self) -> str: ...
    def release(self) -> None: ...


class Role:
    """One part of the deployment (``scheduler``, ``store``, ``engine-N``): its present actor, and how to make the next.

    The actor's class has `ready`, which returns when the actor serves, and `ended`, which returns when it is stopped.
    Both raise why it does not serve. Its last argument is how many times the role was started before.

    arguments: returns those of the next actor, but for the last one
    starts:   actors made so far
    error:    why the last actor did not start or ended, if headwise raised it
    is_adopted: the actor was taken over, and has not said yet whether it serves
    leave_by: it is to end, and not to be started again; killed if it still lives then
    """

    def __init__(
        self,
        deployment: str,
        name: str,
        actor_class: Any,
        arguments: Callable[[], tuple[Any, ...]],
        site: Site,
        life: Life,
    ) -> None:
        self.name = name
        self.site = site
        self.life = life
        self.handle: Any | None = None
        self.is_ready: Any = None
        self.is_over: Any = None
        self.cause = ""  # why it is being replaced, where Ray does not know
        self.error: HeadwiseError | None = None
        self.is_told = self.is_adopted = False
        self.starts = 0
        self.has_served = False
        self.leave_by = math.inf
        self._actor_name = actor_name(deployment, name)
        self._class = actor_class
        self._arguments = arguments

    @property
    def is_leaving(self) -> bool:
        return self.leave_by < math.inf

    def create(self) -> None:
        """Make the actor. Raises ValueError if its name is taken."""
        options = {"name": self._actor_name, "namespace": NAMESPACE, **self.site.options()}
        handle = self._class.options(**options).remote(*self._arguments(), self.starts)
        self.starts += 1
        self.handle = handle
        self.cause, self.is_told, self.is_adopted = "", False, False
        self.is_ready = handle.ready.remote()

    def adopt(self, handle: Any, now: float) -> None:
        """Take over an actor that is there, whoever made it. Whether it serves it has yet to say."""
        self.starts += 1
        self.handle, self.has_served, self.is_adopted = handle, True, True
        self.is_ready = handle.ready.remote()
        self.life.created(now)

    def serves(self, now: float) -> None:
        """The actor is ready. From now on the supervisor waits for its end."""
        assert self.handle is not None
        self.is_over = self.handle.ended.remote()
        self.has_served, self.is_adopted = True, False
        self.life.ready(now)

    def kill(self) -> None:
        """End the process, if it still lives, and free its name: Ray keeps the name of an actor that died by itself."""
        handle = self.handle
        if handle is not None:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(handle)

    def awaited(self) -> Any | None:
        """The call whose return must be handled next; None: there is none."""
        return {Phase.STARTING: self.is_ready, Phase.RUNNING: self.is_over}.get(self.life.phase)

    def __str__(self) -> str:
        return f"{self.name} on node {self.site.address}" if self.site.address else self.name
