"""Restarts a deployment's actors when they end. Ray's own restarts are limited for life and stay on one node."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from typing import Any, Protocol

import ray

from headwise.actors.calls import cause_of
from headwise.actors.names import NAMESPACE, actor_name
from headwise.actors.restarts import Life, Phase
from headwise.liveness_clock import LivenessClock

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_ASK_S = 1.0
_TELL_S = 5.0
"""After so long a wait for a node, the wait is logged."""
_JOIN_S = 5.0
"""Longest wait for the supervisor's thread to end: a call to Ray may hang when the cluster is gone."""


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
    """

    def __init__(
        self, deployment: str, name: str, actor_class: Any, arguments: tuple[Any, ...], site: Site, life: Life
    ) -> None:
        self.name = name
        self.site = site
        self.life = life
        self.handle: Any | None = None
        self.is_ready: Any = None
        self.is_over: Any = None
        self.cause = ""  # why it is being replaced, where Ray does not know
        self.is_told = False
        self._actor_name = actor_name(deployment, name)
        self._class = actor_class
        self._arguments = arguments
        self._starts = 0

    def create(self) -> None:
        """Make the actor. Raises ValueError if its name is taken."""
        options = {"name": self._actor_name, "namespace": NAMESPACE, **self.site.options()}
        handle = self._class.options(**options).remote(*self._arguments, self._starts)
        self._starts += 1
        self.handle = handle
        self.cause, self.is_told = "", False
        self.is_ready = handle.ready.remote()

    def serves(self, now: float) -> None:
        """The actor is ready. From now on the supervisor waits for its end."""
        assert self.handle is not None
        self.is_over = self.handle.ended.remote()
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


class Supervisor:
    """Watches the roles on a thread of its own. An actor that ends is started again, and the cause is logged. One that
    cannot be started is tried again for as long as the deployment lives; the others serve without it.
    """

    def __init__(self, engine_timeout_s: float) -> None:
        self._engine_timeout_s = engine_timeout_s
        self._roles: dict[str, Role] = {}
        self._clock = LivenessClock()
        self._silent: Any = None  # the call to the scheduler that is under way
        self._ask_at = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.stop)  # before Ray's own end

    def stop(self) -> None:
        """Nothing is started any more once this returns. Idempotent."""
        atexit.unregister(self.stop)
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def add(self, role: Role) -> None:
        """Watch this role from now on. Its actor must serve."""
        role.serves(self._clock())
        self._roles[role.name] = role

    def serving(self, name: str) -> Any | None:
        """The handle of the role's actor; None while no actor of the role serves."""
        role = self._roles.get(name)
        return role.handle if role is not None and role.life.phase is Phase.RUNNING else None

    def replace(self, name: str, cause: str) -> None:
        """End the role's actor, which lives but does not work, and have it started again. Callable from any thread."""
        role = self._roles[name]
        log.error("%s is replaced: %s", role, cause)
        role.cause = cause
        role.kill()

    # ---- the thread ----

    def _run(self) -> None:
        told = ""
        while not self._stopping.is_set():
            try:
                self._run_once()
                told = ""
            except Exception as error:  # for example Ray does not answer: the next run goes on where this one stopped
                if (cause := cause_of(error)) != told:
                    log.error("the deployment's actors cannot be seen to: %s", cause)
                told = cause
                self._stopping.wait(_LOOK_S)

    def _run_once(self) -> None:
        roles = list(self._roles.values())
        waiting = {call: role for role in roles if (call := role.awaited()) is not None}
        if waiting:
            ended, _ = ray.wait(list(waiting), timeout=_LOOK_S)
        else:
            ended = []
            self._stopping.wait(_LOOK_S)
        now = self._clock()
        if self._stopping.is_set():
            return
        for call in ended:
            self._take(waiting[call], call, now)
        for role in roles:
            self._advance(role, now)
        self._replace_silent_engines(now)

    def _take(self, role: Role, call: Any, now: float) -> None:
        """The call that was waited for has returned or failed."""
        try:
            ray.get(call)
        except Exception as error:
            self._end(role, role.cause or cause_of(error), now)
            return
        if role.life.phase is Phase.STARTING:
            role.site.is_placed()  # Ray may have moved it
            role.serves(now)
            log.warning("%s serves again", role)
        else:
            self._end(role, role.cause or "it has stopped", now)

    def _end(self, role: Role, cause: str, now: float) -> None:
        who, start = str(role), "did not start" if role.life.phase is Phase.STARTING else "has ended"
        role.kill()
        role.handle = None
        if role.site.is_alive():
            delay = role.life.ended(now, role.site.node)
        else:
            delay, cause = 0.0, f"its node has died ({cause})"
            role.life.displaced(now)
        log.error("%s %s: %s; it is started again%s", who, start, cause, f" in {delay:.0f} s" if delay else "")

    def _advance(self, role: Role, now: float) -> None:
        life = role.life
        if life.is_late(now):
            self._end(role, "it takes too long to start", now)
        if life.is_due(now):
            role.site.choose(life)
            life.placing(now)
        if life.phase is not Phase.PLACING:
            return
        if role.site.is_placed():
            with contextlib.suppress(ValueError):  # the predecessor still has the name: try again next time
                role.create()
                life.created(now)
        elif life.has_waited_for(_TELL_S, now) and not role.is_told:
            role.is_told = True
            log.warning("%s waits for a node with room: it needs %s on one node", role.name, role.site.needs())

    def _replace_silent_engines(self, now: float) -> None:
        """Replace engines that the scheduler reports as silent. An engine that was started only since then is not
        meant, and is left alone.
        """
        if self._silent is None:
            scheduler = self.serving("scheduler")
            if scheduler is not None and now >= self._ask_at:
                self._silent = scheduler.take_silent.options(enable_task_events=False).remote()
                self._ask_at = now + _ASK_S
            return
        if not ray.wait([self._silent], timeout=0)[0]:
            return
        question, self._silent = self._silent, None
        with contextlib.suppress(ray.exceptions.RayError):  # the scheduler has ended, which is noticed elsewhere
            for name in ray.get(question):
                role = self._roles.get(name)
                if role is not None and role.life.has_run_for(self._engine_timeout_s, now):
                    self.replace(name, f"it has said nothing for {self._engine_timeout_s:g} s")
