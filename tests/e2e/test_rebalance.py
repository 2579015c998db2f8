"""Engines that shared a node, for there was no other, spread when one comes: one moves, and no request is lost."""

from __future__ import annotations

import logging
from dataclasses import replace

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
    replicas=2,  # of which a node has room for three
    engine_timeout_s=60.0,
    drain_timeout_s=PATIENCE_S,
    standby=False,
)
TOKENS = 16
STREAMS = sure_answers(TOKENS)[:2]


def homes(deployment: Deployment) -> list[str]:
    """The addresses of the nodes that engines serve on."""
    roles = deployment._roles.values()
    return [each.site.address for each in roles if each.name.startswith("engine") and not each.is_leaving
            and deployment._supervisor.serving(each.name)]  # fmt: skip


def test_when_a_node_comes_one_of_two_engines_of_another_node_moves_there_under_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="headwise")
    with Nodes.started() as nodes:
        first = nodes.add()
        with (
            Deployment.start(CONFIG, address=nodes.address) as deployment,
            Client(deployment.client_address, keys=deployment.client_keys) as client,
        ):
            eventually(lambda: homes(deployment) == [first.address] * 2, otherwise=lambda: homes(deployment))
            load = EndlessLoad(client, STREAMS, TOKENS)
            load.goes_on()
            second = nodes.add()
            both = sorted([first.address, second.address])
            eventually(lambda: sorted(homes(deployment)) == both, 2 * PATIENCE_S, otherwise=lambda: caplog.messages)
            load.goes_on()
            assert load.end() > 0
            eventually(lambda: len(client.stats()["fleet"]["replicas"]) == 2, otherwise=client.stats)
            assert client.stats()["faults"] == []
    (told,) = (line for line in caplog.messages if "has to go" in line)
    assert f"is on a node of 2 engines, while node {second.address} has 0" in told
