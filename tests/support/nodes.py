"""Ray nodes on one machine that are as far apart as on several: each in a network namespace of its own.

A node has an address that no other has, and reaches the others through a bridge. So it can be cut off, stopped and
killed with everything that runs on it. Making namespaces needs root's rights on Linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
from support import ray_head
from support.free_ports import free_ports
from support.waiting import PATIENCE_S, eventually

from headwise import EngineConfig
from headwise.actors.cluster_probe import find_cluster, living_nodes, read_authentication
from headwise.errors import DeploymentError

_ray: Any = ray

_HEAD_PORTS = ("port", "ray-client-server-port", "dashboard-agent-listen-port")
"""Which Ray gives fixed numbers. The head is beside whatever else this machine runs."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and those that these have."""
    done = subprocess.run(["pgrep", "--parent", str(pid)], check=False, capture_output=True, text=True)
    children = [int(line) for line in done.stdout.split()]
    return [*children, *(each for child in children for each in descendants(child))]


@cache
def why_not() -> str:
    """Why this machine cannot have such nodes; empty: it can."""
    if not shutil.which("ip"):
        return "there is no `ip` (iproute2)"
    name = f"hwtry{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", name[:15], "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {str(error.stderr).strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", name[:15]], check=False, capture_output=True)
    return ""


NODE_MARKS = [
    pytest.mark.soak,
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.skipif(bool(why_not()), reason=f"no nodes with addresses of their own: {why_not()}"),
]
"""Of tests with such nodes."""

DETACHED = EngineConfig(
    port=0,
    host="0.0.0.0",
    replicas=2,
    engine_resources="engine=1",
    max_model_len=512,
    kv_cache="64MiB",
    block_size=16,
    cpu_threads=1,
    dtype="float32",
    weights_dtype="gguf",  # `sure_answers` in a third of the time
    engine_timeout_s=60.0,
    front_timeout_s=60.0,
    index_timeout_s=5.0,
    drain_timeout_s=PATIENCE_S,
)
"""A deployment that is left to such a cluster, whose nodes take an engine each."""


@dataclass(eq=False)
class Node:
    """A Ray node, and everything that runs on it.

    address: its own, in a network of the test's own
    link:    the bridge's end of its cable
    """

    name: str
    address: str
    link: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def pids(self) -> list[int]:
        """All processes of its namespace."""
        done = subprocess.run(["ip", "netns", "pids", self.name], check=False, capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def signal(self, number: int) -> list[int]:
        """Send a signal to all of them; those that there were."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def kill(self) -> None:
        """As when its power fails; but its address goes on to answer that nothing listens."""
        while self.signal(signal.SIGKILL):
            time.sleep(0.05)
        for process in self.processes:
            process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """All of it stands still meanwhile."""
        pids = self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Its cable is pulled out meanwhile: what is sent is lost, and no connection is refused or closed."""
        run("ip", "link", "set", self.link, "down")
        try:
            yield
        finally:
            run("ip", "link", "set", self.link, "up")


def _over(directory: Path) -> list[str]:
    """What a command begins with that sees another directory there; in a mount namespace of its own."""
    return ["sh", "-c", f'mount -t tmpfs none {directory} && exec "$@"', "sh"]


def _is_raylet(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].endswith(b"/raylet")
    except OSError:
        return False


class Nodes:
    """A Ray cluster: a head without room for engines, in this process's own namespace, and nodes to be added.

    address:    ``HOST:PORT`` of the cluster
    other_host: another address of the head's machine
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        number = os.getpid()
        self._prefix = f"hw{number % 10**8}"
        self._network = f"10.{64 + number % 128}.{number // 128 % 256}"
        self._temp = Path(tempfile.mkdtemp(prefix="hwn", dir="/tmp"))  # the paths of sockets in it must be short
        self._bridge = f"{self._prefix}br"
        self._nodes: list[Node] = []
        self._count = 0
        self.host, self.other_host = f"{self._network}.1", f"{self._network}.254"
        self._ports = dict(zip(_HEAD_PORTS, free_ports(len(_HEAD_PORTS)), strict=True))
        self.address = f"{self.host}:{self._ports['port']}"
        self._head: list[subprocess.Popen[bytes]] = []
        self._environment = environment or {}

    @classmethod
    @contextmanager
    def started(cls, environment: Mapping[str, str] | None = None) -> Iterator[Nodes]:
        """A head and no other nodes yet, all with these variables; at the end this process leaves the cluster, too."""
        nodes = cls(environment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "disabled")
            read_authentication()
            try:
                nodes._connect()
                nodes.start_head()
                yield nodes
            finally:
                _ray.shutdown()
                nodes._close()

    def _connect(self) -> None:
        run("ip", "link", "add", self._bridge, "type", "bridge")
        for host in (self.host, self.other_host):
            run("ip", "address", "add", f"{host}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")

    def start_head(self, host: str = "") -> None:
        """Once more, after `kill_head`: with the same variables, and another address for its own node: Ray thinks a
        head at this one runs already, since the other nodes, which know it, are on this machine, too.
        """
        ports = [f"--{name}={port}" for name, port in self._ports.items()]
        place = f"--node-ip-address={host or self.host}", f"--temp-dir={self._temp}"
        options = ("--head", "--num-cpus=0", "--include-dashboard=false", *ports, *place)
        self._head.append(ray_head.start(*options, environment=self._environment))
        eventually(self._is_up)

    def kill_head(self) -> None:
        """As when its machine fails: Ray's control service is gone."""
        process = self._head.pop()
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()

    def _is_up(self) -> bool:
        try:
            return find_cluster(self.address) == self.address
        except DeploymentError:
            return False

    def add(self, own: Path | None = None, **resources: int) -> Node:
        """A node of one CPU, so many GPUs, as ``GPU``, and these custom resources, once it has joined: two of one
        machine that start at once would take the same names for their sockets.

        own: a directory of which it has another one, empty, in memory
        """
        gpus = resources.pop("GPU", 0)
        self._count += 1
        number = self._count
        node = Node(f"{self._prefix}n{number}", f"{self._network}.{number + 1}", f"{self._prefix}v{number}")
        self._nodes.append(node)
        inside, peer = ("ip", "-n", node.name), f"{self._prefix}p{number}"
        run("ip", "netns", "add", node.name)
        run("ip", "link", "add", node.link, "type", "veth", "peer", "name", peer, "netns", node.name)
        run("ip", "link", "set", node.link, "master", self._bridge, "up")
        run(*inside, "address", "add", f"{node.address}/24", "dev", peer)
        run(*inside, "link", "set", peer, "up")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "route", "add", "default", "via", self.host)  # by which Ray finds out a machine's address
        node.processes.append(
            ray_head.start(
                f"--address={self.address}",
                "--num-cpus=1",
                f"--num-gpus={gpus}",
                f"--resources={json.dumps(resources)}",
                f"--node-ip-address={node.address}",
                prefix=["ip", "netns", "exec", node.name, *([] if own is None else _over(own))],
                environment=self._environment,
            )
        )
        eventually(lambda: node.address in (living_nodes(self.address) or {}).values())
        return node

    def at(self, address: str) -> Node:
        """The node of this address."""
        found = [node for node in self._nodes if node.address == address]
        assert found, f"{address} is none of {[node.address for node in self._nodes]}"
        return found[0]

    def kill_all(self) -> None:
        """All but the head; returns when Ray knows."""
        for node in self._nodes:
            node.kill()
        eventually(lambda: len(living_nodes(self.address) or {}) == 1, otherwise=lambda: living_nodes(self.address))

    def on(self, node: Node, *command: str) -> list[str]:
        """A command as it is to be run on this node. Ray looks for its node among all processes of a machine, and likes
        heads best: those of others are hidden.
        """
        others = {pid for process in self._head for pid in descendants(process.pid)}
        others |= {pid for each in self._nodes if each is not node for pid in each.pids()}
        hidden = [f"mount -t tmpfs none /proc/{pid} && " for pid in sorted(others) if _is_raylet(pid)]
        return ["ip", "netns", "exec", node.name, "sh", "-c", f'{"".join(hidden)}exec "$@"', "sh", *command]

    def _close(self) -> None:
        """End everything, and take the network down."""
        for node in self._nodes:
            node.kill()
            subprocess.run(["ip", "netns", "delete", node.name], check=False, capture_output=True)
        for process in self._head:
            ray_head.end(process, self._temp)
        subprocess.run(["ip", "link", "delete", self._bridge], check=False, capture_output=True)
        shutil.rmtree(self._temp, ignore_errors=True)
