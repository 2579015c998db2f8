"""A Ray cluster on this machine whose autoscaler adds and removes nodes, by Ray's provider of make-believe ones.

The autoscaler, its decisions and its raylets are real; only the machines are this one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from support import ray_head
from support.free_ports import free_ports
from support.waiting import eventually

from headwise.actors.cluster_probe import find_cluster, read_authentication
from headwise.errors import DeploymentError

_ray: Any = ray

_UNUSED = ("auth", "docker", "file_mounts", "head_node", "worker_nodes")
_COMMANDS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"),
)


def _config(address: str, node: Mapping[str, float], most: int, idle_minutes: float) -> dict[str, Any]:
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "gcs_address": address,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    resources = {**node, "object_store_memory": ray_head.OBJECT_STORE_BYTES}
    return {
        "cluster_name": "autoscaled",
        "max_workers": most,
        "idle_timeout_minutes": idle_minutes,
        "upscaling_speed": 1.0,
        "provider": provider,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        **{name: {} for name in _UNUSED},
        **{name: [] for name in _COMMANDS},
    }


@contextmanager
def autoscaled(
    head: Mapping[str, float], node: Mapping[str, float], most: int, idle_minutes: float = 0.1
) -> Iterator[str]:
    """The address of a cluster whose head has these custom resources, and that adds at most so many of these nodes; at
    the end this process leaves it, too."""
    temp = Path(tempfile.mkdtemp(prefix="hwa", dir="/tmp"))  # the paths of sockets in it must be short
    ports = free_ports(3)
    address = f"127.0.0.1:{ports[0]}"
    config = temp / "autoscaling.json"
    config.write_text(json.dumps(_config(address, node, most, idle_minutes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        read_authentication()
        process = ray_head.start(
            "--head",
            "--node-ip-address=127.0.0.1",
            f"--port={ports[0]}",
            f"--ray-client-server-port={ports[1]}",
            f"--dashboard-agent-listen-port={ports[2]}",
            "--include-dashboard=false",
            "--num-cpus=1",
            "--num-gpus=0",
            f"--resources={json.dumps(head)}",
            f"--autoscaling-config={config}",
            f"--temp-dir={temp}",
            environment={"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"},
        )
        try:
            eventually(lambda: _is_up(address))
            yield address
        finally:
            _ray.shutdown()
            ray_head.end(process, temp)
            shutil.rmtree(temp, ignore_errors=True)


def _is_up(address: str) -> bool:
    try:
        return find_cluster(address) == address
    except DeploymentError:
        return False
