"""The addresses at which a deployment's processes listen, and under which others reach them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

from headwise.errors import DeploymentError
from headwise.runtime.config.addresses import is_loopback

T = TypeVar("T")

EVERY_INTERFACE = "0.0.0.0"

_SIOCGIFADDR = 0x8915
"""Of Linux: the address of an interface, netdevice(7)."""


def scheduler_host(host: str, node: str) -> str:
    """Where engines reach a scheduler that listens at ``host`` on the node of Ray's address ``node``."""
    return node if host == EVERY_INTERFACE else host


def client_host(host: str, node: str) -> str:
    """Where clients reach it. A local Ray knows its node by the loopback address only."""
    if host != EVERY_INTERFACE:
        return host
    return outward_address() if is_loopback(node) else node


def endpoint_here(host: str, port: int) -> str:
    """Where processes of its own node reach a scheduler that listens at ``host``."""
    return f"tcp://{'127.0.0.1' if host == EVERY_INTERFACE else host}:{port}"


def endpoint_to(host: str, node: str, port: int, *, is_here: bool) -> str:
    """Where processes reach a scheduler that listens at ``host`` on the node of Ray's address ``node``: those of that
    node (``is_here``), or of others."""
    return endpoint_here(host, port) if is_here else f"tcp://{scheduler_host(host, node)}:{port}"


def engine_host(host: str, node: str) -> str:
    """Where an engine listens on a node of Ray's address ``node``. Clients that reach the scheduler must reach it too.

    With several networks, that is in the network of the scheduler's address ``host``, which may not be Ray's.
    """
    if is_loopback(host):
        return "127.0.0.1"
    if host == EVERY_INTERFACE:
        return client_host(host, node)
    return address_towards(host)


def outward_address() -> str:
    """This machine's address on the way to other networks; the loopback address where there is none."""
    try:
        return address_towards("192.0.2.1")  # reserved for documentation: belongs to no machine
    except DeploymentError:
        return "127.0.0.1"


def address_towards(host: str) -> str:
    """This machine's address on the way to ``host``; nothing is sent. Raises `DeploymentError` if there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DeploymentError(f"no way leads from this node to {host}: {error}; choose another --host") from None


def check_reachable_from_others(host: str, node: str, stages: int = 1) -> None:
    """Raise `DeploymentError` where a deployment's processes on this node, which listen at ``host``, are to be reached
    from other nodes and are not. stages: of the engine's pipeline"""
    if is_loopback(host):
        remedy = f"give fewer than {stages} stages by pipeline_parallel_size" if stages > 1 else "tp_placement to node"
        raise DeploymentError(
            f"the ranks of this engine are on several nodes, and those on others than {node} cannot reach {host}: set "
            f"host to 0.0.0.0, or {remedy}"
        )


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has this IPv4 address; empty: none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def check_reachable(host: str, port: int, patience_s: float) -> None:
    """Return once something listens there; raise `OSError` if nothing can be reached for ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), max(0.1, left)).close()
            return
        except OSError:
            if time.monotonic() >= deadline - 0.1:
                raise
        time.sleep(0.1)


def check_free(host: str, port: int, option: str = "--port (0 takes a free one)") -> None:
    """Raise `DeploymentError` unless ``host`` is an address of this machine and the port is free; 0: any is.

    option: sets the port
    """
    with contextlib.ExitStack() as stack:
        _listen(stack, host, port, option)


def free_ports(*hosts: str) -> list[int]:
    """A free port for each of these addresses; raises `DeploymentError` for one that is not of this machine."""
    with contextlib.ExitStack() as stack:
        return [_listen(stack, host, 0, "") for host in hosts]


def ports_in_turn(ports: range, engine: str) -> list[int]:
    """The order in which an engine tries the ports. Engines of a deployment begin at different ones, so that those on
    different nodes have different ports, too: behind one advertised host nothing else tells them apart.
    """
    number = re.search(r"[0-9]+$", engine)
    first = int(number[0]) % len(ports) if number and ports else 0
    return [*ports[first:], *ports[:first]]


def listen_at_free_port(host: str, node: str, ports: list[int], listen: Callable[[str], T]) -> T:
    """What ``listen`` returns for the first endpoint at ``host`` whose port is free; without ports, for any free port.

    Raises `DeploymentError` if none is free, which names the ``node``.
    """
    import zmq

    if not ports:
        return listen(f"tcp://{host}:*")
    for port in ports:
        try:
            return listen(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise DeploymentError(
        f"none of the ports {min(ports)}-{max(ports)} is free at {host} of node {node}: give more engine_ports"
    )


def _listen(stack: contextlib.ExitStack, host: str, port: int, option: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        taken = stack.enter_context(socket.create_server((host, port), family=family))
    except OSError as error:
        at, remedy = (f"{host}:{port}", f"{option} or --host") if port else (host, "--host")
        raise DeploymentError(f"cannot listen on {at}: {error.strerror}; choose another {remedy}") from None
    return int(taken.getsockname()[1])
