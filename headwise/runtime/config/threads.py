"""How many threads a rank computes with on a CPU."""

from __future__ import annotations

from headwise.cores import usable_cores
from headwise.runtime.config.engine_config import EngineConfig


def threads_per_worker(config: EngineConfig) -> int:
    """As configured, or an even share of the cores that the engine asked Ray for, or of those that there are."""
    cores = usable_cores()
    if config.engine_cpus:
        cores = min(cores, int(config.engine_cpus))
    return config.cpu_threads or max(1, cores // config.ranks)
