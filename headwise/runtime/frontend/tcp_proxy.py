"""The port that clients connect to. It passes on ZeroMQ connections to the scheduler, and SOCKS5 connections to engines
(see `Relay`), and answers all others with one line of text.

ZeroMQ itself cannot send such a line: its listener starts with binary data that other clients do not show.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

from headwise.errors import DeploymentError
from headwise.runtime.frontend.relay import Relay
from headwise.sockets import socks
from headwise.sockets.connection_limit import ConnectionLimit
from headwise.sockets.endpoint import Endpoint
from headwise.sockets.streams import PORTION, Stream, StreamThread, join, say_last

QUIET_S = 10.0
"""A connection over which nothing has gone for so long has no stream: who waits for an engine asks every second whether
it lives."""
HELLO_S = 30.0
"""Longest wait for the first bytes of a connection, and for a whole SOCKS5 handshake."""

_ZEROMQ = b"\xff"
"""First byte of every ZeroMQ connection since version 3."""
_SOCKS = bytes((socks.VERSION,))
_HTTP = re.compile(rb"[A-Z]+ \S")


class TcpProxy(StreamThread):
    """Listens at ``host:port`` as soon as it is made (0: any free port); raises `DeploymentError` if it cannot.

    Between `start` and `close`, its thread copies bytes between the outer and the inner connections. It keeps at most
    two buffers per connection in memory: if one side does not read, the other side cannot write. Connections beyond
    `ConnectionLimit.most` are closed at once.

    relay: which engines connections may be passed on to
    """

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise DeploymentError(
                f"cannot listen on {host}:{port}: {reason}; choose another --port (0 takes a free one) or "
                "another --host"
            ) from None
        super().__init__("headwise-proxy")
        self.port = int(self._listener.getsockname()[1])
        self.relay = Relay()
        self._inner_port = 0
        self._limit = ConnectionLimit(f"{host}:{self.port}")
        self._clock = clock
        self._passed_at = clock()
        self._server: asyncio.Server | None = None

    def start(self, inner_port: int) -> None:
        """Pass on ZeroMQ connections to this port of the loopback interface."""
        self._inner_port = inner_port
        self._thread.start()

    def leave(self) -> None:
        """Stop listening. Connections go on until one side ends them."""
        asyncio.run_coroutine_threadsafe(self._stop_listening(), self._loop)

    @property
    def is_quiet(self) -> bool:
        """Whether no connection has a stream any more, after `leave`."""
        return not self._connections or self._clock() - self._passed_at > QUIET_S

    def _note_passed(self) -> None:
        self._passed_at = self._clock()

    def close(self) -> None:
        """Stop listening, and end connections, which have a second to deliver what was sent."""
        super().close()
        self._listener.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._take, sock=self._listener)

    async def _stop_listening(self) -> None:
        assert self._server is not None
        if self._server.is_serving():
            self._loop.remove_reader(self._listener)
            await asyncio.sleep(0)  # what was accepted a moment ago comes to be the server's, which it must find open
            self._server.close()

    async def _take(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            if not self._limit.refuses(len(self._connections) + 1):
                await self._attend(self._pass_on(reader, writer))
        finally:
            writer.transport.abort()

    async def _pass_on(self, reader: StreamReader, writer: StreamWriter) -> None:
        first = await asyncio.wait_for(reader.read(PORTION), HELLO_S)
        inner: Stream | None = None
        if first.startswith(_ZEROMQ):
            inner = await asyncio.open_connection("127.0.0.1", self._inner_port)
            inner[1].write(first)
        elif first.startswith(_SOCKS):
            inner = await asyncio.wait_for(self.relay.ask(first, reader, writer), HELLO_S)
        elif first:
            await say_last(_line(first, writer), (reader, writer))
        if inner is not None:
            await join((reader, writer), inner, self._note_passed)


def _line(first: bytes, writer: StreamWriter) -> bytes:
    """What to say to somebody who speaks another protocol."""
    address = str(Endpoint.of(*writer.get_extra_info("sockname")[:2])).removeprefix("tcp://")
    line = (
        f'headwise serves here, over ZeroMQ and not HTTP: connect with headwise.Client("{address}"), or try '
        f'`headwise generate --address {address} "Hello"`\n'
    ).encode()
    if not _HTTP.match(first):
        return line
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(line)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + line
