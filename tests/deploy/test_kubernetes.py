"""What `kubectl` makes of deploy/kuberay, against Kubernetes' own schemas.

Tests are skipped where kubectl or kubernetes-validate is not there. `make lint-deploy` installs the second one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.kuberay import SCHEMAS
from support.manifests import KUBERAY, Manifest, base, container, groups, manifests, one, pod

VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: an old one and a new one."""


def render(folder: Path) -> list[Manifest]:
    """The resources of a kustomization, as kubectl would apply them."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture
def kustomize(tmp_path: Path) -> Any:
    """Returns a function: the resources of deploy/kuberay/FOLDER with COMPONENTS of it, and images of a registry."""

    def rendered(folder: str, *components: str) -> list[Manifest]:
        here = Path(os.path.relpath(KUBERAY, tmp_path))
        kustomization = {
            "resources": [str(here / folder)],
            "components": [str(here / name) for name in components],
            "images": [{"name": "headwise", "newName": "registry.example.com/headwise"}],
        }
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return render(tmp_path)

    return rendered


def check_against_kubernetes(resources: list[Manifest]) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate; make lint-deploy installs it")
    for version in VERSIONS:
        for resource in resources:
            if resource["apiVersion"] != "ray.io/v1":
                schemas.validate(resource, version, strict=True)
            elif resource["kind"] == "RayCluster":
                for name, group in groups(resource).items():
                    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}}
                    schemas.validate({**template, "template": group["template"]}, version, strict=True)


def test_the_resources_are_kubernetes_resources() -> None:
    check_against_kubernetes(base())


def test_those_of_the_components_are_too() -> None:
    check_against_kubernetes(manifests(KUBERAY / "shared-files" / "claims.yaml", KUBERAY / "redis" / "redis.yaml"))


def test_a_field_that_pods_do_not_have_is_found() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate; make lint-deploy installs it")
    resources = base()
    pod(groups(one(resources, "RayCluster"))["gpu"])["toleration"] = []
    with pytest.raises(schemas.ValidationError, match="toleration"):
        check_against_kubernetes(resources)


def test_kubectl_renders_the_base_as_it_is_tested(kustomize: Any) -> None:
    cluster = one(kustomize("base"), "RayCluster")
    for group in groups(cluster).values():
        container(group)["image"] = container(group)["image"].removeprefix("registry.example.com/")
    assert cluster == one(base(), "RayCluster")


def test_gpus_are_another_configuration_of_the_same_cluster(kustomize: Any) -> None:
    on_cpus, on_gpus = kustomize("base"), kustomize("gpu")
    (own,) = manifests(KUBERAY / "gpu" / "config.yaml")
    assert one(on_gpus, "ConfigMap")["data"] == own["data"] != one(on_cpus, "ConfigMap")["data"]
    assert [it for it in on_gpus if it["kind"] != "ConfigMap"] == [it for it in on_cpus if it["kind"] != "ConfigMap"]


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_all_parts_go_together(folder: str, kustomize: Any) -> None:
    resources = kustomize(folder, "shared-files", "redis")
    cluster = one(resources, "RayCluster")
    jsonschema.validate(cluster, SCHEMAS["RayCluster"])
    claimed = {it["metadata"]["name"] for it in resources if it["kind"] == "PersistentVolumeClaim"}
    for group in groups(cluster).values():
        volumes = {it["name"]: it.get("persistentVolumeClaim", {}).get("claimName") for it in pod(group)["volumes"]}
        assert {volumes["models"], volumes["blocks"]} == claimed
        assert container(group)["image"].startswith("registry.example.com/headwise:")
    redis = cluster["spec"]["gcsFaultToleranceOptions"]
    service = one(resources, "Service", "redis")
    assert redis["redisAddress"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    password = redis["redisPassword"]["valueFrom"]
    server = one(resources, "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"][0]
    assert server["env"][0]["valueFrom"] == password
    check_against_kubernetes(resources)


def test_the_kustomizations_of_the_docs_are_what_they_say(tmp_path: Path) -> None:
    text = (KUBERAY.parents[1] / "docs" / "kubernetes.md").read_text()
    shutil.copytree(KUBERAY, tmp_path / "deploy" / "kuberay")
    (tmp_path / "mine").mkdir()
    rendered = []
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / "mine" / "kustomization.yaml").write_text(block)
        rendered.append(render(tmp_path / "mine"))
        jsonschema.validate(one(rendered[-1], "RayCluster"), SCHEMAS["RayCluster"])
    on_gpus, small = rendered
    claims = [it["spec"]["storageClassName"] for it in on_gpus if it["kind"] == "PersistentVolumeClaim"]
    assert claims == ["nfs", "nfs"]
    assert {it["metadata"]["namespace"] for it in on_gpus} == {"llm"}
    assert groups(one(small, "RayCluster"))["cpu"]["maxReplicas"] == 1
    assert container(groups(one(small, "RayCluster"))["cpu"])["resources"]["limits"]["memory"] == "5Gi"
