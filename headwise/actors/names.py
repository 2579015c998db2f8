"""How a deployment's actors are found in a Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable

NAMESPACE = "headwise"
SCHEDULER = "scheduler"
STORE = "store"
ENGINE = "engine-"
"""Begins the names of engines' roles, before their numbers."""
OWNER = "owner"
"""The role of the actor that owns a detached deployment."""
STANDBY = "-standby"
"""Ends the name of the role that stands by for another one."""
_TURN = re.compile(r"\.(\d+)$")


def actor_name(deployment: str, role: str) -> str:
    """``role`` is ``scheduler``, ``scheduler-standby``, ``store``, ``engine-N`` or ``http-N``, and in a detached
    deployment ``owner``. The placement group of a detached engine has the engine's name. While an actor that leaves
    still has such a name, the one in its place has another: see `next_name`.
    """
    return f"{deployment}/{role}"


def next_name(role: str, taken: Iterable[str]) -> str:
    """What an actor of ``role`` is called while those of the names ``taken`` are there: the role itself, or if other
    actors of the role are, ``ROLE.N`` with the highest number of them."""
    turns = [turn_of(name) for name in taken if role_of(name) == role]
    return f"{role}.{max(turns) + 1}" if turns else role


def role_of(name: str) -> str:
    """The role of an actor that is called so."""
    return _TURN.sub("", name)


def turn_of(name: str) -> int:
    """Of two actors of a role, the later one has the higher number."""
    turn = _TURN.search(name)
    return int(turn[1]) if turn else 0
