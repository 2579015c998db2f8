from __future__ import annotations

import socket

import pytest

from headwise.actors import addresses
from headwise.actors.addresses import (
    check_free,
    check_reachable,
    client_host,
    engine_host,
    free_ports,
    interface_of,
    listen_at_free_port,
    ports_in_turn,
    scheduler_host,
)
from headwise.errors import DeploymentError
from headwise.runtime.engine.server import EngineServer
from headwise.sockets import context


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of two networks: Ray's address is 10.0.0.5, clients come by 172.16.0.5."""
    monkeypatch.setattr(addresses, "address_towards", lambda host: "172.16.0.5" if "172" in host else "10.0.0.5")


@pytest.mark.usefixtures("routes")
@pytest.mark.parametrize(
    ("host", "node", "scheduler", "clients", "engine"),
    [
        ("127.0.0.1", "10.0.0.5", "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "10.0.0.5", "127.0.0.2", "127.0.0.2", "127.0.0.1"),
        ("localhost", "127.0.0.1", "localhost", "localhost", "127.0.0.1"),
        ("0.0.0.0", "10.0.0.5", "10.0.0.5", "10.0.0.5", "10.0.0.5"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1", "10.0.0.5", "10.0.0.5"),
        ("10.0.0.5", "10.0.0.5", "10.0.0.5", "10.0.0.5", "10.0.0.5"),
        ("172.16.0.5", "10.0.0.5", "172.16.0.5", "172.16.0.5", "172.16.0.5"),
        ("172.16.0.5", "127.0.0.1", "172.16.0.5", "172.16.0.5", "172.16.0.5"),
    ],
)
def test_engines_are_told_an_address_at_which_the_scheduler_listens_and_listen_where_clients_come_from(
    host: str, node: str, scheduler: str, clients: str, engine: str
) -> None:
    assert scheduler_host(host, node) == scheduler
    assert client_host(host, node) == clients
    assert engine_host(host, node) == engine


def test_an_address_of_this_machine_is_reached_from_itself() -> None:
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"
    own = addresses.outward_address()
    assert addresses.address_towards(own) == own


def test_a_port_that_is_taken_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeploymentError, match=rf"127\.0\.0\.1:{port}.*in use.*--port"):
            check_free("127.0.0.1", port)
        check_reachable("127.0.0.1", port, patience_s=0.0)
    check_free("127.0.0.1", port)
    check_free("127.0.0.1", 0)
    with pytest.raises(OSError, match="refused"):
        check_reachable("127.0.0.1", port, patience_s=0.0)


@pytest.mark.parametrize("port", [0, 8700])
def test_an_address_that_is_not_this_machine_s_is_told(port: int) -> None:
    with pytest.raises(DeploymentError, match=r"cannot listen on 192\.0\.2\.77.*--host"):
        check_free("192.0.2.77", port)


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


def test_ranks_of_several_nodes_are_refused_where_only_their_own_node_hears_them() -> None:
    addresses.check_reachable_from_others("0.0.0.0", "10.0.0.5")
    with pytest.raises(DeploymentError, match=r"than 10.0.0.5 cannot reach 127.0.0.1: set host to 0.0.0.0, or tp_pl"):
        addresses.check_reachable_from_others("127.0.0.1", "10.0.0.5")


def test_free_ports_are_different_ones() -> None:
    ports = free_ports("127.0.0.1", "127.0.0.1", "0.0.0.0")
    assert len(set(ports)) == 3


# ---- engines' ports ----


def test_engines_begin_at_ports_of_their_own() -> None:
    ports = range(9000, 9003)
    assert ports_in_turn(ports, "engine-0") == [9000, 9001, 9002]
    assert ports_in_turn(ports, "engine-1") == [9001, 9002, 9000]
    assert ports_in_turn(ports, "engine-13") == [9001, 9002, 9000]
    assert ports_in_turn(ports, "other") == [9000, 9001, 9002]
    assert ports_in_turn(range(0), "engine-3") == []


def test_engines_of_a_node_take_the_free_ports_of_their_range_and_the_one_too_many_is_told() -> None:
    taken, first, second = free_ports("127.0.0.1", "127.0.0.1", "127.0.0.1")
    ports, engines, is_open = [taken, first, second], [], context.num_open()
    with socket.create_server(("127.0.0.1", taken)):
        try:
            engines += [listen_at_free_port("127.0.0.1", "10.0.0.5", ports, EngineServer) for _ in range(2)]
            assert [engine.endpoint for engine in engines] == [f"tcp://127.0.0.1:{port}" for port in (first, second)]
            none = (
                rf"none of the ports {min(ports)}-{max(ports)} is free at 127\.0\.0\.1 of node 10\.0\.0\.5: give more"
            )
            with pytest.raises(DeploymentError, match=none):
                listen_at_free_port("127.0.0.1", "10.0.0.5", ports, EngineServer)
        finally:
            for engine in engines:
                engine.stop()
    assert context.num_open() == is_open


def test_without_a_range_any_port_is_taken() -> None:
    engine = listen_at_free_port("127.0.0.1", "10.0.0.5", [], EngineServer)
    assert int(engine.endpoint.rpartition(":")[2]) > 0
    engine.stop()
