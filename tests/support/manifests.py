"""Kubernetes manifests, read as the tests of deploy/ need them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERAY = DEPLOY / "kuberay"
Manifest = dict[str, Any]

UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def pins(device: str) -> dict[str, str]:
    """The versions that the image for ``device`` has, by name."""
    lines = (DEPLOY / f"requirements-{device}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


RAY = pins("cpu")["ray"]
"""The version that everything in deploy/ is of. What is installed here may be a newer one."""


def quantity(text: str) -> float:
    """A Kubernetes quantity, such as 500m or 16Gi, as a number."""
    number = re.match(r"[\d.]*", text)[0]
    return float(number) * UNITS[text.removeprefix(number)]


def manifests(*paths: Path) -> list[Manifest]:
    return [manifest for path in paths for manifest in yaml.safe_load_all(path.read_text())]


def base() -> list[Manifest]:
    """The resources of deploy/kuberay/base, in the order of its kustomization."""
    folder = KUBERAY / "base"
    (kustomization,) = manifests(folder / "kustomization.yaml")
    return manifests(*(folder / name for name in kustomization["resources"]))


def one(of: list[Manifest], kind: str, name: str = "headwise") -> Manifest:
    (found,) = (it for it in of if it["kind"] == kind and it["metadata"]["name"] == name)
    return found


def groups(cluster: Manifest) -> dict[str, Manifest]:
    """The head's group and those of workers, by name."""
    workers = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    return {"head": cluster["spec"]["headGroupSpec"], **workers}


def pod(group: Manifest) -> Manifest:
    spec: Manifest = group["template"]["spec"]
    return spec


def container(group: Manifest) -> Manifest:
    """Ray's, which KubeRay takes to be the first."""
    first: Manifest = pod(group)["containers"][0]
    return first
