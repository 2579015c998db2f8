"""Engines of this process, with simulated workers, that have the weights that a client of their scheduler asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.engine.scripted_deployment import Deployment
from support.engine.simulated_engine import make_engine
from support.engine.simulation import SimulatedExecutor, continuation
from support.waiting import PATIENCE_S, eventually

from headwise.errors import EngineDiedError, ModelError
from headwise.runtime.client.client import Client
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.engine.weights_follower import WeightsFollower
from headwise.runtime.frontend.scaling import FleetState, ReplicaSet, ScalingPolicy
from headwise.runtime.frontend.scaling.exchange import Wishes
from headwise.runtime.protocol.messages import WantedWeights
from headwise.runtime.protocol.weights import FIRST, Weights

PROMPT = list(range(1, 14))


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
        return replace(self.base, identity=f"simulated {weights.model}", weights=weights.model)

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


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_all_have_them_when_the_client_is_told_and_a_stream_goes_on(world: World) -> None:
    node = world.nodes[0]
    before = world.client.generate(PROMPT, max_tokens=12)
    stream = world.client.stream(PROMPT, max_tokens=12)
    assert world.client.update_weights("1", version="one") == "one"
    assert [node.number for node in world.nodes] == [1, 1]
    assert world.client.update_weights("1", version="one") == "one", "to ask twice is to ask once"
    assert [node.read for node in world.nodes] == [[Weights("one", "1")]] * 2
    result = stream.read()
    assert result.token_ids == before.token_ids == continuation(PROMPT, 12)
    after = world.client.generate(PROMPT, max_tokens=12)
    assert (after.token_ids, after.weights) == (before.token_ids, [(0, "one")])
    assert node.follower.naming.identity == "simulated 1"
    eventually(lambda: world.weights() == ["one", "one"])


def test_while_an_engine_reads_it_serves_on_by_what_it_has(world: World) -> None:
    asking, told = world.asking()
    assert world.client.generate(PROMPT, max_tokens=3).weights == []
    assert not told
    for node in world.nodes:
        node.may_read.set()
    asking.join(PATIENCE_S)
    assert told == ["one"]
    assert world.client.generate(PROMPT, max_tokens=3).weights == [(0, "one")]


@pytest.mark.parametrize("lacks", ["no such directory", "defect"])
def test_what_cannot_be_read_changes_nothing_and_a_next_version_is_had(world: World, lacks: str) -> None:
    for node in world.nodes:
        node.lacks = lacks
    why = "ZeroDivisionError: a defect" if lacks == "defect" else lacks
    with pytest.raises(ModelError, match=f"engine-0, engine-1 cannot have these weights: {why}; nothing has changed"):
        world.client.update_weights("1")
    assert world.client.generate(PROMPT, max_tokens=3).weights == []
    for node in world.nodes:
        node.lacks = ""
    world.client.update_weights("2", version="two")
    assert world.client.generate(PROMPT, max_tokens=3).weights == [(0, "two")]


def test_weights_that_cannot_be_loaded_are_refused_and_others_are_had(world: World) -> None:
    for node in world.nodes:
        node.executor.bad_weights = {"1"}
    stream = world.client.stream(PROMPT, max_tokens=12)
    with pytest.raises(ModelError, match="engine-0, engine-1 cannot have these weights: weights 1 lack a tensor; noth"):
        world.client.update_weights("1")
    assert stream.read().token_ids == continuation(PROMPT, 12)
    assert not world.died
    world.client.update_weights("2", version="two")
    assert world.client.generate(PROMPT, max_tokens=3).weights == [(0, "two")]


def test_weights_that_end_the_workers_are_refused_and_not_tried_again(world: World) -> None:
    for node in world.nodes:
        node.executor.fail_wake = ModelError("a tensor is missing")
    with pytest.raises((ModelError, EngineDiedError), match="could not change weights: a tensor is missing"):
        world.client.update_weights("1")
    eventually(lambda: len(world.died) == 2)
    for node, server in zip(world.nodes, world.servers, strict=True):
        core, _ = node.anew()
        server.attach(core)
    assert world.client.generate(PROMPT, max_tokens=3).weights == []
    assert [len(node.read) for node in world.nodes] == [1, 1]
    world.client.update_weights("2", version="two")
    assert world.client.generate(PROMPT, max_tokens=3).weights == [(0, "two")]


def test_workers_that_are_lost_before_get_them_once_there_are_others(world: World) -> None:
    asking, told = world.asking()
    world.servers[0].fail(EngineDiedError("lost"))
    eventually(lambda: len(world.died) == 1)
    for node in world.nodes:
        node.may_read.set()
    eventually(lambda: world.nodes[1].number == 1)
    assert not told
    core, _ = world.nodes[0].anew()
    world.servers[0].attach(core)
    asking.join(PATIENCE_S)
    assert told == ["one"]
    assert [node.number for node in world.nodes] == [1, 1]


def test_who_comes_late_has_them_before_its_first_request(world: World) -> None:
    world.client.update_weights("1", version="one")
    node = Node()
    world.add_engine(node.core, follower=node.follower)
    eventually(lambda: world.weights() == ["one"] * 3)
    assert node.number == 1


def test_who_dies_of_something_else_just_then_has_them_all_the_same() -> None:
    node, changed = Node(), list[str]()
    follower = WeightsFollower(
        node._read, NewWeights(FIRST, node.base), lambda new: changed.append(new.weights.version)
    )
    wanted = WantedWeights("", Weights("one", "1"))

    def is_done() -> bool:
        follower.follow(wanted, node.core)
        node.core.step(None)
        return node.core.weights.version == "one"

    eventually(is_done)
    assert not changed
    follower.failed(EngineDiedError("a worker is lost"))
    assert changed == ["one"]
    assert (follower.weights.version, follower.refused) == ("one", None)


def test_what_a_scheduler_wants_that_knows_of_none_are_those_of_the_start() -> None:
    node = Node()

    def follow(weights: Weights) -> None:
        def has_it() -> bool:
            node.follower.follow(WantedWeights("", weights), node.core)
            while node.core.has_work():
                node.core.step(None)
            return node.follower.weights == weights

        eventually(has_it)

    follow(Weights("one", "1"))
    assert node.number == 1
    follow(FIRST)
    assert (node.follower.naming, node.core.card) == (node.base.naming, node.base)
