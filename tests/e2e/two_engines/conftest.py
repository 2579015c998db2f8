"""One deployment for all files of this directory, which one worker runs in their order; each leaves two engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.collector import Collector
from support.lora import write_adapter_of
from support.two_engines import KEY, MODEL, config

from headwise import Client, ClientKeys
from headwise.actors.deployment import Deployment


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Deployment]:
    """On a Ray cluster of its own, whose token authentication is told by variables."""
    directory = tmp_path_factory.mktemp("two_engines")
    token = directory / "token"
    token.write_text("0123456789abcdef" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        with Deployment.start(
            config(directory / "keys", collector.url, write_adapter_of(MODEL, directory / "adapter"))
        ) as deployment:
            yield deployment


@pytest.fixture(scope="package")
def keys(deployment: Deployment) -> ClientKeys:
    assert deployment.client_keys is not None
    return ClientKeys(deployment.client_keys.server, KEY)


@pytest.fixture(scope="module")
def client(deployment: Deployment, keys: ClientKeys) -> Iterator[Client]:
    with Client(deployment.client_address, keys=keys) as client:
        yield client
