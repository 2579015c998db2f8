"""The deployment that the files of ``tests/e2e/two_engines`` share: a cluster and its actors take a while to start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.free_ports import free_ports
from support.small_engine import SMALL
from support.waiting import PATIENCE_S

from headwise import EngineConfig

MODEL = "smollm2-135m"
KEY = "sk-of-these-tests"
ENGINES = ("engine-0", "engine-1")
PORTS = range(21700, 22000)


ADAPTER = "sailor"


def config(keys: Path, traces: str, adapter: Path) -> EngineConfig:
    """Two engines, a scheduler and one that stands by, and two HTTP servers at one port, which want a key.

    keys:    where the file of keys is to be
    traces:  URL of who collects spans
    adapter: a directory with one of the model's
    """
    keys.write_text(f"# of tests\nsk-of-nobody\n{KEY}\n")
    return replace(
        SMALL,
        model=MODEL,
        adapters=f"{ADAPTER}={adapter}",
        replicas=len(ENGINES),
        min_replicas=0,
        http=free_ports(1)[0],
        http_servers=2,
        otlp_endpoint=traces,
        api_key_file=str(keys),
        engine_ports=f"{PORTS[0]}-{PORTS[-1]}",
        engine_timeout_s=10.0,
        front_timeout_s=30.0,  # far longer than it takes the one that stands by to take over
        drain_timeout_s=PATIENCE_S,
    )
