"""What there is of a deployment in the Ray cluster that this process is connected to, by the names of its parts."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from headwise.actors.front import About, Front
from headwise.actors.names import NAMESPACE, OWNER, SCHEDULER, STANDBY, actor_name, role_of, turn_of

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from headwise.runtime.frontend.scaling import Wish

log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""Longest wait for actors to say how they are. One that takes longer is replaced."""
_SCHEDULERS = SCHEDULER, f"{SCHEDULER}{STANDBY}"
_GONE_S = 10.0
"""Longest wait for killed actors to be gone."""


@dataclass(frozen=True)
class Found:
    """What is left of a deployment whose owner has died.

    actors:  that answer, by name: that of their role, or another one (``known_as``)
    groups:  placement groups of the engines that there are or will be, by role
    front:   where scheduler and store are, or were; None: nobody knows, so there is nothing to go on with
    leaving: names of engines that are being drained, and of actors whose role has gone to another node
    wish:    what clients asked for last, and the owner before did
    known_as: the names of actors that are not called by their role: the scheduler may have stood by once, and who came
              after one that is still leaving has a name of its own
    """

    actors: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, PlacementGroup] = field(default_factory=dict)
    front: Front | None = None
    leaving: frozenset[str] = frozenset()
    wish: Wish | None = None
    known_as: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, role: str) -> str:
        """The name of the actor of ``role``."""
        return self.known_as.get(role, role)


def find_actor(deployment: str, role: str) -> Any | None:
    """The handle of the actor of this role; None: there is none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(actor_name(deployment, role), namespace=NAMESPACE)
    return None


def find_scheduler(deployment: str) -> Any | None:
    """The handle of a scheduler, or of one that stands by, or that has gone: all of them know the address. The latest
    first: one that has gone may hang."""
    names = [name for name in names_of(deployment) if role_of(name) in _SCHEDULERS]
    names.sort(key=lambda name: (-turn_of(name), name))
    return next((handle for name in names if (handle := find_actor(deployment, name)) is not None), None)


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
    known_as = serving_names(actors.keys() - leaving, fronts)
    front = fronts.get(known_as.get(SCHEDULER, SCHEDULER)) or next(iter(fronts.values()), None)
    return Found(actors, _groups(deployment), front, frozenset(leaving), wish, known_as)


def serving_names(names: Iterable[str], knowing: Collection[str]) -> dict[str, str]:
    """By role, the names of actors that stay and are not called by it: of several of one role, the last one made.

    knowing: names of those that know where the front is: a scheduler among them is no standby
    """
    in_turn = sorted(names, key=turn_of)
    latest = {role_of(name): name for name in in_turn}
    for name in in_turn:
        if role_of(name) in _SCHEDULERS and name in knowing:
            latest[SCHEDULER] = name
    return {role: name for role, name in latest.items() if role != name}


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
