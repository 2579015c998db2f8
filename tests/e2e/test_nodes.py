"""A deployment over three nodes with addresses of their own: no stream loses a token, whatever happens to a node."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from support.endless_load import EndlessLoad
from support.nodes import NODE_MARKS, Nodes
from support.reference import sure_answers
from support.small_engine import SMALL
from support.waiting import PATIENCE_S, eventually

from headwise import Client
from headwise.actors.deployment import Deployment

pytestmark = NODE_MARKS

CONFIG = replace(
    SMALL,
    host="0.0.0.0",
    replicas=3,
    engine_resources="engine=1",  # of which each node has one
    engine_timeout_s=30.0,
)
TOKENS = 16
STREAMS = sure_answers(TOKENS)[:6]


@pytest.fixture(scope="module")
def deployment(nodes: Nodes) -> Iterator[Deployment]:
    for _ in range(3):
        nodes.add(engine=1)
    with Deployment.start(CONFIG, address=nodes.address) as deployment:
        eventually(lambda: len(homes(deployment)) == 3, otherwise=lambda: homes(deployment))
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.client_address, keys=deployment.client_keys) as client:
        yield client


def homes(deployment: Deployment) -> dict[str, str]:
    """The addresses of the nodes that engines serve on, by engine."""
    roles = deployment._roles
    return {name: role.site.address for name, role in roles.items() if deployment._supervisor.serving(name)
            and name.startswith("engine")}  # fmt: skip


def heard(client: Client) -> set[str]:
    """The hosts of the engines that the scheduler hears of."""
    return {urlsplit(engine["endpoint"]).hostname or "" for engine in client.stats()["engines"].values()}


def test_each_engine_has_a_node_and_is_reached_at_its_address(deployment: Deployment, client: Client) -> None:
    places = homes(deployment)
    assert len(set(places.values())) == 3
    eventually(lambda: heard(client) == set(places.values()), otherwise=lambda: client.stats()["engines"])
    load = EndlessLoad(client, STREAMS, TOKENS)
    load.goes_on()
    load.end()


def test_a_node_that_dies_costs_no_token_and_its_engine_starts_on_the_next_one_that_comes(
    nodes: Nodes, deployment: Deployment, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headwise")
    load = EndlessLoad(client, STREAMS, TOKENS)
    load.goes_on()
    name, address = next(iter(homes(deployment).items()))
    nodes.at(address).kill()
    load.goes_on()
    eventually(lambda: name not in homes(deployment))
    another = nodes.add(engine=1)
    eventually(lambda: homes(deployment).get(name) == another.address, otherwise=lambda: caplog.messages)
    eventually(lambda: another.address in heard(client), otherwise=lambda: client.stats()["engines"])
    load.goes_on()
    assert load.end() > 0
    assert any(f"{name} on node {address}" in line and "its node has died" in line for line in caplog.messages)


def test_a_node_that_is_told_to_end_costs_no_token_and_its_engine_goes_by_itself(
    nodes: Nodes, deployment: Deployment, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM to `ray start --block`, as Kubernetes, systemd and clouds send it."""
    caplog.set_level(logging.INFO, logger="headwise")
    load = EndlessLoad(client, STREAMS, TOKENS)
    load.goes_on()
    name, address = next(iter(homes(deployment).items()))
    (ray_start,) = nodes.at(address).processes
    ray_start.terminate()
    eventually(lambda: address not in homes(deployment).values(), otherwise=lambda: caplog.messages)
    load.goes_on()
    ray_start.wait(PATIENCE_S)
    nodes.add(engine=1)
    eventually(lambda: len(homes(deployment)) == 3, otherwise=lambda: homes(deployment))
    load.goes_on()
    assert load.end() > 0
    of_it = [message for message in caplog.messages if f"{name} on node {address}" in message]
    assert any("has left: it has stopped" in message for message in of_it), of_it
    assert not any("has died" in message for message in of_it), of_it


def test_a_node_that_stands_still_for_ten_seconds_costs_no_token_and_goes_on(
    nodes: Nodes, deployment: Deployment, client: Client
) -> None:
    load, pids = EndlessLoad(client, STREAMS, TOKENS), deployment.actor_pids()
    load.goes_on()
    name, address = next(iter(homes(deployment).items()))
    with nodes.at(address).stopped():
        time.sleep(10.0)
        load.check()
    load.goes_on()
    eventually(lambda: address in heard(client))
    assert load.end() > 0
    assert deployment.actor_pids()[name] == pids[name], "Ray waits longer than that for a node"


def test_a_node_that_is_cut_off_costs_no_token_and_ends_when_it_is_back_while_its_engine_starts_on_another(
    nodes: Nodes, deployment: Deployment, client: Client
) -> None:
    load = EndlessLoad(client, STREAMS, TOKENS)
    load.goes_on()
    name, address = next(iter(homes(deployment).items()))
    with nodes.at(address).cut_off():
        load.goes_on()
        eventually(lambda: name not in homes(deployment))  # Ray has given the node up
        load.goes_on()
    eventually(lambda: not nodes.at(address).pids())  # a raylet that was given up hears of that, and ends
    nodes.add(engine=1)
    eventually(lambda: len(homes(deployment)) == 3, otherwise=lambda: homes(deployment))
    load.goes_on()
    assert load.end() > 0
