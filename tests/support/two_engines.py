"""The deployment that the files of ``tests/e2e/two_engines`` share: a cluster and its actors take a while to start."""

from __future__ import annotations

from pathlib import Path

from support.free_ports import free_ports
from support.waiting import PATIENCE_S

from headwise import EngineConfig

MODEL = "smollm2-135m"
KEY = "sk-of-these-tests"
ENGINES = ("engine-0", "engine-1")
FAILOVER_S = 1.5
PORTS = range(21700, 22000)


def config(keys: Path, traces: str) -> EngineConfig:
    """Two engines, a scheduler and one that stands by, and two HTTP servers at one port, which want a key.

    keys:   where the file of keys is to be
    traces: URL of who collects spans
    """
    keys.write_text(f"# of tests\nsk-of-nobody\n{KEY}\n")
    return EngineConfig(
        model=MODEL,
        port=0,
        replicas=len(ENGINES),
        min_replicas=0,
        http=free_ports(1)[0],
        http_servers=2,
        otlp_endpoint=traces,
        api_key_file=str(keys),
        engine_ports=f"{PORTS[0]}-{PORTS[-1]}",
        max_model_len=512,
        kv_cache="64MiB",
        block_size=16,
        cpu_threads=1,
        tokenizer_processes=1,
        dtype="float32",
        weights_dtype="gguf",  # `sure_answers` in a third of the time
        engine_timeout_s=10.0,
        index_timeout_s=5.0,  # a machine that is busy may keep it from answering
        front_timeout_s=30.0,  # far longer than it takes the one that stands by to take over
        failover_timeout_s=FAILOVER_S,
        drain_timeout_s=PATIENCE_S,
    )
