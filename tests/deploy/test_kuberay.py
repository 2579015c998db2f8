"""What deploy/kuberay gives to Kubernetes, against KubeRay's fields, Ray's autoscaler, and what headwise needs."""

from __future__ import annotations

import shlex
from typing import Any

import jsonschema
import pytest
import yaml
from ray._private import ray_constants
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from support.kuberay import SCHEMAS
from support.manifests import KUBERAY, RAY, Manifest, base, container, groups, manifests, one, pod, quantity

import headwise
from headwise.actors.demand import ENGINE_CPUS, WORKER_CPUS
from headwise.runtime.config.engine_config import EngineConfig
from headwise.units import parse_bytes

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
MIB = 2**20
SHARED_MEMORY_OF_A_RANK = 8 * MIB
PROCESSES_OF_AN_ENGINE = 1024 * MIB
"""What the engine's and a worker's Python and libraries take, generously."""
WEIGHTS = {"smollm2-135m": 135e6 * 4}
"""Bytes of float32 weights, of the models in the configurations."""


def cluster() -> Manifest:
    return one(base(), "RayCluster")


def served(folder: str) -> EngineConfig:
    """What `headwise serve` reads in the head pod."""
    (manifest,) = manifests(KUBERAY / folder / "config.yaml")
    path = shlex.split(one(base(), "RayJob")["spec"]["entrypoint"])[-1]
    return EngineConfig.from_dict(yaml.safe_load(manifest["data"][path.rpartition("/")[2]]))


def volume(group: Manifest, path: str) -> Manifest:
    """The volume that is mounted at ``path``."""
    (mounted,) = (mount["name"] for mount in container(group)["volumeMounts"] if mount["mountPath"] == path)
    (found,) = (it for it in pod(group)["volumes"] if it["name"] == mounted)
    return found


def test_resources_have_fields_that_kuberay_knows() -> None:
    for manifest in base():
        if manifest["apiVersion"] == "ray.io/v1":
            jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])


def test_a_field_that_kuberay_does_not_know_is_found() -> None:
    changed = cluster()
    changed["spec"]["workerGroupSpecs"][0]["idleTimeout"] = 60
    with pytest.raises(jsonschema.ValidationError, match="idleTimeout"):
        jsonschema.validate(changed, SCHEMAS["RayCluster"])


def test_rays_autoscaler_reads_the_groups_as_they_are_meant() -> None:
    """Its own code makes node types of them, and checks these against Ray's schema."""
    resource = cluster()
    resource["metadata"]["namespace"] = "default"
    config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(resource)
    types = config["available_node_types"]
    assert config["idle_timeout_minutes"] == 10
    assert types["headgroup"]["resources"]["CPU"] == 0, "engines are not to run beside the scheduler"
    gpus = {name: node_type["resources"].get("GPU", 0) for name, node_type in types.items()}
    assert gpus == {"headgroup": 0, "cpu": 0, "gpu": 1}
    for name in ("cpu", "gpu"):
        assert types[name]["resources"]["CPU"] >= ENGINE_CPUS + WORKER_CPUS
        assert types[name]["min_workers"] == 0 < types[name]["max_workers"]


def test_pods_are_as_the_second_autoscaler_wants_them() -> None:
    """KubeRay refuses restarts of pods with it, and its setting in two places."""
    spec = cluster()["spec"]
    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    for group in groups(cluster()).values():
        assert pod(group)["restartPolicy"] == "Never"
        assert "RAY_enable_autoscaler_v2" not in {env["name"] for env in container(group).get("env", [])}


def test_a_pod_that_ends_has_the_time_to_drain() -> None:
    assert ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S > 0, "this Ray does not drain on SIGTERM"
    for name, group in groups(cluster()).items():
        env = {variable["name"]: variable["value"] for variable in container(group).get("env", [])}
        drain_s = float(env.get(DRAIN, ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S))
        assert (DRAIN in env) == (name != "head")
        assert 0 < drain_s <= pod(group)["terminationGracePeriodSeconds"] - 20, "Ray's processes end after that"


def test_every_pod_may_do_as_little_as_possible() -> None:
    for group in groups(cluster()).values():
        assert pod(group)["securityContext"]["runAsNonRoot"] is True
        assert container(group)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_the_configuration_is_valid_and_fits_the_cluster(folder: str) -> None:
    config = served(folder)
    ports = {port["name"]: port for port in one(base(), "Service")["spec"]["ports"]}
    head = container(groups(cluster())["head"])
    assert config.host == "0.0.0.0"
    assert config.http_host == config.host, "HTTP is served to other pods, too"
    for name, served_at in (("headwise", config.port), ("http", config.http)):
        assert served_at == ports[name]["port"] == ports[name]["targetPort"]
        assert served_at in {it["containerPort"] for it in head["ports"]}
    assert config.device == {"base": "cpu", "gpu": "cuda"}[folder]
    for group in groups(cluster()).values():
        assert "emptyDir" in volume(group, config.cache_dir)
        assert "emptyDir" in volume(group, config.storage.removeprefix("file://").partition("?")[0])


def test_the_head_reads_the_configuration_that_the_job_names() -> None:
    path = shlex.split(one(base(), "RayJob")["spec"]["entrypoint"])[-1]
    folder, _, name = path.rpartition("/")
    mounted = volume(groups(cluster())["head"], folder)["configMap"]["name"]
    assert name in one(base(), "ConfigMap", mounted)["data"]


def test_the_memory_of_a_cpu_pod_covers_all_engines_that_ray_may_put_there() -> None:
    config, group = served("base"), groups(cluster())["cpu"]
    engines = int(int(group["rayStartParams"]["num-cpus"]) / (ENGINE_CPUS + config.tp_size * WORKER_CPUS))
    worker = parse_bytes(config.kv_cache) + parse_bytes(config.host_cache)
    needed = engines * (config.tp_size * worker + WEIGHTS[config.model] + PROCESSES_OF_AN_ENGINE)
    needed += quantity(volume(group, "/dev/shm")["emptyDir"]["sizeLimit"])
    limits = container(group)["resources"]["limits"]
    assert engines == 3
    assert needed <= quantity(limits["memory"])
    assert config.cpu_threads * engines * config.tp_size <= quantity(limits["cpu"])


def test_the_memory_of_a_gpu_pod_covers_its_host_cache() -> None:
    config, group = served("gpu"), groups(cluster())["gpu"]
    memory = quantity(container(group)["resources"]["limits"]["memory"])
    assert parse_bytes(config.host_cache) + 4 * PROCESSES_OF_AN_ENGINE < memory


@pytest.mark.parametrize("name", ["head", "cpu", "gpu"])
def test_shared_memory_is_for_rays_objects_and_for_ranks(name: str) -> None:
    group = groups(cluster())[name]
    shared = volume(group, "/dev/shm")["emptyDir"]
    left = quantity(shared["sizeLimit"]) - int(group["rayStartParams"]["object-store-memory"])
    assert shared["medium"] == "Memory"
    assert left >= 8 * SHARED_MEMORY_OF_A_RANK


def test_limits_are_what_is_requested() -> None:
    """What a pod may take and did not request, its node may not have."""
    for group in groups(cluster()).values():
        resources = container(group)["resources"]
        assert resources["limits"] == resources["requests"]


def test_files_fit_their_volume() -> None:
    config = served("base")
    path, _, capacity = config.storage.removeprefix("file://").partition("?capacity=")
    for group in groups(cluster()).values():
        assert parse_bytes(capacity) < quantity(volume(group, path)["emptyDir"]["sizeLimit"])


def test_selectors_name_pods_that_kuberay_makes() -> None:
    """It labels them with the cluster's name and the type of node."""
    name = cluster()["metadata"]["name"]
    budgets = [it for it in base() if it["kind"] == "PodDisruptionBudget"]
    selectors = [budget["spec"]["selector"]["matchLabels"] for budget in budgets]
    selectors.append(one(base(), "Service")["spec"]["selector"])
    assert {selector["ray.io/cluster"] for selector in selectors} == {name}
    assert [selector["ray.io/node-type"] for selector in selectors] == ["head", "worker", "head"]
    assert one(base(), "RayJob")["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    for budget in budgets:
        assert set(budget["spec"]) == {"minAvailable", "selector"}, "the others need a controller that has a scale"


def test_pods_run_our_image_with_this_ray_and_this_headwise() -> None:
    assert cluster()["spec"]["rayVersion"] == RAY
    images = {name: container(group)["image"] for name, group in groups(cluster()).items()}
    tag = f"headwise:{headwise.__version__}-ray{RAY}-py311"
    assert images == {"head": f"{tag}-cpu", "cpu": f"{tag}-cpu", "gpu": f"{tag}-gpu"}
