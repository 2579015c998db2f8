"""What an engine with its ranks asks Ray for, and which node it would rather have. Pure: no Ray."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headwise.runtime.config.engine_config import EngineConfig
from headwise.units import parse_pairs

ENGINE_CPUS = 0.1
WORKER_CPUS = 0.2
"""CPU ranks share their machine's cores by threads, not by Ray's count: a two-core machine must hold TP 3."""


@dataclass(frozen=True)
class NodeHas:
    """What a node has, or has left, by name; and its labels."""

    amounts: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Demand:
    """All of it on one node, or on several where `spans` says so.

    ranks:     tensor-parallel workers, a GPU each if ``on_gpu``
    cpus:      of all together
    resources: custom ones, by name
    labels:    that each node has
    ranks_on:  `EngineConfig.tp_placement`
    """

    ranks: int
    on_gpu: bool
    cpus: float
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    ranks_on: Literal["auto", "node", "any"] = "auto"

    @staticmethod
    def of(config: EngineConfig) -> Demand:
        cpus = config.engine_cpus or ENGINE_CPUS + WORKER_CPUS * config.tp_size
        labels = parse_pairs(config.node_labels, "")
        return Demand(config.tp_size, config.on_gpu, cpus, config.custom_resources, labels, config.tp_placement)

    def bundles(self) -> list[dict[str, float]]:
        """Of its placement group: the first is the engine's, then one for each rank."""
        share = self.cpus / (ENGINE_CPUS + WORKER_CPUS * self.ranks)
        worker = {"CPU": round(WORKER_CPUS * share, 4), **({"GPU": 1.0} if self.on_gpu else {})}
        return [{"CPU": round(ENGINE_CPUS * share, 4), **self.resources}, *[worker] * self.ranks]

    @property
    def total(self) -> dict[str, float]:
        """What a node must have that has all of it, by name."""
        return {"CPU": self.cpus, **({"GPU": float(self.ranks)} if self.on_gpu else {}), **self.resources}

    def fits(self, free: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        """Whether a node with so much left, and with these labels, has room for all of it."""
        return _copies(free, self.total) > 0 and self._suits(labels)

    def spans(self, nodes: Iterable[NodeHas]) -> bool:
        """Whether its ranks may be on several of a cluster's ``nodes``, of which it is known what they have in all.

        Ranks on CPUs share memory. While a cluster has no GPU, those to come may have one for each rank.
        """
        if not self.on_gpu or self.ranks < 2 or self.ranks_on == "node":
            return False
        gpus = [node.amounts.get("GPU", 0.0) for node in nodes if self._suits(node.labels)]
        return self.ranks_on == "any" or 0 < max(gpus, default=0.0) < self.ranks

    def fits_together(self, nodes: Sequence[NodeHas]) -> bool:
        """Whether these nodes, by what they have left, have room for it on several of them."""
        engine, rank = self.bundles()[:2]
        suited = [node.amounts for node in nodes if self._suits(node.labels)]
        ranks = [_copies(free, rank) for free in suited]
        return any(
            _copies(free, engine) and sum(ranks) - ranks[at] + _copies(_without(free, engine), rank) >= self.ranks
            for at, free in enumerate(suited)
        )

    def _suits(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(name) == value for name, value in self.labels.items())

    def __str__(self) -> str:
        words = [f"{self.cpus:.4g} CPUs", *([f"{self.ranks} GPUs"] if self.on_gpu else [])]
        words += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        words += [f"the label {name}={value}" for name, value in self.labels.items()]
        return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _copies(free: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How often a node with so much left has room for this."""
    return int(min((free.get(name, 0.0) + 1e-6) // amount for name, amount in bundle.items() if amount))


def _without(free: Mapping[str, float], bundle: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - bundle.get(name, 0.0) for name, amount in free.items()}


def in_order(with_room: Iterable[str], engines: Collection[str], placement: Literal["spread", "pack"]) -> list[str]:
    """The nodes ``with_room``, the best first, given the nodes that this deployment's other ``engines`` are on."""
    nodes = list(engines)
    sign = 1 if placement == "spread" else -1
    return sorted(with_room, key=lambda node: (sign * nodes.count(node), node))
