"""A detached deployment over several nodes: that of its owner, scheduler and store dies, and it goes on elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

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
from headwise.actors.found import deployments, find_parts
from headwise.errors import HeadwiseError

pytestmark = [
    pytest.mark.soak,
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.skipif(bool(why_not()), reason=f"no nodes with addresses of their own: {why_not()}"),
]

CONFIG = EngineConfig(
    port=0,
    host="0.0.0.0",
    replicas=2,
    engine_resources="engine=1",
    max_model_len=512,
    kv_cache="64MiB",
    block_size=16,
    cpu_threads=1,
    tensor_ops="numpy",  # ready in a second
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
    """The node that a deployment was started on. The two others have an engine each."""
    front = nodes.add()
    for _ in range(2):
        nodes.add(engine=1)
    command = [sys.executable, "-m", "headwise", "serve", "--detach", "--address", nodes.address, *as_flags(CONFIG)]
    done = subprocess.run(
        ["ip", "netns", "exec", front.name, *command], capture_output=True, text=True, timeout=5 * PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert front.address in done.stdout
    yield front
    stop_detached(CONFIG.name, nodes.address)


def engine_pids(nodes: Nodes) -> list[int]:
    with connection(nodes.address):
        actors = find_parts(CONFIG.name).actors
        engines = [actor for role, actor in sorted(actors.items()) if role.startswith("engine")]
        return ray.get([engine.__ray_call__.remote(lambda actor: os.getpid()) for engine in engines])


def heard(client: Client) -> set[str]:
    """The engines that the scheduler hears of."""
    try:
        return set(client.stats()["engines"])
    except HeadwiseError:
        return set()


def test_the_node_of_the_front_dies_and_a_client_that_knows_the_cluster_goes_on_with_the_same_engines(
    nodes: Nodes, front: Node
) -> None:
    with connection(nodes.address), Client(f"ray:{nodes.address}") as client:
        assert front.address in client.address
        eventually(lambda: len(heard(client)) == 2, otherwise=client.stats)
        before = engine_pids(nodes)
        load = EndlessLoad(client, STREAMS, TOKENS)
        load.goes_on()
        front.kill()
        load.goes_on(3 * PATIENCE_S)
        eventually(lambda: len(heard(client)) == 2, otherwise=client.stats)
        assert load.end() > 0
        assert engine_pids(nodes) == before
        with Client(f"ray:{nodes.address}") as another:
            assert front.address not in another.address
            eventually(lambda: bool(another.generate("abc", max_tokens=2)))
        assert deployments() == [CONFIG.name]
