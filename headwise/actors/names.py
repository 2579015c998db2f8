"""How a deployment's actors are found in a Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable

NAMESPACE = "headwise"
SCHEDULER = "scheduler"
STORE = "store"
ENGINE = "engine-"
"""Begins the names of engines' roles, before their numbers."""
HTTP = "http-"
"""The same of HTTP servers."""
ENCODER = "encoder-"
"""The same of encoders of images."""
APART = (ENGINE, ENCODER)
"""Begin the names of all that is not the front's."""
OWNER = "owner"
"""The role of the actor that owns a detached deployment."""
STANDBY = "-standby"
"""Ends the name of the role that stands by for another one."""
SCHEDULERS = SCHEDULER, f"{SCHEDULER}{STANDBY}"
"""Roles of actors that serve as schedulers, sooner or later."""
_TURN = re.compile(r"\.(\d+)$")


def actor_name(deployment: str, role: str) -> str:
    """``role`` is ``scheduler``, ``scheduler-standby``, ``store``, ``engine-N``, ``http-N`` or ``encoder-N``, and in a
    detached deployment ``owner``. The placement group of a detached engine has the engine's name. Scheduler, store and
    HTTP servers that have gone to another node have a number behind it: see `in_turn`.
    """
    return f"{deployment}/{role}"


def in_turn(role: str, turn: int) -> str:
    """What an actor of ``role`` is called that is of the front of this turn: the role itself, later ``ROLE.TURN``."""
    return f"{role}.{turn}" if turn else role


def next_turn(taken: Iterable[str]) -> int:
    """Of a front that is made beside actors of these names."""
    return max(map(turn_of, taken), default=0) + 1


def role_of(name: str) -> str:
    """The role of an actor that is called so."""
    return _TURN.sub("", name)


def turn_of(name: str) -> int:
    """Of the front that an actor is of: a later one has a higher number."""
    turn = _TURN.search(name)
    return int(turn[1]) if turn else 0
