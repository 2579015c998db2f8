"""What an engine with its ranks asks Ray for, and which node it would rather have. Pure: no Ray."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from headwise.runtime.config.engine_config import EngineConfig
from headwise.units import parse_pairs

ENGINE_CPUS = 0.1
WORKER_CPUS = 0.2
"""CPU ranks share their machine's cores by threads, not by Ray's count: a two-core machine must hold TP 3."""


@dataclass(frozen=True)
class Demand:
    """All of it on one node.

    ranks:     tensor-parallel workers, a GPU each if ``on_gpu``
    cpus:      of all together
    resources: custom ones, by name
    labels:    that the node has
    """

    ranks: int
    on_gpu: bool
    cpus: float
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @staticmethod
    def of(config: EngineConfig) -> Demand:
        cpus = config.engine_cpus or ENGINE_CPUS + WORKER_CPUS * config.tp_size
        labels = parse_pairs(config.node_labels, "")
        return Demand(config.tp_size, config.on_gpu, cpus, config.custom_resources, labels)

    def bundles(self) -> list[dict[str, float]]:
        """Of its placement group: the first is the engine's, then one for each rank."""
        share = self.cpus / (ENGINE_CPUS + WORKER_CPUS * self.ranks)
        worker = {"CPU": round(WORKER_CPUS * share, 4), **({"GPU": 1.0} if self.on_gpu else {})}
        return [{"CPU": round(ENGINE_CPUS * share, 4), **self.resources}, *[worker] * self.ranks]

    @property
    def total(self) -> dict[str, float]:
        """What a node must have, by name."""
        return {"CPU": self.cpus, **({"GPU": float(self.ranks)} if self.on_gpu else {}), **self.resources}

    def fits(self, free: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        """Whether a node with so much left, and with these labels, has room for it."""
        has_room = all(free.get(name, 0.0) >= amount - 1e-6 for name, amount in self.total.items())
        return has_room and all(labels.get(name) == value for name, value in self.labels.items())

    def __str__(self) -> str:
        words = [f"{self.cpus:.4g} CPUs", *([f"{self.ranks} GPUs"] if self.on_gpu else [])]
        words += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        words += [f"the label {name}={value}" for name, value in self.labels.items()]
        return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def in_order(with_room: Iterable[str], engines: Collection[str], placement: Literal["spread", "pack"]) -> list[str]:
    """The nodes ``with_room``, the best first, given the nodes that this deployment's other ``engines`` are on."""
    nodes = list(engines)
    sign = 1 if placement == "spread" else -1
    return sorted(with_room, key=lambda node: (sign * nodes.count(node), node))
