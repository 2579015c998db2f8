"""Engines of this process, with simulated workers, that have the weights that a client of their scheduler asks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.engine.changing_weights import Node, World
from support.engine.simulation import continuation
from support.waiting import PATIENCE_S, eventually

from headwise.errors import EngineDiedError, ModelError
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.engine.weights_follower import WeightsFollower
from headwise.runtime.protocol.messages import WantedWeights
from headwise.runtime.protocol.weights import FIRST, Weights

PROMPT = list(range(1, 14))


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


def test_by_the_command_adapters_come_and_go_one_by_one(world: World) -> None:
    def update(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headwise", "update-weights", "--address", world.address, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert update("--add-adapters", "sql=/sql,chat=/chat", "--version", "one").stdout == "one\n"
    assert update("--add-adapters", "sql=/new", "--drop-adapters", "chat").returncode == 0
    assert {node.follower.weights.adapters for node in world.nodes} == {"sql=/new"}
    refused = update("--drop-adapters", "chat")
    assert "there is no adapter 'chat' that could go; there are: sql" in refused.stdout + refused.stderr
    assert refused.returncode != 0


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
