"""What is told of a Ray cluster before Ray is asked. The servers are real ones: a gRPC server that answers as a GCS."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc
from support.free_ports import free_ports

from headwise import EngineConfig
from headwise.actors import cluster_probe
from headwise.actors.cluster import Cluster
from headwise.actors.cluster_probe import NO_LOCAL, OR_LOCAL, TO_FIND, find_cluster, read_authentication
from headwise.actors.deployment import resolve_client
from headwise.actors.detached import start_detached, stop_detached
from headwise.errors import DeploymentError

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def nothing_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(cluster_probe, "CURRENT_CLUSTER", tmp_path / "ray_current_cluster")
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_node_ids", set)
    yield
    monkeypatch.undo()
    read_authentication()


class Nodes(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    def __init__(self, addresses: tuple[str, ...], token: str) -> None:
        self.addresses, self.token = addresses, token

    def GetAllNodeInfo(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if self.token and ("authorization", f"Bearer {self.token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: missing or incorrect. Read the manual.")
        states = gcs_pb2.GcsNodeInfo.GcsNodeState
        alive = [
            gcs_pb2.GcsNodeInfo(node_id=bytes([row]), node_manager_address=each, state=states.ALIVE)
            for row, each in enumerate(self.addresses)
        ]
        dead = gcs_pb2.GcsNodeInfo(node_manager_address="127.0.0.1", state=states.DEAD)
        return gcs_service_pb2.GetAllNodeInfoReply(node_info_list=[*alive, dead])


@contextmanager
def gcs(*nodes: str, token: str = "") -> Iterator[str]:
    """The address of a cluster of these nodes."""
    server = grpc.server(ThreadPoolExecutor(1))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(Nodes(nodes, token), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def with_token(monkeypatch: pytest.MonkeyPatch, path: Path, token: str) -> None:
    path.write_text(token)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))


def test_a_cluster_with_a_node_here_is_found() -> None:
    with gcs("10.255.255.1", "127.0.0.1") as address:
        assert find_cluster(address) == address


def test_a_cluster_that_wants_a_token_is_told_from_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with gcs("127.0.0.1", token=TOKEN) as address:
        with pytest.raises(DeploymentError, match=f"{address} refuses this process's token.*RAY_AUTH_TOKEN_PATH"):
            find_cluster(address)
        with_token(monkeypatch, tmp_path / "token", "fedcba98" * 8)
        with pytest.raises(DeploymentError, match="refuses this process's token"):
            find_cluster(address)
        with_token(monkeypatch, tmp_path / "token", TOKEN)
        assert find_cluster(address) == address


def test_a_token_that_is_asked_for_and_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "nowhere"))
    with gcs("127.0.0.1", token=TOKEN) as address, pytest.raises(DeploymentError) as raised:
        find_cluster(address)
    assert "token" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_listens_and_is_no_ray_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_probe, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeploymentError, match=f"{address}: what listens there does not answer"):
            find_cluster(address)


def test_a_cluster_without_a_node_on_this_machine_is_named_with_its_nodes() -> None:
    with gcs("192.0.2.77") as address, pytest.raises(DeploymentError, match=r"no node of .*192\.0\.2\.77.*ray start"):
        find_cluster(address)


def test_a_node_of_this_machine_that_is_known_by_another_address_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.services.find_node_ids", lambda: {"00"})
    with gcs("192.0.2.77") as address:
        assert find_cluster(address) == address


def test_auto_passes_over_clusters_that_are_gone_or_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_probe.CURRENT_CLUSTER.write_text("127.0.0.1:9")
    with gcs("127.0.0.1", token=TOKEN) as anothers, gcs("127.0.0.1") as ours:
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: {anothers, ours})
        assert find_cluster("auto") == ours


def test_auto_takes_the_cluster_that_was_started_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs("127.0.0.1") as first, gcs("127.0.0.1") as last:
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: {first, last})
        for each in (first, last):
            cluster_probe.CURRENT_CLUSTER.write_text(each)
            assert find_cluster("auto") == each


def test_auto_takes_the_cluster_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs("127.0.0.1") as named, gcs("127.0.0.1") as other:
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: {other})
        monkeypatch.setenv("RAY_ADDRESS", named)
        assert find_cluster("auto") == named
        monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
        assert find_cluster("auto") == other


def test_auto_on_a_machine_without_ray_says_so() -> None:
    with pytest.raises(DeploymentError, match=r"part of none.*ray start --head"):
        find_cluster("auto")


def test_auto_tells_of_every_cluster_why_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs("127.0.0.1", token=TOKEN) as refusing, gcs("192.0.2.77") as elsewhere:
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: {refusing, elsewhere})
        with pytest.raises(DeploymentError) as raised:
            find_cluster("auto")
    assert refusing in str(raised.value)
    assert elsewhere in str(raised.value)


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:10001", "127.0.0.1:ray", "127.0.0.1:9", "a:99999"])
def test_what_is_no_address_of_a_cluster_is_named(address: str) -> None:
    with pytest.raises(DeploymentError, match=address):
        find_cluster(address)


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (lambda address: stop_detached("headwise", address), TO_FIND),
        (lambda address: resolve_client(address, "headwise"), TO_FIND),
        (lambda address: start_detached(EngineConfig(), address), NO_LOCAL),
        (lambda address: Cluster.connect(address), OR_LOCAL),
    ],
)
def test_where_there_is_no_cluster_each_command_says_what_helps(command: Any, remedy: str) -> None:
    (port,) = free_ports(1)
    for address in ("auto", f"127.0.0.1:{port}"):
        with pytest.raises(DeploymentError) as raised:
            command(address)
        assert str(raised.value).endswith(f"; {remedy}")
