"""Where an engine's processes run: one placement group per engine, all of it on one node."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headwise.errors import DeploymentError
from headwise.runtime.config import EngineConfig

_ray: Any = ray
"""For its functions that have no types."""
ENGINE_CPUS = 0.1
WORKER_CPUS = 0.2
"""CPU ranks share their machine's cores by threads, not by Ray's count: a two-core machine must hold TP 3."""


def reserve(config: EngineConfig, timeout_s: float) -> list[PlacementGroup]:
    """One placement group per replica: bundle 0 for the engine, one more for each rank.

    Raises `DeploymentError` if the cluster does not give the resources within ``timeout_s``.
    """
    worker = {"CPU": WORKER_CPUS, **({"GPU": 1} if config.on_gpu else {})}
    bundles = [{"CPU": ENGINE_CPUS}, *[worker] * config.tp_size]
    groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(config.replicas)]
    for index, group in enumerate(groups):
        if not group.wait(timeout_s):
            free = _ray.available_resources()
            release(groups)
            needed = f"{ENGINE_CPUS + WORKER_CPUS * config.tp_size:.1f} CPUs"
            left = f"{free.get('CPU', 0.0):.1f}"
            if config.on_gpu:
                needed, left = f"{needed} and {config.tp_size} GPUs", f"{left} and {free.get('GPU', 0.0):g}"
            raise DeploymentError(
                f"the Ray cluster has no room for engine {index} of {config.replicas}: it needs {needed} on one node, "
                f"{left} are free in all (waited {timeout_s:g} s); lower replicas or tp_size, or add nodes"
            )
    return groups


def could_fit(config: EngineConfig) -> bool:
    """Whether the cluster has the resources in all, in use or not: else it must grow before it can give them."""
    total = _ray.cluster_resources()
    cpus = config.replicas * (ENGINE_CPUS + WORKER_CPUS * config.tp_size)
    gpus = config.replicas * config.tp_size if config.on_gpu else 0
    return bool(cpus <= total.get("CPU", 0.0) and gpus <= total.get("GPU", 0.0))


def release(groups: list[PlacementGroup]) -> None:
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def cluster_gpus() -> int:
    """GPUs of the Ray cluster, in use or not."""
    return int(_ray.cluster_resources().get("GPU", 0))


def in_bundle(group: PlacementGroup, index: int) -> dict[str, Any]:
    """Actor options: run in this bundle, with all that it has."""
    resources = group.bundle_specs[index]
    return {
        "num_cpus": resources["CPU"],
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
    }


def on_this_node() -> dict[str, Any]:
    """Actor options: run where this process runs, taking no resources."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def node_address() -> str:
    """The address under which other nodes reach this one."""
    return str(_ray.util.get_node_ip_address())


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
