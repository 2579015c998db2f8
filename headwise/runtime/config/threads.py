"""How many threads a rank computes with on a CPU."""

from __future__ import annotations

from headwise.cores import usable_cores
from headwise.runtime.config.engine_config import EngineConfig


def threads_per_worker(config: EngineConfig, ranks_here: int = 0) -> int:
    """As configured, or an even share of the cores that the engine asked Ray for, or of those that there are.

    ranks_here: of an engine, on this machine; 0: all of them
    """
    cores = usable_cores() // (ranks_here or config.ranks)
    if config.engine_cpus:
        cores = min(cores, int(config.engine_cpus) // config.ranks)
    return config.cpu_threads or max(1, cores)
