"""The port that clients connect to, over real sockets on loopback."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq
from support.waiting import PATIENCE_S, eventually

from headwise.errors import DeploymentError
from headwise.runtime.frontend import tcp_proxy as tcp_proxy_module
from headwise.runtime.frontend.tcp_proxy import TcpProxy
from headwise.sockets import streams


@pytest.fixture
def inner() -> Iterator[socket.socket]:
    """What the proxy leads to."""
    with socket.create_server(("127.0.0.1", 0)) as inner:
        inner.settimeout(PATIENCE_S)
        yield inner


@pytest.fixture
def proxy(inner: socket.socket) -> Iterator[TcpProxy]:
    proxy = TcpProxy("127.0.0.1", 0)
    proxy.start(inner.getsockname()[1])
    yield proxy
    proxy.close()


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("path", ["/", "/v1/models", "/" + "x" * 300_000])
def test_http_gets_one_line_that_says_what_the_port_is(proxy: TcpProxy, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 400
    assert text.count("\n") == 1
    assert f'connect with headwise.Client("127.0.0.1:{proxy.port}")' in text


def test_whoever_speaks_neither_zeromq_nor_http_gets_the_line_alone(proxy: TcpProxy) -> None:
    connection = connect(proxy)
    connection.sendall(b"hello?\r\n")
    connection.shutdown(socket.SHUT_WR)
    assert read_all(connection).startswith(b"headwise serves here, over ZeroMQ and not HTTP")


def test_a_connection_that_says_nothing_is_ended(proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_proxy_module, "HELLO_S", 0.05)
    assert read_all(connect(proxy)) == b""


def test_zeromq_goes_through_both_ways_in_whole(inner: socket.socket) -> None:
    inner.close()
    proxy = TcpProxy("127.0.0.1", 0)
    message = bytes(range(256)) * 20_000
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        proxy.start(router.bind_to_random_port("tcp://127.0.0.1"))
        dealer.connect(f"tcp://127.0.0.1:{proxy.port}")
        for _ in range(3):
            dealer.send(message)
            assert router.poll(1000 * PATIENCE_S)
            router.send_multipart(router.recv_multipart())
            assert dealer.poll(1000 * PATIENCE_S)
            assert dealer.recv() == message
    proxy.close()


def test_what_was_said_last_is_delivered_whichever_side_ends(proxy: TcpProxy, inner: socket.socket) -> None:
    last = b"\xff" + b"last words" * 10_000
    outside = connect(proxy)
    outside.sendall(last)
    outside.close()
    inside, _ = inner.accept()
    assert read_all(inside) == last
    outside = connect(proxy)
    outside.sendall(b"\xff")
    inside, _ = inner.accept()
    inside.sendall(last)
    inside.close()
    assert read_all(outside) == last


def test_an_entrance_that_closes_delivers_what_was_said(inner: socket.socket) -> None:
    proxy = TcpProxy("127.0.0.1", 0)
    proxy.start(inner.getsockname()[1])
    outside = connect(proxy)
    outside.sendall(b"\xff")
    inside, _ = inner.accept()
    inside.recv(1)
    inside.sendall(b"last words")
    inside.close()
    proxy.close()
    assert read_all(outside) == b"last words"
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)


def test_a_side_that_does_not_read_keeps_the_other_from_writing(proxy: TcpProxy, inner: socket.socket) -> None:
    outside = connect(proxy)
    outside.sendall(b"\xff")
    inside, _ = inner.accept()
    inside.settimeout(0.5)
    with outside, inside, pytest.raises(TimeoutError):
        inside.sendall(bytes(256 << 20))


def test_where_nobody_is_behind_the_entrance_the_connection_ends(inner: socket.socket) -> None:
    proxy = TcpProxy("127.0.0.1", 0)
    proxy.start(inner.getsockname()[1])
    inner.close()
    connection = connect(proxy)
    connection.sendall(b"\xff")
    assert read_all(connection) == b""
    proxy.close()


def test_an_entrance_that_was_never_opened_can_be_closed_and_its_port_taken_again() -> None:
    first = TcpProxy("127.0.0.1", 0)
    with pytest.raises(
        DeploymentError, match=f"cannot listen on 127.0.0.1:{first.port}: Address already in use; choose"
    ):
        TcpProxy("127.0.0.1", first.port)
    with pytest.raises(DeploymentError, match="cannot listen on no host:0"):
        TcpProxy("no host", 0)
    first.close()
    TcpProxy("127.0.0.1", first.port).close()


def test_connections_beyond_the_limit_are_closed_at_once(proxy: TcpProxy) -> None:
    proxy._limit.most = 2
    kept = [connect(proxy) for _ in range(2)]
    eventually(lambda: len(proxy._connections) == 2)
    assert read_all(connect(proxy)) == b""
    kept[0].close()
    eventually(lambda: len(proxy._connections) == 1)
    kept[1].sendall(b"hello?\r\n")
    kept[1].shutdown(socket.SHUT_WR)
    assert read_all(kept[1]).startswith(b"headwise serves here")


def test_an_entrance_that_is_left_takes_no_connections_and_is_quiet_once_nothing_goes_through_the_others(
    inner: socket.socket,
) -> None:
    now = [0.0]
    proxy = TcpProxy("127.0.0.1", 0, clock=lambda: now[0])
    proxy.start(inner.getsockname()[1])
    outside = connect(proxy)
    outside.sendall(b"\xff hello")
    inside, _ = inner.accept()
    assert inside.recv(100) == b"\xff hello"
    proxy.leave()
    eventually(lambda: not listens(proxy.port))
    now[0] = tcp_proxy_module.QUIET_S
    inside.sendall(b"an answer")
    assert outside.recv(100) == b"an answer"
    now[0] = 2 * tcp_proxy_module.QUIET_S
    assert not proxy.is_quiet, "just as long ago as is not quiet yet"
    now[0] += 1.0
    assert proxy.is_quiet
    outside.sendall(b"a question")
    assert inside.recv(100) == b"a question"
    eventually(lambda: not proxy.is_quiet)
    outside.close()
    eventually(lambda: proxy.is_quiet)
    inside.close()
    proxy.close()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("rounds", range(4))
def test_whoever_connects_while_it_closes_is_not_left_hanging(
    proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """However many rounds of its loop lie between the connection and the end; others have last words meanwhile."""
    monkeypatch.setattr(streams, "_LAST_WORDS_S", 0.05)
    loop, gate = proxy._loop, threading.Event()

    def end_after(left: int) -> None:
        if left:
            loop.call_soon(end_after, left - 1)
        else:
            proxy._closing.set()

    with connect(proxy) as other:
        other.sendall(b"\xff")
        eventually(lambda: len(proxy._connections) == 1)
        loop.call_soon_threadsafe(gate.wait, PATIENCE_S)
        with connect(proxy) as late:
            late.sendall(b"\xff")
            loop.call_soon_threadsafe(end_after, rounds)
            gate.set()
            proxy.close()
            late.settimeout(2.0)
            with suppress(ConnectionResetError):
                assert late.recv(1) == b""
