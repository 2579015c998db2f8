"""What keeps HTTP from being served is told before anything is started; its servers are no engines."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from support.free_ports import free_ports

from headwise import EngineConfig
from headwise.actors import placement
from headwise.actors.deployment import Deployment
from headwise.actors.fleet import Fleet
from headwise.actors.http_server import check_http_start, http_address
from headwise.actors.restarts import Life
from headwise.actors.role import Role
from headwise.actors.supervisor import Supervisor
from headwise.errors import ConfigError, DeploymentError, ModelError

KEY = "sk-0123456789"


def test_a_taken_port_is_told_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.actors.cluster.Cluster.start", lambda: pytest.fail("Ray was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeploymentError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*choose another --http"):
            Deployment.start(EngineConfig(port=0, http=port))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tp_size": 2, "tp_placement": "any"}, "tp_placement any does not go with device cpu"),
        ({"model": "/no/such/model"}, "/no/such/model"),
    ],
)
def test_what_this_machine_cannot_serve_is_told_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: str
) -> None:
    monkeypatch.setattr("headwise.actors.cluster.Cluster.start", lambda: pytest.fail("Ray was started"))
    monkeypatch.setattr(placement, "gpus_here", lambda: 0)
    with pytest.raises((ConfigError, ModelError), match=error):
        Deployment.start(EngineConfig(port=0, **options))


def test_a_port_that_another_server_would_share_is_taken() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(DeploymentError, match="--http"):
            check_http_start(EngineConfig(http=other.getsockname()[1]))


def test_keys_and_certificates_are_read_before_anything_is_started(tmp_path: Path) -> None:
    port, absent = free_ports(1)[0], str(tmp_path / "absent")
    with pytest.raises(ConfigError, match="api_key_file"):
        check_http_start(EngineConfig(http=port, api_key_file=absent))
    with pytest.raises(ConfigError, match="there is no file"):
        check_http_start(EngineConfig(http=port, http_cert=absent, http_key=absent))
    check_http_start(EngineConfig(http=0, api_key_file=absent))  # nobody reads it


def test_who_listens_to_others_hears_that_http_does_not(caplog: pytest.LogCaptureFixture) -> None:
    port = free_ports(1)[0]
    with caplog.at_level(logging.WARNING, "headwise"):
        check_http_start(EngineConfig(http=port, host="127.0.0.2"))
        assert not caplog.text
        check_http_start(EngineConfig(http=port, host="0.0.0.0"))
    assert "HTTP is served at 127.0.0.1 only: give --api-key-file, or --insecure, for 0.0.0.0" in caplog.text
    assert "only clients by way of the Ray cluster (ray:...) are served" in caplog.text


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, ""),
        ({"http": 80}, "http://127.0.0.1:80"),
        ({"http": 80, "host": "0.0.0.0"}, "http://127.0.0.1:80"),
        ({"http": 80, "host": "0.0.0.0", "api_key": KEY}, "http://node-1:80"),
        ({"http": 443, "http_cert": "c", "http_key": "k"}, "https://127.0.0.1:443"),
    ],
)
def test_where_http_is_served_is_said_as_people_write_it(options: dict[str, Any], address: str) -> None:
    host = "node-1" if options.get("host") == "0.0.0.0" else "127.0.0.1"
    assert http_address(EngineConfig(**options), f"tcp://{host}:8700") == address


class NowhereSite:
    node = address = ""
    nodes = frozenset[str]()


def test_roles_that_the_fleet_did_not_make_are_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "draining_nodes", dict)

    def role(name: str) -> Role:
        return Role("d", name, None, (), NowhereSite(), Life(60.0))

    supervisor = Supervisor()
    supervisor.add(role("http-0"))
    fleet = Fleet(EngineConfig(replicas=2, http=8000), supervisor, lambda name, ranks: role(name))
    fleet.look(0.0)
    assert [engine.name for engine in fleet.engines] == ["engine-0", "engine-1"]
    assert set(supervisor.roles) == {"http-0", "engine-0", "engine-1"}
