"""How a deployment's actors are found in a Ray cluster."""

from __future__ import annotations

NAMESPACE = "headwise"
SCHEDULER = "scheduler"
STORE = "store"
OWNER = "owner"
"""The role of the actor that owns a detached deployment."""
STANDBY = "-standby"
"""Ends the name of the role that stands by for another one."""


def actor_name(deployment: str, role: str) -> str:
    """``role`` is ``scheduler``, ``scheduler-standby``, ``store``, ``engine-N`` or ``http-N``, and in a detached
    deployment ``owner``. The placement group of a detached engine has the engine's name.
    """
    return f"{deployment}/{role}"
