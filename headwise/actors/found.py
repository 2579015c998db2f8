"""What there is of a deployment in the Ray cluster that this process is connected to, by the names of its parts."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from headwise.actors.front import About, Front
from headwise.actors.names import NAMESPACE, OWNER, SCHEDULER, STANDBY, actor_name

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from headwise.runtime.frontend.scaling import Wish

log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""Longest wait for actors to say how they are. One that takes longer is replaced."""
_GONE_S = 10.0
"""Longest wait for killed actors to be gone."""


@dataclass(frozen=True)
class Found:
    """What is left of a deployment whose owner has died.

    actors:  that answer, by role
    groups:  placement groups of the engines that there are or will be, by role
    front:   where scheduler and store are, or were; None: nobody knows, so there is nothing to go on with
    leaving: engines that are being drained
    wish:    what clients asked for last, and the owner before did
    scheduler: the role whose name the scheduler has that serves: it may have stood by once
    """

    actors: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, PlacementGroup] = field(default_factory=dict)
    front: Front | None = None
    leaving: frozenset[str] = frozenset()
    wish: Wish | None = None
    scheduler: str = SCHEDULER

    def name_of(self, role: str) -> str:
        """The role whose name the actor of ``role`` has."""
        return self.scheduler if role == SCHEDULER else role


def find_actor(deployment: str, role: str) -> Any | None:
    """The handle of the actor of this role; None: there is none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(actor_name(deployment, role), namespace=NAMESPACE)
    return None


def find_scheduler(deployment: str) -> Any | None:
    """The handle of a scheduler, or of one that stands by: either may have either name, and both know the address."""
    return find_actor(deployment, SCHEDULER) or find_actor(deployment, SCHEDULER + STANDBY)


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
    scheduler = next((role for role in (SCHEDULER, SCHEDULER + STANDBY) if role in fronts), SCHEDULER)
    front = fronts.get(scheduler) or next(iter(fronts.values()), None)
    return Found(actors, _groups(deployment), front, frozenset(leaving), wish, scheduler)


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
    """All but the owner, by role."""
    prefix, found = actor_name(deployment, ""), dict[str, Any]()
    for named in ray.util.list_named_actors(all_namespaces=True):
        role = named["name"].removeprefix(prefix)
        if named["namespace"] == NAMESPACE and role != named["name"] and role != OWNER:
            handle = find_actor(deployment, role)
            if handle is not None:
                found[role] = handle
    return found


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
