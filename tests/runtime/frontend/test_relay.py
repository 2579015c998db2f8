"""The relay in the scheduler's port, over real sockets on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from support.free_ports import free_ports
from support.socks import ACCEPTED, HELLO, ask, told
from support.waiting import PATIENCE_S, eventually

from headwise.runtime.frontend import relay as relay_module
from headwise.runtime.frontend import tcp_proxy as tcp_proxy_module
from headwise.runtime.frontend.tcp_proxy import TcpProxy
from headwise.sockets.socks import Reply

TOLD = "tcp://engine.example:7000"
"""What clients are told of the engine's address."""


@pytest.fixture
def engine() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as engine:
        engine.settimeout(PATIENCE_S)
        yield engine


@pytest.fixture
def proxy(engine: socket.socket) -> Iterator[TcpProxy]:
    proxy = TcpProxy("127.0.0.1", 0)
    proxy.relay.allow(TOLD, f"tcp://127.0.0.1:{engine.getsockname()[1]}")
    proxy.start(free_ports(1)[0])
    yield proxy
    proxy.close()


def say(proxy: TcpProxy, *pieces: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)
    for piece in pieces:
        connection.sendall(piece)
    return connection


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


# ---- to an engine ----


def test_a_connection_leads_to_the_engine_both_ways_in_whole(proxy: TcpProxy, engine: socket.socket) -> None:
    outside = say(proxy, HELLO, ask("engine.example", 7000))
    inside, _ = engine.accept()
    assert read(outside, 12) == ACCEPTED + told(Reply.SUCCEEDED)
    data = bytes(range(256)) * 1000
    outside.sendall(data)
    assert read(inside, len(data)) == data
    inside.sendall(data)
    inside.close()
    assert read_all(outside) == data
    assert proxy.relay.counts == {"relayed": 1, "refused": 0, "unreachable": 0}


def test_what_is_said_before_the_answer_is_passed_on(proxy: TcpProxy, engine: socket.socket) -> None:
    outside = say(proxy, HELLO + ask("ENGINE.example", 7000) + b"early")
    inside, _ = engine.accept()
    with inside:
        assert read(inside, 5) == b"early"
    outside.close()


def test_an_engine_that_ends_ends_its_connections_and_the_client_likewise(
    proxy: TcpProxy, engine: socket.socket
) -> None:
    outside = say(proxy, HELLO, ask("engine.example", 7000))
    inside, _ = engine.accept()
    inside.close()
    assert read_all(outside) == ACCEPTED + told(Reply.SUCCEEDED)
    outside = say(proxy, HELLO, ask("engine.example", 7000))
    inside, _ = engine.accept()
    outside.close()
    assert read_all(inside) == b""


def test_a_side_that_does_not_read_keeps_the_other_from_writing(proxy: TcpProxy, engine: socket.socket) -> None:
    outside = say(proxy, HELLO, ask("engine.example", 7000))
    inside, _ = engine.accept()
    inside.settimeout(0.5)
    with outside, inside, pytest.raises(TimeoutError):
        inside.sendall(bytes(256 << 20))


# ---- nowhere else ----


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "engine.example", "0.0.0.0", "\xff\xfe", "x" * 255])
def test_nothing_but_engines_can_be_reached(proxy: TcpProxy, engine: socket.socket, host: str) -> None:
    """Not even an engine by its own address, if clients were told of another one."""
    for port in (engine.getsockname()[1], proxy.port, 0):
        assert read_all(say(proxy, HELLO, ask(host, port))) == ACCEPTED + told(Reply.NOT_ALLOWED)
    assert proxy.relay.counts == {"relayed": 0, "refused": 3, "unreachable": 0}


def test_an_engine_that_left_is_not_reached_any_more(proxy: TcpProxy) -> None:
    proxy.relay.forbid(TOLD)
    proxy.relay.forbid("tcp://never.there:1")
    assert read_all(say(proxy, HELLO, ask("engine.example", 7000))) == ACCEPTED + told(Reply.NOT_ALLOWED)


def test_what_an_engine_reports_need_not_be_an_address(proxy: TcpProxy) -> None:
    for endpoint in ("", "tcp://engine-0", "ipc:///tmp/x", "tcp://a:99999"):
        proxy.relay.allow(endpoint, endpoint)
        proxy.relay.forbid(endpoint)
    assert len(proxy.relay._addresses) == 1


def test_an_engine_that_refuses_and_one_that_does_not_answer_have_codes_of_their_own(
    proxy: TcpProxy, engine: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.close()
    assert read_all(say(proxy, HELLO, ask("engine.example", 7000))) == ACCEPTED + told(Reply.REFUSED)
    monkeypatch.setattr(relay_module, "CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]  # more than may wait to be accepted
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        proxy.relay.allow(TOLD, f"tcp://127.0.0.1:{port}")
        assert read_all(say(proxy, HELLO, ask("engine.example", 7000))) == ACCEPTED + told(Reply.HOST_UNREACHABLE)
        for each in waiting:
            each.close()
    assert proxy.relay.counts["unreachable"] == 2


@pytest.mark.parametrize("command", [2, 3])
def test_other_commands_are_refused(proxy: TcpProxy, command: int) -> None:
    said = say(proxy, HELLO + ask("engine.example", 7000, command))
    assert read_all(said) == ACCEPTED + told(Reply.COMMAND_NOT_SUPPORTED)


# ---- bounds ----


@pytest.mark.parametrize("begun", [b"\x05", HELLO, HELLO + ask("engine.example", 7000)[:-1]])
def test_a_handshake_that_does_not_end_is_ended(proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(tcp_proxy_module, "HELLO_S", 0.05)
    assert read_all(say(proxy, begun)) in (b"", ACCEPTED)
    eventually(lambda: not proxy._connections)


def test_a_client_that_hangs_up_in_the_middle_is_forgotten(proxy: TcpProxy) -> None:
    for begun in (b"\x05", HELLO, HELLO + b"\x05\x01"):
        say(proxy, begun).close()
    eventually(lambda: not proxy._connections)
    assert read_all(say(proxy, HELLO, ask("other", 1))) == ACCEPTED + told(Reply.NOT_ALLOWED)


def test_relayed_connections_count_among_all(proxy: TcpProxy, engine: socket.socket) -> None:
    proxy._limit.most = 1
    kept = say(proxy, HELLO, ask("engine.example", 7000))
    inside, _ = engine.accept()
    assert read_all(say(proxy)) == b""
    kept.close()
    inside.close()
