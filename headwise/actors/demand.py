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


Places = Literal["node", "stages", "ranks"]
"""What of an engine is on one node in any case: all of it, each of its stages, or each of its ranks."""


@dataclass(frozen=True)
class NodeHas:
    """What a node has, or has left, by name; and its labels."""

    amounts: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Demand:
    """All of it on one node, or on several: see `places`.

    ranks:     workers, a GPU each if ``on_gpu``
    cpus:      of all together
    resources: custom ones, by name
    labels:    that each node has
    ranks_on:  `EngineConfig.tp_placement`
    stages:    of a pipeline, with equally many ranks each
    """

    ranks: int
    on_gpu: bool
    cpus: float
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    ranks_on: Literal["auto", "node", "any"] = "auto"
    stages: int = 1

    @staticmethod
    def of(config: EngineConfig) -> Demand:
        ranks, stages = config.ranks, config.pipeline_parallel_size
        cpus = config.engine_cpus or ENGINE_CPUS + WORKER_CPUS * ranks
        labels = parse_pairs(config.node_labels, "")
        return Demand(ranks, config.on_gpu, cpus, config.custom_resources, labels, config.tp_placement, stages)

    def bundles(self, places: Places = "node") -> list[dict[str, float]]:
        """Of its placement group: the first is the engine's, then one for each rank, or for all of a stage, where it is
        stages that are on one node."""
        share = self.cpus / (ENGINE_CPUS + WORKER_CPUS * self.ranks)
        engine = {"CPU": round(ENGINE_CPUS * share, 4), **self.resources}
        worker = {"CPU": round(WORKER_CPUS * share, 4), **({"GPU": 1.0} if self.on_gpu else {})}
        if places != "stages":
            return [engine, *[worker] * self.ranks]
        stage = {name: round(amount * self.ranks / self.stages, 4) for name, amount in worker.items()}
        return [engine, *[stage] * self.stages]

    @property
    def total(self) -> dict[str, float]:
        """What a node must have that has all of it, by name."""
        return {"CPU": self.cpus, **({"GPU": float(self.ranks)} if self.on_gpu else {}), **self.resources}

    def fits(self, free: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        """Whether a node with so much left, and with these labels, has room for all of it."""
        return _copies(free, self.total) > 0 and self._suits(labels)

    def places(self, nodes: Iterable[NodeHas]) -> Places:
        """What of it is to be on one of a cluster's ``nodes``, of which it is known what they have in all.

        Ranks of a stage on CPUs share memory. While a cluster has no GPU, nodes to come may have one for each rank of a
        stage: where they have not, `places` changes as soon as one has come.
        """
        suited = [node for node in nodes if self._suits(node.labels)]
        if self.on_gpu and self.ranks > self.stages and self._ranks_may_be_apart(suited):
            return "ranks"
        is_apart = self.ranks_on == "any" or not any(self.fits(node.amounts, node.labels) for node in suited)
        return "stages" if self.stages > 1 and is_apart else "node"

    def _ranks_may_be_apart(self, nodes: Sequence[NodeHas]) -> bool:
        """Those of one stage, on GPUs."""
        if self.ranks_on != "auto":
            return self.ranks_on == "any"
        most = max((node.amounts.get("GPU", 0.0) for node in nodes), default=0.0)
        return 0 < most < self.ranks / self.stages

    def fits_apart(self, nodes: Sequence[NodeHas], places: Places) -> bool:
        """Whether these nodes, by what they have left, have room for its stages, or its ranks, on several of them."""
        engine, part, *others = self.bundles(places)
        suited = [node.amounts for node in nodes if self._suits(node.labels)]
        room = [_copies(free, part) for free in suited]
        return any(
            _copies(free, engine) and sum(room) - room[at] + _copies(_without(free, engine), part) > len(others)
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


def ranks_in(bundles: Sequence[Mapping[str, float]]) -> int:
    """Of the engine whose placement group has these bundles: see `Demand.bundles`."""
    engine, *others = bundles
    a_rank = engine["CPU"] * WORKER_CPUS / ENGINE_CPUS
    return sum(max(1, round(each.get("GPU", each["CPU"] / a_rank))) for each in others)


def _without(free: Mapping[str, float], bundle: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - bundle.get(name, 0.0) for name, amount in free.items()}


def in_order(with_room: Iterable[str], engines: Collection[str], placement: Literal["spread", "pack"]) -> list[str]:
    """The nodes ``with_room``, the best first, given the nodes that this deployment's other ``engines`` are on."""
    nodes = list(engines)
    sign = 1 if placement == "spread" else -1
    return sorted(with_room, key=lambda node: (sign * nodes.count(node), node))
