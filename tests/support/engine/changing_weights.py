"""A deployment of this process whose engines, with simulated workers, take other weights and adapters."""

from __future__ import annotations

import threading
from dataclasses import replace

from support.engine.scripted_deployment import Deployment
from support.engine.simulated_engine import make_engine
from support.engine.simulation import SimulatedExecutor
from support.waiting import PATIENCE_S, eventually

from headwise.errors import ModelError
from headwise.runtime.client.client import Client
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.engine.weights_follower import WeightsFollower
from headwise.runtime.frontend.scaling import FleetState, ReplicaSet, ScalingPolicy
from headwise.runtime.frontend.scaling.exchange import Wishes
from headwise.runtime.protocol.weights import FIRST, Weights
from headwise.units import parse_pairs


class Node:
    """An engine of a deployment, and what it reads.

    lacks: why there are no weights; may_read: until it is set, reading takes
    """

    def __init__(self) -> None:
        self.core, self.executor = make_engine(num_blocks=32)
        self.base = self.core.card
        self.lacks = ""
        self.may_read = threading.Event()
        self.may_read.set()
        self.read: list[Weights] = []
        self.follower = WeightsFollower(self._read, NewWeights(FIRST, self.base))

    def _read(self, weights: Weights) -> ModelCard:
        assert self.may_read.wait(PATIENCE_S)
        self.read.append(weights)
        if self.lacks == "defect":
            raise ZeroDivisionError("a defect")
        if self.lacks:
            raise ModelError(self.lacks)
        if weights == FIRST:
            return self.base
        adapters = tuple(parse_pairs(weights.adapters or "", "").items())
        return replace(self.base, identity=f"simulated {weights.model}", weights=weights.model, adapters=adapters)

    @property
    def number(self) -> int:
        """Of the weights that its worker computes by."""
        return self.executor._device.kernels.weights

    def anew(self) -> tuple[EngineCore, SimulatedExecutor]:
        """With other workers, which have what the engine has."""
        self.core, self.executor = make_engine(num_blocks=32)
        return self.core, self.executor


class World(Deployment):
    """With an owner of the engines, who calls often."""

    def __init__(self) -> None:
        super().__init__(replicas=2)
        self._owner = Wishes(ReplicaSet(ScalingPolicy(1, 4), 2))
        self._over = threading.Event()
        threading.Thread(target=self._own, daemon=True).start()
        self.nodes = [Node(), Node()]
        for node in self.nodes:
            self.add_engine(node.core, follower=node.follower)
        self.client = Client(self.address)

    def _own(self) -> None:
        while not self._over.wait(0.02):
            state = FleetState(2, "of tests", expected=2, wish=self._owner.last, weights=self._owner.weights)
            news = self.exchange.swap(state)
            if news.wish is not None:
                self._owner.take(news.wish)

    def close(self) -> None:
        self._over.set()
        self.client.close()
        super().close()

    def asking(self) -> tuple[threading.Thread, list[str]]:
        """Who asks for weights "one", which nobody may read yet, and what that is told in the end."""
        for node in self.nodes:
            node.may_read.clear()
        told: list[str] = []
        asking = threading.Thread(target=lambda: told.append(self.client.update_weights("1", version="one")))
        asking.start()
        eventually(lambda: self.client.stats()["weights"]["asked"] == "one")
        return asking, told

    def weights(self) -> list[str]:
        """By which engines say that they serve."""
        engines = self.client.stats()["engines"]
        return [engines[name].get("weights", "?") for name in sorted(engines)]
