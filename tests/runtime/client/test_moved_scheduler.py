"""A client that can ask where the scheduler is finds one that has moved, and its questions are answered there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.free_ports import free_ports
from support.passing_on import PortForward
from support.waiting import eventually

from headwise.runtime.client import client as client_module
from headwise.runtime.client import connections, locator
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
    for module in (locator, connections):
        monkeypatch.setattr(module, "LOCATE_S", 0.05)
    with Client("ray:auto") as client:
        before.close()  # as when its machine is lost: it says no last words
        assert client.generate("abc", max_tokens=2).usage.completion_tokens == 2
        assert client.stats()["engines"]


def test_a_client_that_is_told_where_the_scheduler_will_be_waits_for_it_there(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REFUSED_S", 0.0)
    host, _, port = deployment.address.rpartition(":")
    before, later = PortForward(host, int(port)), free_ports(1)[0]
    with Client(before.address) as client, ThreadPoolExecutor() as pool:
        client.follow(f"127.0.0.1:{later}")
        before.close()
        asked = pool.submit(client.generate, "abc", max_tokens=2)
        scheduler = client._io._connections.scheduler
        eventually(lambda: scheduler.refused_s(time.monotonic()) > 0.0)
        client.follow(deployment.address)
        assert asked.result().usage.completion_tokens == 2
