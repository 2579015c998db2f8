"""A detached deployment over several nodes: that of its owner, scheduler and store dies, and it goes on elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import ray
from support.commands import as_flags
from support.endless_load import EndlessLoad
from support.nodes import DETACHED, NODE_MARKS, Node, Nodes
from support.reference import answers
from support.waiting import PATIENCE_S, eventually

from headwise import Client
from headwise.actors.cluster import connection
from headwise.actors.deployment import resolve_client
from headwise.actors.detached import stop_detached
from headwise.actors.found import find_parts
from headwise.errors import DeploymentError

pytestmark = NODE_MARKS

CONFIG = replace(DETACHED, replicas=3)
TOKENS = 16
STREAMS = [answer.first(TOKENS) for answer in answers(CONFIG.model) if len(answer.prompt_ids) < 60][:3]


@pytest.fixture
def front(nodes: Nodes) -> Iterator[Node]:
    """The node that owner, scheduler and store of a deployment are on. Each of the three has an engine."""
    first, *_ = (nodes.add(engine=1) for _ in range(3))
    serve = [sys.executable, "-m", "headwise", "serve", "--detach", "--address", nodes.address, *as_flags(CONFIG)]
    command = ["ip", "netns", "exec", first.name, *serve]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    yield nodes.at(urlsplit(done.stdout.split()[-1]).hostname or "")  # Ray may take another one for this node
    stop_detached(CONFIG.name, nodes.address)


def engine_pids() -> dict[str, int]:
    """Of the engines that answer, by name."""
    engines = {role: actor for role, actor in find_parts(CONFIG.name).actors.items() if role.startswith("engine")}
    return {role: ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for role, actor in engines.items()}


def test_the_node_of_the_front_dies_and_a_client_that_knows_the_cluster_goes_on_with_the_other_nodes_engines(
    nodes: Nodes, front: Node
) -> None:
    with connection(nodes.address), Client(f"ray:{nodes.address}") as client:
        eventually(lambda: len(client.stats()["engines"]) == 3, otherwise=client.stats)
        before = engine_pids()
        load = EndlessLoad(client, STREAMS, TOKENS)
        load.goes_on()
        front.kill()
        load.goes_on(3 * PATIENCE_S)
        after = engine_pids()
        kept = [name for name in before if after.get(name) == before[name]]
        assert len(kept) == 2, (before, after)
        with Client(f"ray:{nodes.address}") as another:
            assert urlsplit(another.address).hostname != front.address
        nodes.add(engine=1)  # for the engine that was lost, which the owner knows of by its placement group
        eventually(lambda: len(client.stats()["engines"]) == 3, otherwise=client.stats)
        assert load.end() > 0


def test_a_node_that_is_told_to_end_is_left_by_front_and_engine_before_it_does(nodes: Nodes, front: Node) -> None:
    """SIGTERM to `ray start --block`, as Kubernetes, systemd and clouds send it, while requests run."""
    with connection(nodes.address), Client(f"ray:{nodes.address}") as client:
        eventually(lambda: len(client.stats()["engines"]) == 3, otherwise=client.stats)
        before = engine_pids()
        load = EndlessLoad(client, STREAMS, TOKENS)
        load.goes_on()
        (ray_start,) = front.processes
        ray_start.terminate()
        eventually(lambda: scheduler_host(nodes) not in ("", front.address), otherwise=lambda: scheduler_host(nodes))
        load.goes_on(3 * PATIENCE_S)
        ray_start.wait(3 * PATIENCE_S)
        load.goes_on(3 * PATIENCE_S)
        after = engine_pids()
        kept = [name for name in before if after.get(name) == before[name]]
        assert len(kept) == 2, (before, after)
        nodes.add(engine=1)
        eventually(lambda: len(client.stats()["engines"]) == 3, otherwise=client.stats)
        assert load.end() > 0


def scheduler_host(nodes: Nodes) -> str:
    """Of the scheduler that the cluster knows of; empty: it knows of none now."""
    try:
        address = resolve_client(nodes.address, CONFIG.name)[0]
    except DeploymentError:
        return ""
    return urlsplit(address).hostname or ""
