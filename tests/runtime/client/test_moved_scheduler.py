"""A client that can ask where the scheduler is finds one that has moved, and its questions are answered there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.passing_on import PortForward

from headwise.runtime.client import client as client_module
from headwise.runtime.client import io_thread, locator
from headwise.runtime.client.client import Client


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    deployment = Deployment()
    deployment.add_engine(ScriptedCore())
    yield deployment
    deployment.close()


def test_a_client_that_can_ask_finds_the_scheduler_at_its_new_address(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = deployment.address.rpartition(":")
    before = PortForward(host, int(port))
    addresses = [before.address, before.address, f"tcp://{deployment.address}"]  # where it is not known at once
    monkeypatch.setattr(
        client_module, "_resolve", lambda _: (addresses.pop(0) if addresses[1:] else addresses[0], None)
    )
    for module in (locator, io_thread):
        monkeypatch.setattr(module, "LOCATE_S", 0.05)
    with Client("ray:auto") as client:
        before.close()  # as when its machine is lost: it says no last words
        assert client.generate("abc", max_tokens=2).usage.completion_tokens == 2
        assert client.stats()["engines"]
