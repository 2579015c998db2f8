"""A detached deployment over several nodes: that of its owner, scheduler and store dies, and it goes on elsewhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import ray
from support.commands import as_flags
from support.drained import drain_node
from support.endless_load import EndlessLoad
from support.free_ports import free_ports
from support.new_requests import NewRequests
from support.nodes import DETACHED, NODE_MARKS, Node, Nodes
from support.reference import sure_answers
from support.waiting import PATIENCE_S, eventually

from headwise import Client
from headwise.actors.cluster import connection
from headwise.actors.deployment import resolve_client
from headwise.actors.detached import stop_detached
from headwise.actors.found import find_actor, find_parts
from headwise.actors.names import OWNER, SCHEDULER
from headwise.errors import DeploymentError

pytestmark = NODE_MARKS

KEY = "sk-of-the-test"
CONFIG = replace(
    DETACHED,
    replicas=3,
    http=free_ports(1)[0],
    api_key=KEY,
    max_model_len=2048,
    kv_cache="256MiB",
    drain_timeout_s=5 * PATIENCE_S,
)
TOKENS = 16
LONG = 1200
"""Tokens of an answer that is not over when the front has gone to another node."""
REFUSED_S = 3.0
"""Longest time for which nobody takes new requests over HTTP."""
STREAMS = sure_answers(TOKENS)[:3]


@pytest.fixture
def front(nodes: Nodes) -> Iterator[Node]:
    """The node that owner, scheduler and store of a deployment are on. Each of the three has an engine."""
    first, *_ = (nodes.add(engine=1) for _ in range(3))
    serve = [sys.executable, "-m", "headwise", "serve", "--detach", "--address", nodes.address, *as_flags(CONFIG)]
    done = subprocess.run(nodes.on(first, *serve), capture_output=True, text=True, timeout=5 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert urlsplit(done.stdout.split()[-1]).hostname == first.address, "where the command ran"
    yield first
    stop_detached(CONFIG.name, nodes.address)
    nodes.kill_all()  # engines of the next deployment are to be on its own nodes


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


def test_streams_of_http_and_of_the_relay_go_on_through_a_front_that_has_left_its_node(
    nodes: Nodes, front: Node
) -> None:
    """`ray drain-node`, as autoscalers do it: what was begun there ends there."""
    address, keys = resolve_client(nodes.address, CONFIG.name)
    with (
        connection(nodes.address),
        ThreadPoolExecutor() as pool,
        Client(address, relay="always", keys=keys) as relayed,
    ):
        eventually(lambda: len(relayed.stats()["engines"]) == 3, otherwise=relayed.stats)
        whole = completion(front.address, stream=False)["choices"][0]["text"]
        stream = relayed.stream("Once upon a time", temperature=0.0, max_tokens=LONG, ignore_eos=True)
        told = [next(stream).text]
        over_http = pool.submit(events, front.address)
        by_relay = pool.submit(lambda: "".join([*told, *(delta.text for delta in stream)]))
        drain_node(nodes.address, node_id(front))
        eventually(lambda: not listens(front.address, CONFIG.http))
        assert listens(nodes.host, CONFIG.http), "before"
        assert not over_http.done(), over_http.result()
        eventually(lambda: scheduler_host(nodes) == nodes.host, otherwise=lambda: scheduler_host(nodes))
        assert not by_relay.done(), by_relay.result()
        assert completion(nodes.host, stream=False, max_tokens=4)["usage"]["completion_tokens"] == 4
        assert over_http.result(5 * PATIENCE_S) == whole
        assert by_relay.result(5 * PATIENCE_S) == whole
        eventually(lambda: not find_parts(CONFIG.name).leaving, otherwise=lambda: find_parts(CONFIG.name).leaving)


@contextmanager
def under_requests(nodes: Nodes, front: Node) -> Iterator[tuple[NewRequests, EndlessLoad]]:
    """New requests over HTTP, as of a load balancer that asks the servers that there are, and a client's that knows the
    cluster: both go on within and at its end, and nobody was left alone for long."""
    with connection(nodes.address), Client(f"ray:{nodes.address}") as client:
        eventually(lambda: len(client.stats()["engines"]) == 3, otherwise=client.stats)
        text = completion(front.address, stream=False, max_tokens=4)["choices"][0]["text"]
        new = NewRequests([front.address, nodes.host], lambda host: asked(host, stream=False, max_tokens=4), text)
        load = EndlessLoad(client, STREAMS, TOKENS)
        load.goes_on()
        yield new, load
        load.goes_on()
        new.end()
        assert load.end() > 0
        assert new.longest_s < REFUSED_S


def test_new_requests_are_served_throughout_while_the_front_moves(nodes: Nodes, front: Node) -> None:
    with under_requests(nodes, front) as (new, load):
        drain_node(nodes.address, node_id(front))
        while scheduler_host(nodes) == front.address:
            assert listens(front.address, CONFIG.http) or scheduler_host(nodes) != front.address, "it goes on meanwhile"
            new.check()
            load.check()
        assert scheduler_host(nodes) == nodes.host, "clients are never told that nobody knows"
        before = new.served[nodes.host]
        eventually(lambda: new.served[nodes.host] > before + 2, otherwise=lambda: new.served)


def test_an_owner_that_dies_while_the_front_moves_has_another_one_that_moves_it(nodes: Nodes, front: Node) -> None:
    with under_requests(nodes, front):
        owner = find_actor(CONFIG.name, OWNER)
        assert owner is not None
        pid = ray.get(owner.__ray_call__.remote(lambda _: os.getpid()))
        drain_node(nodes.address, node_id(front))
        eventually(lambda: find_actor(CONFIG.name, f"{SCHEDULER}.1") is not None)
        os.kill(pid, signal.SIGKILL)
        assert scheduler_host(nodes) == front.address
        eventually(lambda: scheduler_host(nodes) == nodes.host, otherwise=lambda: scheduler_host(nodes))


def node_id(node: Node) -> str:
    """Ray's."""
    return next(str(each["NodeID"]) for each in ray.nodes() if each["NodeManagerAddress"] == node.address)


def completion(host: str, **options: Any) -> dict[str, Any]:
    response = httpx.post(**asked(host, **options))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(host: str) -> str:
    """The text of a whole stream of events."""
    with httpx.stream("POST", **asked(host, stream=True)) as response:
        told = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert told[-1] == "[DONE]", told[-3:]
    parts = [json.loads(each) for each in told[:-1]]
    assert not any("error" in part for part in parts), parts[-1]
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def asked(host: str, **options: Any) -> dict[str, Any]:
    body = {"model": CONFIG.model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": LONG}
    return {
        "url": f"http://{host}:{CONFIG.http}/v1/completions",
        "headers": {"authorization": f"Bearer {KEY}"},
        "json": {**body, "ignore_eos": True, **options},
        "timeout": 5 * PATIENCE_S,
    }


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5.0).close()
    except OSError:
        return False
    return True


def scheduler_host(nodes: Nodes) -> str:
    """Of the scheduler that the cluster knows of; empty: it knows of none now."""
    try:
        address = resolve_client(nodes.address, CONFIG.name)[0]
    except DeploymentError:
        return ""
    return urlsplit(address).hostname or ""
