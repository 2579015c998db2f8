"""Engines go and come by hand while requests are served. What else makes them come and go: `test_scaling`."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from support.endless_load import EndlessLoad
from support.engine_requests import each_engine_has, serving
from support.reference import sure_answers
from support.waiting import eventually

from headwise import Client
from headwise.actors.demand import ENGINE_CPUS, WORKER_CPUS
from headwise.actors.deployment import Deployment
from headwise.errors import InvalidRequestError

pytestmark = [pytest.mark.ray, pytest.mark.model]

TOKENS = 16
STREAMS = sure_answers(TOKENS)[:3]


def test_two_engines_become_one_and_two_again_under_load_and_every_request_gets_its_tokens(
    deployment: Deployment, client: Client
) -> None:
    eventually(lambda: len(serving(client)) == 2, otherwise=client.stats)
    before, free = deployment.actor_pids(), ray.available_resources()["CPU"]
    load = EndlessLoad(client, STREAMS, TOKENS)
    assert client.scale(1) == "2 -> 1: set by hand"
    eventually(lambda: len(client.stats()["fleet"]["replicas"]) == 1, otherwise=client.stats)
    (left,) = serving(client)
    (gone,) = (before[name] for name in before if name.startswith("engine-") and name != left)
    eventually(lambda: not Path(f"/proc/{gone}").exists())
    eventually(lambda: list(client.stats()["engines"]) == [left])
    eventually(lambda: ray.available_resources()["CPU"] == pytest.approx(free + ENGINE_CPUS + WORKER_CPUS))
    assert client.scale(2) == "1 -> 2: set by hand"
    assert client.scale(2) == "2: set by hand"
    eventually(lambda: len(serving(client)) == 2, otherwise=client.stats)
    eventually(lambda: each_engine_has(client, "finished"))
    assert load.end() > 0


def test_a_number_out_of_bounds_is_the_caller_s_error(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="from min_replicas 0 to max_replicas 8, got 9"):
        client.scale(9)
    with pytest.raises(InvalidRequestError, match="neither target_ttft_s nor target_queue_s"):
        client.scale(None)
    with pytest.raises(InvalidRequestError, match="must be a number of engines or None, got -1"):
        client.scale(-1)
