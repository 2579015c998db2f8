"""Two nodes whose storage has the same path and lies on a disk of each node's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import ray
from support.drained import drain_node
from support.nodes import descendants
from support.reference import Answer, answers, assert_same
from support.waiting import PATIENCE_S, eventually

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.cluster_probe import read_authentication
from headwise.actors.deployment import Deployment

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

ENGINES = {"engine-0", "engine-1"}
PREFIX = 640
"""Tokens of the prompt that storage has at least, of 700."""
NODE = """
mount --bind "$1" "$2" || exit 1
exec "$3" -m ray.scripts.scripts start --block --address "$4" --num-cpus 1 --object-store-memory 83886080
"""


@contextmanager
def node(disk: Path, path: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Ray node whose processes, and no others, see ``disk`` at ``path``."""
    disk.mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", NODE, "sh"]
    process = subprocess.Popen([*command, str(disk), str(path), sys.executable, address])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


Nodes = dict[str, "subprocess.Popen[bytes]"]
"""By Ray's id of the node, the process that ends with it."""


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Deployment, Nodes]]:
    from ray.cluster_utils import Cluster

    if subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], check=False).returncode:
        pytest.skip("this machine allows no mounts of a process's own")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    read_authentication()
    path = tmp_path / "storage"
    path.mkdir()
    config = EngineConfig(
        port=0,
        replicas=2,
        tp_size=3,  # so large that a node has room for one
        max_model_len=1024,
        kv_cache="64MiB",
        block_size=16,
        host_cache="64MiB",
        write_policy="write_through",
        storage=f"file://{path}?capacity=1GiB",
        prefetch="wait_complete",
        storage_timeout_s=PATIENCE_S,
        load_timeout_s=PATIENCE_S,
        cpu_threads=1,
        dtype="float32",
    )
    with ExitStack() as stack:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
        stack.callback(cluster.shutdown)
        stack.callback(ray.shutdown)
        ray.init(cluster.address)
        head, nodes = alive(), Nodes()

        def added() -> set[str]:
            return alive() - head - nodes.keys()

        for name in ("a", "b"):  # one by one: those that start at once may take the same names
            process = stack.enter_context(node(tmp_path / name, path, cluster.address))
            eventually(added)
            nodes[added().pop()] = process
        ray.shutdown()
        yield stack.enter_context(Deployment.start(config, address=cluster.address)), nodes


def kill(node: subprocess.Popen[bytes]) -> None:
    """As when its power fails: nothing is drained."""
    for pid in descendants(node.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.kill()


def alive() -> set[str]:
    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}


def serve(client: Client, answer: Answer) -> int:
    """How much of the prompt was served from a cache; the tokens must be the reference's."""
    sampling = SamplingParams(temperature=0.0, max_tokens=len(answer.output_ids), ignore_eos=True)
    result = client.stream(answer.prompt_ids, sampling).read()
    assert_same(answer, result.token_ids)
    assert result.usage is not None
    return result.usage.cached_tokens


def stored(client: Client, answer: Answer) -> dict[str, int]:
    """By engine, how many tokens of the prompt its storage could serve."""
    engines = client.find_prefix(answer.prompt_ids)["engines"]
    return {name: tiers["storage"] for name, tiers in engines.items() if tiers.get("storage")}


@pytest.mark.parametrize("lost", [(), ("device", "host")])
def test_an_engine_that_goes_with_its_disk_leaves_its_cache_to_the_host_of_the_other(
    deployed: tuple[Deployment, Nodes], lost: tuple[str, ...]
) -> None:
    """lost: the tiers that have nothing any more: all is on the disk alone"""
    deployment, nodes = deployed
    answer = next(each for each in answers(deployment.config.model) if each.name == "long_700").first(8)
    with Client(deployment.client_address) as client:
        assert serve(client, answer) == 0
        eventually(lambda: max(stored(client, answer).values(), default=0) >= PREFIX)
        (first,) = stored(client, answer)
        for tier in lost:
            client.reset_cache(tier)
        node = deployment._roles[first].site.node
        drain_node(ray.get_runtime_context().gcs_address, node)
        eventually(lambda: first not in client.stats()["fleet"]["replicas"], otherwise=client.stats)
        nodes[node].terminate()
        assert serve(client, answer) >= PREFIX


def test_what_a_nodes_own_disk_has_is_credited_to_that_node_and_another_computes_it(
    deployed: tuple[Deployment, Nodes], tmp_path: Path
) -> None:
    deployment, nodes = deployed
    answer = next(each for each in answers(deployment.config.model) if each.name == "long_700").first(8)
    with Client(deployment.client_address) as client:
        assert serve(client, answer) == 0
        eventually(lambda: max(stored(client, answer).values(), default=0) >= PREFIX)
        assert len({(tmp_path / name / "volume-id").read_text() for name in ("a", "b")}) == 2
        (first,) = stored(client, answer)
        (other,) = ENGINES - {first}
        for tier in ("device", "host"):
            client.reset_cache(tier)
        assert serve(client, answer) >= PREFIX
        assert stored(client, answer).keys() == {first}

        kill(nodes[deployment._roles[first].site.node])
        eventually(lambda: deployment._supervisor.serving(first) is None)
        assert serve(client, answer) == 0
        eventually(lambda: stored(client, answer).get(other, 0) >= PREFIX)
        assert stored(client, answer).keys() == {other}
