"""A deployment of this process, and its one engine once a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    deployment = Deployment()
    yield deployment
    deployment.close()


@pytest.fixture(scope="module")
def core(deployment: Deployment) -> ScriptedCore:
    core = ScriptedCore()
    deployment.add_engine(core)
    return core
