"""What there is of a deployment in the Ray cluster that this process is connected to, by the names of its parts."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from headwise.actors.front import About, Front
from headwise.actors.front_switch import is_settled, scheduler_to_ask, sort_out
from headwise.actors.names import ENGINE, NAMESPACE, OWNER, SCHEDULER, SCHEDULERS, actor_name, role_of, turn_of

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from headwise.runtime.frontend.scaling import Wish

log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""Longest wait for actors to say how they are. One that takes longer is replaced."""
_KNOWN_S = 1.0
"""Longest wait for schedulers to say which of them serves, where there are several."""
_GONE_S = 10.0
"""Longest wait for killed actors to be gone."""


@dataclass(frozen=True)
class Found:
    """What is left of a deployment whose owner has died.

    actors:  that answer, by name: that of their role, or another one (``known_as``)
    groups:  placement groups of the engines that there are or will be, by role
    front:   where scheduler and store are, or were; None: nobody knows, so there is nothing to go on with
    leaving: names of engines that are being drained, and of actors whose role has gone to another node
    late:    the same of actors that were not told yet to leave
    idle:    names of actors that nobody needs
    wish:    what clients asked for last, and the owner before did
    turn:    of the front: see `headwise.actors.front_switch`
    known_as: the names of the front's actors, by role: the scheduler may have stood by once, and those of a front that
              has moved have names of their own
    """

    actors: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, PlacementGroup] = field(default_factory=dict)
    front: Front | None = None
    leaving: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    wish: Wish | None = None
    turn: int = 0
    known_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def serving(self) -> frozenset[str]:
        """Names of those that are to go on."""
        return frozenset(self.actors) - self.leaving - self.late - self.idle

    def name_of(self, role: str) -> str:
        """The name of the actor of ``role``."""
        return self.known_as.get(role, role)


def find_actor(deployment: str, role: str) -> Any | None:
    """The handle of the actor of this role; None: there is none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(actor_name(deployment, role), namespace=NAMESPACE)
    return None


def find_scheduler(deployment: str) -> Any | None:
    """The handle of a scheduler that says where clients find the deployment; None: there is no scheduler.

    While the front moves there are several: the one that serves is asked, or one that has left and knows who does.
    Where none says that it serves, for example as they are starting, it is the latest.
    """
    names = [name for name in names_of(deployment) if role_of(name) in SCHEDULERS]
    names.sort(key=lambda name: (-turn_of(name), name))
    handles = {name: handle for name in names if (handle := find_actor(deployment, name)) is not None}
    if len(handles) < 2:
        return next(iter(handles.values()), None)
    return handles[_to_ask(handles) or next(iter(handles))]


def _to_ask(handles: Mapping[str, Any]) -> str | None:
    """The name of the one of these schedulers that knows where clients find the deployment."""
    open_calls = {handle.about.remote(): name for name, handle in handles.items()}
    leaving, knowing = set[str](), set[str]()
    until, choice = time.monotonic() + _KNOWN_S, None
    while open_calls and (left := until - time.monotonic()) > 0 and not is_settled(choice, open_calls.values()):
        for call in ray.wait(list(open_calls), timeout=left)[0]:
            name = open_calls.pop(call)
            with contextlib.suppress(ray.exceptions.RayError):  # it has died
                about: About = ray.get(call)
                leaving |= {name} if about.is_leaving else set()
                knowing |= {name} if about.front is not None else set()
        choice = scheduler_to_ask(handles, leaving, knowing)
    return choice


def names_of(deployment: str) -> list[str]:
    """What the deployment's actors are called: see `actor_name`."""
    prefix = actor_name(deployment, "")
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def deployments() -> list[str]:
    """The names of all detached deployments."""
    suffix = actor_name("", OWNER)
    named = (each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE)
    return sorted(name.removesuffix(suffix) for name in named if name.endswith(suffix))


def find_parts(deployment: str) -> Found:
    """What there is, as its actors say. Those that do not say anything in time are killed."""
    actors, fronts = dict[str, Any](), dict[str, Front]()
    leaving, wish = set[str](), None
    asked = {handle.about.remote(): (role, handle) for role, handle in _actors(deployment).items()}
    if asked:
        ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    for call, (role, handle) in asked.items():
        try:
            about: About = ray.get(call, timeout=0)
        except ray.exceptions.RayError as error:
            log.warning("%s does not answer, and is replaced: %s", role, error)
            _kill(handle)
            continue
        actors[role] = handle
        if about.front is not None:
            fronts[role] = about.front
        leaving |= {role} if about.is_leaving else set()
        wish = about.wish or wish
    parts = sort_out(actors.keys() - leaving, leaving, fronts)
    # Who has left was told where the front has gone to; engines are told last.
    told = sorted(fronts, key=lambda name: (name.startswith(ENGINE), -turn_of(name), name not in leaving))
    told = [parts.known_as.get(SCHEDULER, ""), *parts.known_as.values(), *told]
    return Found(
        actors,
        _groups(deployment),
        front=next((fronts[name] for name in told if name in fronts), None),
        leaving=frozenset(leaving),
        late=parts.late,
        idle=parts.idle,
        wish=wish,
        turn=parts.turn,
        known_as=parts.known_as,
    )


def end_all(deployment: str) -> None:
    """Kill every actor of the deployment but its owner, give back what they held, and wait until they are gone."""
    from ray.util.placement_group import remove_placement_group

    actors = _actors(deployment)
    for handle in actors.values():
        _kill(handle)
    for group in _groups(deployment).values():
        remove_placement_group(group)
    wait_until_gone(deployment, list(actors))


def wait_until_gone(deployment: str, roles: Collection[str]) -> bool:
    """Wait until actors that were killed are gone, and their names are free again; False: they are not in time."""
    deadline = time.monotonic() + _GONE_S
    while any(find_actor(deployment, role) is not None for role in roles):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _actors(deployment: str) -> dict[str, Any]:
    """All but the owner, by name."""
    names = [name for name in names_of(deployment) if name != OWNER]
    return {name: handle for name in names if (handle := find_actor(deployment, name)) is not None}


def _groups(deployment: str) -> dict[str, PlacementGroup]:
    """By role."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table

    prefix, found = actor_name(deployment, ""), dict[str, PlacementGroup]()
    for row in placement_group_table().values():
        if row["name"].startswith(prefix) and row["state"] != "REMOVED":
            group_id = PlacementGroupID(bytes.fromhex(row["placement_group_id"]))
            found[row["name"].removeprefix(prefix)] = PlacementGroup(group_id)
    return found


def _kill(handle: Any) -> None:
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.kill(handle)
