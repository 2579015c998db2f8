"""Elastic replicas on Ray's own autoscaler: load comes, and with it a node; it goes, and so does the node."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray
from support.autoscaled import autoscaled
from support.endless_load import EndlessLoad
from support.engine_requests import each_engine_has
from support.reference import sure_answers
from support.small_engine import SMALL
from support.waiting import eventually

from headwise import Client
from headwise.actors.deployment import Deployment

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.model]

CONFIG = replace(
    SMALL,
    max_replicas=2,
    engine_resources="engine=1",  # of which each node has one
    target_ttft_s=60.0,  # the room for sequences decides, however slow this machine is
    max_num_seqs=4,
    upscale_delay_s=1.0,
    downscale_delay_s=5.0,
    engine_timeout_s=60.0,
)
TOKENS = 16
STREAMS = sure_answers(TOKENS)[:8]
"""Twice as many as one engine runs at once."""


def nodes() -> int:
    """That live."""
    return sum(bool(node["Alive"]) for node in ray.nodes())


def test_a_load_gets_a_node_and_gives_it_back_and_loses_no_request() -> None:
    with (
        autoscaled(head={"engine": 1}, node={"CPU": 1, "engine": 1}, most=1) as address,
        Deployment.start(CONFIG, address=address) as deployment,
        Client(deployment.client_address) as client,
    ):

        def states() -> list[str]:
            return sorted(client.stats()["fleet"]["replicas"].values())

        assert nodes() == 1
        load = EndlessLoad(client, STREAMS, TOKENS)
        eventually(lambda: any(state.startswith("waits for a node") for state in states()), otherwise=client.stats)
        eventually(lambda: nodes() == 2, otherwise=states)
        eventually(lambda: [state[:6] for state in states()] == ["serves", "serves"], otherwise=client.stats)
        eventually(lambda: each_engine_has(client, "finished"))
        assert load.end() > 0
        eventually(lambda: len(states()) == 1, otherwise=client.stats)
        eventually(lambda: nodes() == 1, otherwise=ray.nodes)
        assert client.stats()["faults"] == []
