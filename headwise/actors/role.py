"""One part of a deployment: its present actor, and how to make the next."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from headwise.actors.names import NAMESPACE, STANDBY, actor_name, in_turn, turn_of
from headwise.actors.process import Process, process_of
from headwise.actors.restarts import Life, Phase
from headwise.errors import HeadwiseError

CALM_S = 5.0
"""A standby is made so long after the actor whose place it may take began to serve."""


class Site(Protocol):
    """Where an actor runs: `EngineSite` or `FrontendSite`."""

    node: str
    address: str

    @property
    def nodes(self) -> frozenset[str]:
        """All that it takes something of."""

    def choose(self, life: Life) -> None: ...
    def is_alive(self) -> bool: ...
    def is_placed(self) -> bool: ...
    def options(self) -> dict[str, Any]: ...
    def needs(self) -> str: ...
    def release(self) -> None: ...


@dataclass
class PastSite:
    """Where an actor is whose role has gone elsewhere; empty: nobody knows."""

    node: str = ""
    address: str = ""

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset((self.node,)) if self.node else frozenset()

    def choose(self, life: Life) -> None:
        """There is nothing to choose: no actor is made there any more."""

    def is_alive(self) -> bool:
        return False

    def is_placed(self) -> bool:
        return False

    def options(self) -> dict[str, Any]:
        return {}

    def needs(self) -> str:
        return ""

    def release(self) -> None:
        """It took nothing."""


class Role:
    """One part of the deployment (``scheduler``, ``store``, ``engine-N``): its present actor, and how to make the next.

    The actor's class has `ready`, which returns when the actor serves, and `ended`, which returns when it is stopped.
    Both raise why it does not serve. Its last argument is how many times the role was started before.

    arguments: returns those of the next actor, but for the last one
    starts:   actors made so far
    error:    why the last actor did not start or ended, if headwise raised it
    is_adopted: the actor was taken over, and has not said yet whether it serves
    leave_by: it is to end, and not to be started again; killed if it still lives then
    standby:  takes the actor's place when it ends, if it is ready
    successor: is made beside the actor, at another node, and takes the role over: see `FrontMove`
    known_as: the name that the actor has, or is to have, where that is not the role's
    has_streams: whether its actors may have begun what they should end when the role goes to another node: their class
              has `leave` and `follow` (see `FormerRole`)
    """

    def __init__(
        self,
        deployment: str,
        name: str,
        actor_class: Any,
        arguments: Callable[[], tuple[Any, ...]],
        site: Site,
        life: Life,
        has_streams: bool = False,
    ) -> None:
        self.name = self.known_as = name
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
        self.standby: StandbyRole | None = None
        self.successor: Role | None = None
        self.has_streams = has_streams
        self._deployment = deployment
        self._process: Any = None
        self._class = actor_class
        self._arguments = arguments

    @property
    def is_leaving(self) -> bool:
        return self.leave_by < math.inf

    def is_due(self, now: float) -> bool:
        """Whether it is to be started."""
        return self.life.is_due(now)

    def create(self) -> None:
        """Make the actor. Raises ValueError if its name is taken."""
        options = {"name": actor_name(self._deployment, self.known_as), "namespace": NAMESPACE, **self.site.options()}
        self._take(self._class.options(**options).remote(*self._arguments(), self.starts))

    def promote(self) -> bool:
        """Have the standby's actor take the place of this one's, which has ended. False: none is ready."""
        standby = self.standby
        if standby is None or standby.handle is None or standby.life.phase is not Phase.RUNNING:
            return False
        self.known_as, standby.known_as = standby.known_as, self.known_as
        self._take(standby.handle)
        self._process = standby._process
        standby.give_away()
        return True

    def _take(self, handle: Any) -> None:
        self.starts += 1
        self.handle, self._process = handle, None
        self.cause, self.is_told, self.is_adopted = "", False, False
        self.is_ready = self._begin(handle)

    def _begin(self, handle: Any) -> Any:
        """The call that returns when the actor serves."""
        return handle.ready.remote()

    def adopt(self, handle: Any, now: float, known_as: str = "") -> None:
        """Take over an actor that is there, whoever made it. Whether it serves it has yet to say.

        known_as: the role whose name it has, if that is another one: it stood by, or had a predecessor elsewhere
        """
        self.known_as = known_as or self.known_as
        self.starts += 1
        self.handle, self.has_served, self.is_adopted = handle, True, True
        self.is_ready = handle.ready.remote()
        self.life.created(now)

    def part(self, site: PastSite) -> FormerRole:
        """The present actor, which has the role no more.

        site: where it is
        """
        assert self.handle is not None
        former = FormerRole(self._deployment, self.known_as, self.handle, site)
        self.handle = None
        return former

    def pass_on(self) -> None:
        """The successor's actor has the role from now on, or where there is none yet, the one that is to be made."""
        successor, self.successor = self.successor, None
        assert successor is not None
        self.handle, self.is_ready, self.is_over = successor.handle, successor.is_ready, successor.is_over
        self.known_as, self.life, self._process = successor.known_as, successor.life, successor._process
        self.starts, self.error, self.cause = successor.starts, successor.error, successor.cause
        self.is_told, self.is_adopted = successor.is_told, False
        if self.standby is not None:
            self.standby.known_as = in_turn(self.standby.name, turn_of(self.known_as))

    def serves(self, now: float) -> None:
        """The actor is ready. From now on the supervisor waits for its end."""
        assert self.handle is not None
        self.is_over = self.handle.ended.remote()
        self._process = self.handle.__ray_call__.remote(process_of)
        self.has_served, self.is_adopted = True, False
        self.life.ready(now)

    def kill(self) -> None:
        """End the process, if it still lives, and free its name: Ray keeps the name of an actor that died by itself."""
        handle = self.handle
        if handle is not None:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(handle)

    def kill_at_once(self) -> None:
        """As `kill`, also a process that does nothing, for which Ray takes five seconds: if it is on this node."""
        process = self._process_here()
        if process is None or not process.kill():
            self.kill()

    def _process_here(self) -> Process | None:
        """The actor's process, if that runs on this node and has said which it is."""
        is_here = self.site.node == ray.get_runtime_context().get_node_id()
        if not is_here or self._process is None or not ray.wait([self._process], timeout=0)[0]:
            return None
        with contextlib.suppress(ray.exceptions.RayError):
            process: Process | None = ray.get(self._process)
            return process
        return None

    def awaited(self) -> Any | None:
        """The call whose return must be handled next; None: there is none."""
        return {Phase.STARTING: self.is_ready, Phase.RUNNING: self.is_over}.get(self.life.phase)

    def __str__(self) -> str:
        return f"{self.name} on node {self.site.address}" if self.site.address else self.name


class StandbyRole(Role):
    """The next actor of a role: it has loaded all it needs, and waits to be told to serve.

    Its actor's class has `prepare`, which returns when it is ready for that, and it runs where the role's actor runs.
    Two names of one turn go to and fro between both, so that the actor that serves has one of them.
    """

    def __init__(self, role: Role) -> None:
        """The standby of this role, from now on."""
        life = Life(role.life.start_timeout_s)
        super().__init__(role._deployment, f"{role.name}{STANDBY}", role._class, role._arguments, role.site, life)
        turn = turn_of(role.known_as)
        self.known_as = in_turn(self.name, turn)
        if self.known_as == role.known_as:  # that of an adopted role's actor, which stood by once
            self.known_as = in_turn(role.name, turn)
        self.starts = 1  # none of its actors is the first of the role
        self._role = role
        role.standby = self

    def is_due(self, now: float) -> bool:
        """Not while the role's actor is starting, nor just after: that needs the processors first."""
        return super().is_due(now) and self._role.life.has_run_for(CALM_S, now)

    def give_away(self) -> None:
        """Its actor serves now, and another one is to be made."""
        self.handle = self._process = None
        self.life.displaced(-math.inf)

    def _begin(self, handle: Any) -> Any:
        return handle.prepare.remote()


class FormerRole(Role):
    """An actor whose role has gone to another node: it ends what it has begun, and is not started again.

    Its actor's class has `leave`, by which it takes nothing new and ends in time, and `follow`, which tells it where
    scheduler and store are now. There is an actor for as long as there is this role.
    """

    handle: Any

    def __init__(self, deployment: str, known_as: str, handle: Any, site: PastSite) -> None:
        super().__init__(deployment, f"former {known_as}", None, tuple, site, Life())
        self.known_as = known_as
        self.handle = handle
        self.has_served = True
