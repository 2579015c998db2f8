"""How much host memory engines take for blocks where it is not configured: for other engines to fetch them from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headwise.runtime.config.engine_config import EngineConfig

SHARE = 1 / 8
"""Of a node's memory, that all engines there take together by themselves, of those that a deployment is configured for,
or of a quarter of those that clients may scale it to: so these fit as well."""

MOST_BYTES = 16 << 30
"""Of each worker, where its block pool is measured later."""

LEAST_BYTES = 16 << 20
"""Less is of no use."""


@dataclass(frozen=True)
class NodeRoom:
    """What a node that may run engines has: bytes of memory, CPUs and GPUs."""

    memory: int
    cpus: float = 0.0
    gpus: float = 0.0

    def workers(self, config: EngineConfig, ranks: int) -> int:
        """Most ranks that it is to have room for, of engines with so many each."""
        most = max(config.first_replicas, config.max_replicas, config.most_replicas // 4)
        if config.on_gpu and (config.tp_placement == "any" or 0 < self.gpus < ranks):  # not all of an engine's
            return max(1, min(most * ranks, int(self.gpus)))
        if config.on_gpu:
            most = min(most, int(self.gpus / ranks))
        if config.engine_cpus:
            most = min(most, int(self.cpus / config.engine_cpus))
        return max(1, most) * ranks


def resolve_host_cache(config: EngineConfig, nodes: Iterable[NodeRoom]) -> EngineConfig:
    """``host_cache`` auto as what it stands for on these nodes: where there may be several engines, as much as the
    block pool, and no more than the node with the least room has for it; 0 otherwise.

    All engines get the same, also on nodes that come later. The device must have been resolved.

    Raises:
        ConfigError: something that is configured needs a host cache, and there is no room for one.
    """
    if config.host_cache != "auto":
        return config
    if not config.chooses_host_cache:
        return replace(config, host_cache="0")
    ranks = max(config.tp_sizes) * config.pipeline_parallel_size
    shares = [SHARE * node.memory / node.workers(config, ranks) for node in nodes]
    most = min([float(config.kv_cache_bytes or MOST_BYTES), *shares]) if shares else 0.0
    return replace(config, host_cache=f"{int(most) >> 20}MiB" if most >= LEAST_BYTES else "0")
