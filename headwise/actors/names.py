"""How a deployment's actors are found in a Ray cluster."""

from __future__ import annotations

NAMESPACE = "headwise"


def actor_name(deployment: str, role: str) -> str:
    """``role`` is ``scheduler``, ``store`` or ``engine-N``."""
    return f"{deployment}/{role}"
