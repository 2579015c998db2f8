"""What `/deployment` tells the page: a deployment's statistics, chosen for people to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwise.runtime.frontend.routing.base import STATUS_TIMEOUT_S
from headwise.runtime.http.deployment_metrics import hits_by_tier

MAX_FAULTS = 8
"""The last ones."""

Stats = Mapping[str, Any]


def overview(stats: Stats, model: str, groups: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Plain data: of the scheduler, the engines, the index and the last faults. It has no addresses of engines.

    groups: of heads, and what they are
    """
    scheduler, fleet, index = stats["scheduler"], stats["fleet"], stats["index"]
    return {
        "model": model,
        "groups": [list(group) for group in groups],
        "routing": {key: scheduler[key] for key in ("policy", "decisions", "routed", "rerouted", "refused", "queued")},
        "wanted": fleet["reason"],
        "engines": [_engine(name, engine) for name, engine in sorted(stats["engines"].items())],
        "index": {
            "is_silent": index["silent"],
            "blocks": index.get("distinct_blocks", 0),
            "nodes": [
                {"name": name, "blocks": node["blocks"], "agrees": not node["behind"]}
                for name, node in sorted(index.get("nodes", {}).items())
            ],
        },
        "faults": [{"at": at, "text": text} for at, text in list(stats["faults"])[-MAX_FAULTS:]],
    }


def _engine(name: str, engine: Stats) -> dict[str, Any]:
    """An engine that is starting has no numbers yet."""
    shown = {"name": name, "state": _state(engine), "restarts": engine["restarts"]}
    if "cache" not in engine:
        return shown
    requests, cache, storage = engine["requests"], engine["cache"], engine["storage"]
    pools = {"device": cache, "host": engine["host"]}
    return {
        **shown,
        "running": requests["running"],
        "waiting": requests["waiting"],
        "backlog_s": engine["backlog_s"],
        "preemptions": requests["preemptions"],
        "tokens": engine["output_tokens"],
        "queried_tokens": cache["queried_tokens"],
        "hit_tokens": hits_by_tier(engine),
        "evicted_blocks": cache["evicted_blocks"],
        "recycled_blocks": cache["recycled_blocks"],
        "pools": {
            tier: {state: pool[f"{state}_blocks"] for state in ("held", "cached", "free")}
            for tier, pool in pools.items()
            if pool
        },
        "stored_blocks": storage["put_blocks"] if storage else None,
        "copied_bytes": {direction: copies["bytes"] for direction, copies in engine["transfers"].items()},
    }


def _state(engine: Stats) -> str:
    if engine["is_leaving"]:
        return "draining"
    if engine["silent_s"] > STATUS_TIMEOUT_S:
        return "silent"
    return str(engine.get("state", "starting"))
