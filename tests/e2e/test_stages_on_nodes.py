"""Stages of a pipeline on CPU nodes of their own, with addresses of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.nodes import NODE_MARKS, Nodes
from support.reference import assert_same, sure_answers
from support.small_engine import SMALL
from support.waiting import eventually

from headwise import Client, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.actors.placement import address_of

pytestmark = NODE_MARKS

TOKENS = 16
STREAMS = sure_answers(TOKENS)[:6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
CONFIG = replace(
    SMALL,
    host="0.0.0.0",
    tp_size=3,
    pipeline_parallel_size=2,
    engine_cpus=1.6,  # of which a node has one
    standby=False,
    engine_timeout_s=60.0,
)


@pytest.fixture(scope="module")
def deployment(nodes: Nodes) -> Iterator[Deployment]:
    for _ in range(2):
        nodes.add()
    with Deployment.start(CONFIG, address=nodes.address) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.client_address, keys=deployment.client_keys) as client:
        yield client


def assert_says_the_reference_tokens(client: Client) -> None:
    results = client.generate([answer.prompt_ids for answer in STREAMS], GREEDY)
    for answer, result in zip(STREAMS, results, strict=True):
        assert_same(answer.first(TOKENS), result.token_ids)


def test_where_no_node_has_room_for_all_stages_each_is_on_one(deployment: Deployment, client: Client) -> None:
    assert len(deployment._roles["engine-0"].site.nodes) == 2
    assert_says_the_reference_tokens(client)
    assert deployment._keys.own is not None, "all of it is encrypted"


def test_where_a_stage_s_node_dies_the_engine_starts_anew_as_soon_as_there_is_another(
    nodes: Nodes, deployment: Deployment, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headwise")
    site = deployment._roles["engine-0"].site
    before = site.nodes
    (of_stage,) = (node for node in before if node != site.node)
    stream = client.stream(STREAMS[0].prompt_ids, GREEDY)
    next(stream)
    nodes.at(address_of(of_stage)).kill()
    eventually(lambda: deployment._supervisor.serving("engine-0") is None, otherwise=lambda: caplog.messages)
    nodes.add()
    eventually(
        lambda: deployment._supervisor.serving("engine-0") is not None and len(site.nodes - before) == 1,
        otherwise=lambda: (caplog.messages, site.nodes),
    )
    assert_same(STREAMS[0].first(TOKENS), stream.read().token_ids)
    assert_says_the_reference_tokens(client)
