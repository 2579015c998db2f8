"""A detached deployment whose cluster loses its head: with a Redis, Ray's control service finds its state again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import ray
from support.endless_load import EndlessLoad
from support.free_ports import free_ports
from support.nodes import DETACHED, NODE_MARKS, Nodes
from support.reference import sure_answers
from support.waiting import eventually

from headwise import Client
from headwise.actors.cluster import connection
from headwise.actors.detached import start_detached, stop_detached
from headwise.actors.found import find_parts
from headwise.actors.placement import on_node

pytestmark = [
    *NODE_MARKS,
    pytest.mark.skipif(not shutil.which("redis-server"), reason="there is no redis-server"),
]

CONFIG = replace(DETACHED, insecure=True)
TOKENS = 16
STREAMS = sure_answers(TOKENS)[:3]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """The address of a Redis."""
    (port,) = free_ports(1)
    command = ["redis-server", "--port", str(port), "--dir", str(tmp_path), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def nodes(redis: str) -> Iterator[Nodes]:
    with Nodes.started({"RAY_REDIS_ADDRESS": redis}) as nodes:
        yield nodes


@pytest.fixture
def address(nodes: Nodes) -> Iterator[str]:
    """Of a detached deployment, none of which is on the head."""
    homes = [nodes.add(engine=1).address for _ in range(CONFIG.replicas)]
    eventually(lambda: urlsplit(started(nodes, homes[0])).hostname in homes)
    yield started(nodes, homes[0])
    stop_detached(CONFIG.name, nodes.address)


def started(nodes: Nodes, home: str) -> str:
    """The address of the deployment, which is started if there is none. It is ended again if it came to be on the head:
    that a node has just joined, Ray tells the others when it likes.
    """
    with connection(nodes.address):
        there = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == home)
        start: Any = ray.remote(start_detached)
        # Ray takes the head for the node of any command of this machine, but knows where a task runs.
        address = str(ray.get(start.options(**on_node(there)).remote(CONFIG, nodes.address))[0])
    if urlsplit(address).hostname == nodes.host:
        stop_detached(CONFIG.name, nodes.address)
    return address


def pids(nodes: Nodes) -> dict[str, int]:
    """Of the deployment's actors, by role, asked by a driver that joins the cluster for it."""
    with connection(nodes.address):
        actors = find_parts(CONFIG.name).actors
        return {role: ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for role, actor in actors.items()}


def test_streams_go_on_while_there_is_no_control_service_and_what_dies_later_is_mended(
    nodes: Nodes, address: str
) -> None:
    with Client(address) as client:
        eventually(lambda: len(client.stats()["engines"]) == 2, otherwise=client.stats)
        before = pids(nodes)
        load = EndlessLoad(client, STREAMS, TOKENS)
        load.goes_on()
        nodes.kill_head()
        load.goes_on()
        nodes.start_head(nodes.other_host)
        load.goes_on()
        assert pids(nodes) == before, "nothing was started anew"
        os.kill(before["engine-0"], signal.SIGKILL)
        load.goes_on()
        eventually(lambda: pids(nodes).get("engine-0", 0) not in (0, before["engine-0"]))
        load.goes_on()
        assert load.end() > 0
