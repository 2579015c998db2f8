"""deploy/Dockerfile: what it copies is let through, and what it installs is what pyproject.toml asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support.manifests import RAY, pins

import headwise

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def asked_for(*extras: str) -> list[Requirement]:
    optional = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*PROJECT["dependencies"], *optional]]


@pytest.mark.parametrize(("device", "extras"), [("cpu", ["hub"]), ("gpu", ["hub", "gpu"])])
def test_the_image_has_all_that_pyproject_asks_for(device: str, extras: list[str]) -> None:
    pinned = pins(device)
    for requirement in asked_for(*extras):
        version = pinned[requirement.name.replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement.name} {version}: make the file anew"


def test_both_images_differ_in_what_gpus_need_only() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    assert cpu.items() <= gpu.items()
    assert all(re.match("cuda|cupy|nvidia|triton|ml-dtypes", name) for name in gpu.keys() - cpu.keys())


def test_versions_are_those_of_the_tag() -> None:
    text = DOCKERFILE.read_text()
    (python,) = re.findall(r"^ARG PYTHON_VERSION=([\d.]+)$", text, re.MULTILINE)
    tags = re.findall(r"-t (headwise:\S+)", text)
    tag = f"headwise:{headwise.__version__}-ray{RAY}-py{python.replace('.', '')}"
    assert tags == [f"{tag}-cpu", f"{tag}-gpu"]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    assert f"--python-version {python}" in (ROOT / "deploy" / "requirements-cpu.txt").read_text()


@pytest.mark.parametrize("page", ["clusters", "kubernetes"])
def test_docs_name_the_same_versions(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    rays = re.findall(r"ray(?:\[default\]==)?(\d+\.\d+\.\d+)", text)
    headwises = re.findall(r"headwise:(\d+\.\d+\.\d+)", text)
    assert set(rays) == {RAY}
    assert set(headwises) <= {headwise.__version__}


def test_what_is_copied_is_let_through_and_nothing_else() -> None:
    copies = re.findall(r"^COPY (.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    copied = {name for line in copies for name in line.split()}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    assert copied == {"deploy/requirements-${DEVICE}.txt", "pyproject.toml", "README.md", "LICENSE", "headwise"}
    assert let_through == {name.replace("${DEVICE}", "*") for name in copied} | {"deploy"}
    assert ignored.index("!deploy") < ignored.index("deploy/*") < ignored.index("!deploy/requirements-*.txt")


def test_nothing_runs_as_root() -> None:
    instructions = re.findall(r"^([A-Z]+) (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    names = [name for name, _ in instructions]
    assert dict(instructions)["USER"] == "1000:1000", "as deploy/kuberay says"
    assert names.index("USER") > max(place for place, name in enumerate(names) if name in ("RUN", "COPY"))


def test_hadolint_finds_nothing() -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (hadolint := shutil.which("hadolint", path=path)) is None:
        pytest.skip("no hadolint; make lint-deploy installs it")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
