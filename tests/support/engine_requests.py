"""How many requests engines say that they have."""

from __future__ import annotations

from typing import Any

from headwise import Client


def num_requests(engine: dict[str, Any], state: str) -> int:
    """Running, waiting, finished, … ones; 0 of an engine whose last report is of the time before it had workers."""
    return int(engine["requests"][state]) if "requests" in engine else 0


def each_engine_has(client: Client, state: str) -> bool:
    """A request in this state; for all engines that report."""
    return all(num_requests(engine, state) for engine in client.stats()["engines"].values())
