"""Engines that fail again and again, and nodes that are no good for them: the others serve all the time."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.drained import drain_node
from support.waiting import PATIENCE_S, eventually

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.cluster_probe import read_authentication
from headwise.actors.deployment import Deployment
from headwise.runtime.loader.resolve import resolve_model

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
CONFIG = EngineConfig(
    port=0,
    replicas=2,
    max_model_len=256,
    kv_cache="32MiB",
    cpu_threads=1,
    dtype="float32",
    engine_timeout_s=10.0,
)
KILLS = 9


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The driver's log."""
    caplog.set_level(logging.INFO, logger="headwise")
    return caplog


def serves(client: Client) -> bool:
    return client.stream("The capital of France is", GREEDY).read().text.startswith(" Paris")


def test_an_engine_that_is_killed_again_and_again_is_started_again_each_time_and_the_other_serves(
    log: pytest.LogCaptureFixture,
) -> None:
    with Deployment.start(CONFIG) as deployment, Client(deployment.client_address) as client:
        other = deployment.actor_pids()["engine-1"]
        for _ in range(KILLS):
            eventually(lambda: deployment._supervisor.serving("engine-0") is not None)
            os.kill(deployment.actor_pids()["engine-0"], signal.SIGKILL)
            eventually(lambda: deployment._supervisor.serving("engine-0") is None)
            assert serves(client)
        eventually(lambda: deployment._supervisor.serving("engine-0") is not None)
        assert serves(client)
        assert deployment.actor_pids()["engine-1"] == other
    ends = [line for line in log.messages if "engine-0 on node" in line and "has ended" in line]
    assert len(ends) == KILLS
    assert "again in" in ends[-1]
    assert not any("again in" in line for line in ends[:3])


@contextmanager
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose head takes no engines."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    read_authentication()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Any, home: Path) -> Any:
    """A node with room for one engine, whose processes have this home directory."""
    return cluster.add_node(num_cpus=1, object_store_memory=80 << 20, env_vars={"HOME": str(home)})


def test_an_engine_that_moved_to_a_node_without_the_model_ends_nobody_and_goes_on_when_a_good_node_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for home in (good, bad):
        home.mkdir()
    (good / "model").symlink_to(resolve_model(CONFIG.model, CONFIG.cache_path))
    monkeypatch.setenv("HOME", str(good))  # of this process, and of the head's: the scheduler reads the model, too
    config = replace(CONFIG, model="~/model", tp_size=3)  # so large that a node has room for one
    with ray_cluster(monkeypatch) as cluster:
        nodes = {node.node_id: node for node in (add_node(cluster, good), add_node(cluster, good))}
        with (
            Deployment.start(config, address=cluster.address) as deployment,
            Client(deployment.client_address) as client,
        ):
            assert serves(client)
            add_node(cluster, bad)
            cluster.remove_node(nodes[deployment._roles["engine-1"].site.node], allow_graceful=False)

            def failures() -> list[str]:
                return [line for line in log.messages if "engine-1 on node" in line and "did not start" in line]

            def waits_long() -> bool:
                assert serves(client)  # of engine-0 all the time
                time.sleep(0.2)
                return len(failures()) >= 5

            eventually(waits_long, 2 * PATIENCE_S, lambda: log.messages)
            assert any("'~/model' is no known model" in line for line in failures())
            assert "again in" in failures()[-1]
            add_node(cluster, good)
            eventually(lambda: deployment._supervisor.serving("engine-1") is not None, 2 * PATIENCE_S)
            eventually(lambda: client.stats()["engines"]["engine-1"]["server"]["ready"])
            assert serves(client)


def test_an_engine_leaves_a_node_that_ray_drains_for_another_and_the_stream_that_it_has_ends_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = Path.home()
    config = replace(CONFIG, replicas=1, tp_size=3, drain_timeout_s=PATIENCE_S)
    with ray_cluster(monkeypatch) as cluster:
        add_node(cluster, home)
        with (
            Deployment.start(config, address=cluster.address) as deployment,
            Client(deployment.client_address) as client,
        ):
            first = deployment._roles["engine-0"].site.node
            add_node(cluster, home)
            stream = client.stream("Once upon a time", temperature=0.0, max_tokens=100, ignore_eos=True)
            next(stream)
            drain_node(cluster.address, first)
            eventually(
                lambda: client.stats()["fleet"]["replicas"].get("engine-0") == "draining", otherwise=client.stats
            )
            eventually(lambda: list(client.stats()["fleet"]["replicas"]) == ["engine-1"], otherwise=client.stats)
            assert len(stream.read().token_ids) == 100
            eventually(lambda: deployment._supervisor.serving("engine-1") is not None)
            assert deployment._roles["engine-1"].site.node != first
            assert serves(client)
