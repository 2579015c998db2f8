"""How a deployment's actors are found in a Ray cluster."""

from __future__ import annotations

NAMESPACE = "headwise"
OWNER = "owner"
"""The role of the actor that owns a detached deployment."""


def actor_name(deployment: str, role: str) -> str:
    """``role`` is ``scheduler``, ``store`` or ``engine-N``, and in a detached deployment ``owner``. The placement group
    of a detached engine has the engine's name.
    """
    return f"{deployment}/{role}"
