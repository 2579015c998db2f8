"""The cluster files for `ray up`, against what Ray itself makes of them; no cloud is asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from support.manifests import DEPLOY, RAY

from headwise.actors.demand import ENGINE_CPUS, WORKER_CPUS

FILES = sorted((DEPLOY / "ray").glob("*.yaml"))
CLOUDS = [path for path in FILES if path.stem != "on-premise"]


def named(path: Path) -> str:
    return path.stem


def prepared(path: Path) -> dict[str, Any]:
    """The file as `ray up` reads it: with Ray's defaults for its provider, and checked against Ray's schema."""
    config: dict[str, Any] = prepare_config(yaml.safe_load(path.read_text()))
    validate_config(config)
    return config


def commands(config: dict[str, Any]) -> list[str]:
    """All commands that are run on nodes, those of single node types included."""
    own = [node_type.get("worker_setup_commands", []) for node_type in config["available_node_types"].values()]
    common = [value for key, value in config.items() if key.endswith("_commands")]
    return [command for listed in own + common for command in listed]


def test_there_is_a_file_for_each_provider() -> None:
    assert {path.stem: prepared(path)["provider"]["type"] for path in FILES} == {
        "aws": "aws",
        "gcp": "gcp",
        "on-premise": "local",
    }


def test_ray_refuses_an_unknown_key() -> None:
    config = yaml.safe_load(FILES[0].read_text())
    config["available_node_types"]["worker"]["idle_timeout"] = 3
    with pytest.raises(Exception, match="idle_timeout"):
        validate_config(prepare_config(config))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_node_installs_the_working_tree_and_the_same_ray(path: Path) -> None:
    config = prepared(path)
    (mounted,) = config["file_mounts"]
    assert config["file_mounts"][mounted] == "."
    assert ".gitignore" in config["rsync_filter"], "the local environment would be copied to each node"
    installs = [command for command in commands(config) if "~/headwise-source" in command and "ray[" in command]
    assert len(installs) >= 3, "setup commands of the head and of workers, and those of them together"
    versions = {version for command in installs for version in re.findall(r"'ray\[default\]==([\d.]+)'", command)}
    assert versions == {RAY}, "another Ray than the image's"
    assert mounted.rpartition("/")[2] == "headwise-source"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_nothing_of_rays_default_commands_is_left(path: Path) -> None:
    """They install a nightly Ray, or start one that is not in our environment."""
    used = "\n".join(commands(prepared(path)))
    assert "ray-wheels" not in used
    starts = re.findall(r"^export PATH=~/headwise-venv/bin:\$PATH;.* ray start", used, re.MULTILINE)
    assert len(starts) == used.count("ray start") == 2


@pytest.mark.parametrize("path", CLOUDS, ids=named)
def test_each_type_of_worker_has_room_for_a_replica_and_the_head_has_none(path: Path) -> None:
    config = prepared(path)
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert head["resources"] == {"CPU": 0}
    for node_type in types.values():
        assert node_type["resources"]["CPU"] >= ENGINE_CPUS + WORKER_CPUS
        assert node_type["min_workers"] == 0 < node_type["max_workers"] <= config["max_workers"]
    assert types["gpu"]["resources"]["GPU"] >= 1
    assert any("[gpu]" in command for command in types["gpu"]["worker_setup_commands"])


def test_of_machines_that_one_has_all_are_used() -> None:
    config = prepared(next(path for path in FILES if path.stem == "on-premise"))
    (node_type,) = config["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(config["provider"]["worker_ips"])
