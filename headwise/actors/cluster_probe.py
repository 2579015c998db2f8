"""Checks that a Ray cluster is there and accepts this process, before Ray is asked: Ray itself waits for minutes."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from headwise.errors import DeploymentError

CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` leaves the address of the cluster that it started."""
ANSWER_S = 3.0
"""Longest wait for a connection, and for each answer."""
SEARCH_S = 4.0
"""After so long, no further cluster of this machine is tried."""
OR_LOCAL = "start one with `ray start --head`, or leave the address out to start a local one"
"""What to do where there is no cluster: to deploy."""
NO_LOCAL = "start one with `ray start --head`: a local one would end with the command"
"""The same, where the deployment is to outlive the command."""
TO_FIND = "give the HOST:PORT of the one that the deployment is on, and call from one of its nodes"
"""The same, of a deployment that there is."""


def find_cluster(address: str, remedy: str = OR_LOCAL) -> str:
    """The ``HOST:PORT`` of a cluster that answers, takes this process's token, and has a node on this machine.

    address: ``HOST:PORT``, or ``auto``: the one that RAY_ADDRESS names, or else of those on this machine the one that
             was started last, or else another one that takes this process
    remedy:  what to do where there is none

    Raises `DeploymentError` naming what is wrong.
    """
    if address.startswith("ray://"):
        raise DeploymentError(f"{address!r}: Ray clients cannot own a deployment; give the cluster's HOST:6379 instead")
    if address != "auto":
        _check(address, remedy)
        return address
    until, problems = time.monotonic() + SEARCH_S, []
    for candidate in _candidates():
        try:
            _check(candidate, remedy)
            return candidate
        except DeploymentError as error:
            problems.append(str(error))
        if time.monotonic() > until:
            break
    raise DeploymentError("; ".join(problems) or f"no Ray cluster at auto: this machine is part of none; {remedy}")


def can_connect(address: str) -> bool:
    """Whether something listens at ``HOST:PORT``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError:
        return False
    return True


def read_authentication() -> None:
    """Let Ray see RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as they are now; by itself it reads them when imported.

    Processes that Ray starts read them at their own start, and would disagree with this one.
    """
    raylet: Any = importlib.import_module("ray._raylet")
    if hasattr(raylet, "AuthenticationTokenLoader"):  # releases of Ray before that have no tokens
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _candidates() -> Iterator[str]:
    """Addresses of the clusters that ``auto`` may mean, the likeliest first."""
    named = os.environ.get("RAY_ADDRESS", "")
    if named and named != "auto" and "://" not in named:  # `ray job` takes the dashboard's URL from it, too
        yield named
        return
    last = ""
    with contextlib.suppress(OSError):
        last = CURRENT_CLUSTER.read_text().strip()
    if last:
        yield last
    from ray._private.services import find_gcs_addresses

    if hasattr(find_gcs_addresses, "cache_clear"):
        find_gcs_addresses.cache_clear()
    yield from sorted(set(find_gcs_addresses()) - {last})


def _check(address: str, remedy: str) -> None:
    """Raise `DeploymentError` unless a Ray cluster is there that takes this process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise DeploymentError(f"{address!r} is no address of a Ray cluster; write HOST:PORT or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise DeploymentError(f"no Ray cluster at {address}: {error}; {remedy}") from None
    nodes = living_nodes(address)
    if nodes is not None and not any(_is_here(node, host) for node, host in nodes.items()):
        hosts = ", ".join(sorted(set(nodes.values()))) or "dead"
        raise DeploymentError(
            f"this machine is no node of the Ray cluster at {address}, whose nodes are {hosts}: call from one of "
            f"those, or join by `ray start --address={address}`"
        )


def living_nodes(address: str) -> dict[str, str] | None:
    """The addresses of a cluster's living nodes, by id; None if this release of Ray cannot be asked so.

    Raises `DeploymentError`.
    """
    try:
        import grpc
        from ray._private.grpc_utils import init_grpc_channel
        from ray.exceptions import AuthenticationError

        names = ("gcs_pb2", "gcs_service_pb2", "gcs_service_pb2_grpc")  # which have no types
        states, messages, stubs = (cast("Any", importlib.import_module(f"ray.core.generated.{name}")) for name in names)
    except ImportError:
        return None
    read_authentication()
    channel: Any = None
    try:
        channel = init_grpc_channel(address, options=[("grpc.enable_http_proxy", 0)])
        stub = stubs.NodeInfoGcsServiceStub(channel)
        reply = stub.GetAllNodeInfo(messages.GetAllNodeInfoRequest(), timeout=ANSWER_S)
    except grpc.RpcError as error:
        raise _refusal(address, error.code().name, error.details()) from None
    except AuthenticationError as error:
        raise _refusal(address, "UNAUTHENTICATED", str(error)) from None
    finally:
        if channel is not None:
            channel.close()
    alive = states.GcsNodeInfo.GcsNodeState.ALIVE
    living = [node for node in reply.node_info_list if node.state == alive]
    return {node.node_id.hex(): str(node.node_manager_address) for node in living}


def _refusal(address: str, code: str, details: str) -> DeploymentError:
    reason = (details or code).strip().partition("\n")[0].partition(". ")[0]
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return DeploymentError(
            f"the Ray cluster at {address} refuses this process's token: set RAY_AUTH_MODE=token and "
            f"RAY_AUTH_TOKEN_PATH to its token file ({reason})"
        )
    return DeploymentError(f"no Ray cluster at {address}: what listens there does not answer as one ({reason})")


def _is_here(node: str, host: str) -> bool:
    """Whether a node is this machine: it has the address, or a process of the node, which may be known by another."""
    from ray._private import services

    if hasattr(services, "find_node_ids") and node in services.find_node_ids():
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
