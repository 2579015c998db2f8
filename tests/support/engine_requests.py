"""Which engines serve, and how many requests they say that they have."""

from __future__ import annotations

from typing import Any

from headwise import Client


def serving(client: Client) -> list[str]:
    """Engines that report, and that their owner says serve."""
    stats = client.stats()
    states = stats["fleet"]["replicas"]
    return sorted(name for name in stats["engines"] if states.get(name, "").startswith("serves"))


def num_requests(engine: dict[str, Any], state: str) -> int:
    """Running, waiting, finished, … ones; 0 of an engine whose last report is of the time before it had workers."""
    return int(engine["requests"][state]) if "requests" in engine else 0


def each_engine_has(client: Client, state: str) -> bool:
    """A request in this state; for all engines that report."""
    return all(num_requests(engine, state) for engine in client.stats()["engines"].values())
