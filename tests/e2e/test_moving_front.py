"""A detached deployment over several nodes: that of its owner, scheduler and store dies, and it goes on elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import ray
from support.commands import as_flags
from support.endless_load import EndlessLoad
from support.nodes import Node, Nodes, why_not
from support.reference import answers
from support.waiting import PATIENCE_S, eventually

from headwise import Client, EngineConfig
from headwise.actors.cluster import connection
from headwise.actors.detached import stop_detached
from headwise.actors.found import find_parts

pytestmark = [
    pytest.mark.soak,
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.skipif(bool(why_not()), reason=f"no nodes with addresses of their own: {why_not()}"),
]

CONFIG = EngineConfig(
    port=0,
    host="0.0.0.0",
    replicas=3,
    engine_resources="engine=1",
    max_model_len=512,
    kv_cache="64MiB",
    block_size=16,
    cpu_threads=1,
    dtype="float32",
    engine_timeout_s=60.0,
    front_timeout_s=60.0,
    index_timeout_s=5.0,
    drain_timeout_s=PATIENCE_S,
)
TOKENS = 16
STREAMS = [answer.first(TOKENS) for answer in answers(CONFIG.model) if len(answer.prompt_ids) < 60][:3]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes.started() as nodes:
        yield nodes


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
