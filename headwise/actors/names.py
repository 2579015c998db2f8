"""How a deployment's actors are found in a Ray cluster."""

from __future__ import annotations

NAMESPACE = "headwise"
STANDBY = "-standby"
"""Ends the name of the role that stands by for another one."""


def actor_name(deployment: str, role: str) -> str:
    """``role`` is ``scheduler``, ``scheduler-standby``, ``store`` or ``engine-N``."""
    return f"{deployment}/{role}"
