"""Restarts a deployment's actors when they end. Ray's own restarts are limited for life and stay on one node."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from headwise.actors.calls import cause_of, error_of
from headwise.actors.front import Notice
from headwise.actors.notice import FAREWELL_S
from headwise.actors.restarts import Phase
from headwise.actors.role import FormerRole, PastSite, Role, StandbyRole
from headwise.errors import DeploymentError
from headwise.liveness_clock import LivenessClock

log = logging.getLogger(__name__)

TAKE_OVER_S = 8.0
"""A standby that was to take over and does not serve by then hangs, and is replaced. Clients wait for 20 s."""
_LOOK_S = 0.25
_TELL_S = 5.0
"""After so long a wait for a node, the wait is logged."""
_JOIN_S = 5.0
"""Longest wait for the supervisor's thread to end: a call to Ray may hang when the cluster is gone."""


class Supervisor:
    """Watches the roles on a thread of its own. An actor that ends is started again, and the cause is logged. One that
    cannot be started is tried again for as long as the deployment lives; the others serve without it. A role that is
    leaving is forgotten when its actor ends, and what it held of the cluster is given back.
    """

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}
        self._clock = LivenessClock()
        self._now = self._clock()  # for other threads
        self._beside: Callable[[float], None] = lambda now: None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-supervisor", daemon=True)

    def start(self, beside: Callable[[float], None]) -> None:
        """``beside``: called several times a second on the supervisor's thread, with the time of its clock."""
        self._beside = beside
        self._thread.start()
        atexit.register(self.stop)  # before Ray's own end

    def stop(self) -> None:
        """Nothing is started any more once this returns. Idempotent."""
        atexit.unregister(self.stop)
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    @property
    def roles(self) -> dict[str, Role]:
        """All that are watched, by name; a copy."""
        return dict(self._roles)

    def now(self) -> float:
        """By the clock that the roles' lives go by."""
        return self._clock()

    def add(self, role: Role) -> None:
        """Watch this role from now on. If it was given an actor, that serves; if it has none, it is started."""
        if role.handle is not None and role.life.phase is Phase.DOWN:
            role.serves(self._clock())
        self._roles[role.name] = role

    def serving(self, name: str) -> Any | None:
        """The handle of the role's actor; None while no actor of the role serves."""
        role = self._roles.get(name)
        return role.handle if role is not None and role.life.phase is Phase.RUNNING else None

    def replace(self, name: str, cause: str) -> None:
        """End the role's actor, which lives but does not work, and have it started again. Callable from any thread."""
        role = self._roles.get(name)
        if role is None:
            return
        log.error("%s %s: %s", role, "is ended" if role.is_leaving else "is replaced", cause)
        role.cause = cause
        role.kill_at_once()

    def can_replace(self, name: str) -> bool:
        """Whether another actor would take the place of the role's at once: the one that stands by, if one is to.
        Callable from any thread."""
        role = self._roles.get(name)
        if role is None or (role.standby is not None and self.serving(role.standby.name) is None):
            return False
        return role.life.can_be_replaced(self._now)

    def prepare(self, role: Role, successor: Role) -> None:
        """Have the successor's actor started, beside the role's. On the supervisor's thread."""
        for former in [each for each in self.formers if each.site.address == successor.site.address]:
            self.retire(former, "what follows it comes to its node")
        role.successor = successor
        self.add(successor)

    def prepare_elsewhere(self, successor: Role) -> None:
        """Have the successor's actor started where its site is now. On the supervisor's thread."""
        self._displace(successor)

    def switch(self, role: Role, since: PastSite, notice: Notice) -> None:
        """Give the role to its successor. The actor that has it ends, and the one that stands by: one that has streams
        when these have, and when the notice says at the latest. On the supervisor's thread.

        since: where they are
        """
        assert role.successor is not None
        self._roles.pop(role.successor.name, None)
        if role.standby is not None:
            self._displace(role.standby)
        if role.has_streams and role.handle is not None and (role.life.phase is Phase.RUNNING or role.is_adopted):
            self.dismiss(role.part(since), notice)
        else:
            self._displace(role)
        role.pass_on()

    def dismiss(self, former: FormerRole, notice: Notice) -> None:
        """Have an actor end what it has begun, and then itself."""
        former.handle.leave.remote(notice.stay_s, notice.until, notice.front)
        self.add_former(former, notice.stay_s)

    def _displace(self, role: Role) -> None:
        if role.life.phase in (Phase.STARTING, Phase.RUNNING):
            role.kill()
            role.handle = None
            role.life.displaced(self._now)

    def add_former(self, former: FormerRole, timeout_s: float) -> None:
        """Watch an actor that is leaving, and ends by itself within ``timeout_s``."""
        former.leave_by = self._clock() + timeout_s + FAREWELL_S
        self.add(former)

    @property
    def formers(self) -> list[FormerRole]:
        """Those that end what they have begun at another node."""
        return [role for role in self._roles.values() if isinstance(role, FormerRole)]

    def retire(self, role: Role, why: str) -> None:
        """Forget a role, end its actor if it still lives, and give back its place. On the supervisor's thread."""
        log.info("%s has left: %s", role, why)
        role.kill()
        role.site.release()
        self._roles.pop(role.name, None)

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
        now = self._now = self._clock()
        if self._stopping.is_set():
            return
        for call in ended:
            self._take(waiting[call], call, now)
        for role in list(self._roles.values()):
            self._advance(role, now)
        self._beside(now)

    def _take(self, role: Role, call: Any, now: float) -> None:
        """The call that was waited for has returned or failed."""
        try:
            ray.get(call)
        except Exception as error:
            role.error = error_of(error)
            self._end(role, role.cause or cause_of(error), now)
            return
        if role.life.phase is Phase.STARTING:
            role.site.is_placed()  # Ray may have moved it
            again = " again" if role.has_served else ""
            role.serves(now)
            role.error = None
            log.warning("%s %s%s", role, "stands by" if isinstance(role, StandbyRole) else "serves", again)
        else:
            self._end(role, role.cause or "it has stopped", now)

    def _end(self, role: Role, cause: str, now: float) -> None:
        if role.is_leaving:
            self.retire(role, cause)
            return
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
        if now >= role.leave_by:
            self.retire(role, "it did not end in time")
            return
        if life.is_late(now):
            role.error = DeploymentError(f"{role} takes too long to start: start_timeout_s is too short, or it hangs")
            role.kill_at_once()
            self._end(role, "it takes too long to start", now)
        if role.is_due(now):
            if role.promote():
                log.warning("the standby takes the place of %s", role)
                life.created(now, TAKE_OVER_S)
                return
            if role.successor is not None:  # its node is about to be taken away: none is made there any more
                return
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
            log.warning("%s waits for room: it needs %s", role.name, role.site.needs())
