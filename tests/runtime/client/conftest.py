"""A deployment over real sockets whose model is scripted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    deployment = Deployment()
    yield deployment
    deployment.close()


@pytest.fixture
def core(deployment: Deployment) -> ScriptedCore:
    core = ScriptedCore()
    deployment.add_engine(core)
    return core
