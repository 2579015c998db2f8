"""The port that clients connect to. It passes on ZeroMQ connections, and answers all others with one line of text.

ZeroMQ itself cannot send such a line: its listener starts with binary data that other clients do not show.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

from headwise.errors import DeploymentError
from headwise.sockets.connection_limit import ConnectionLimit

HELLO_S = 30.0
"""Longest wait for the first bytes of a connection."""
CLOSE_S = 5.0
"""Longest time for the peers to read what is left when a connection ends."""

_ZEROMQ = b"\xff"
"""First byte of every ZeroMQ connection since version 3."""
_HTTP = re.compile(rb"[A-Z]+ \S")
_PORTION = 1 << 16


class TcpProxy:
    """Listens at ``host:port`` as soon as it is made (0: any free port); raises `DeploymentError` if it cannot.

    Between `start` and `close`, its thread copies bytes between the outer and the inner connections. It keeps at most
    two buffers per connection in memory: if one side does not read, the other side cannot write. Connections beyond
    `ConnectionLimit.most` are closed at once.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise DeploymentError(
                f"cannot listen on {host}:{port}: {reason}; choose another --port (0 takes a free one) or "
                "another --host"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._inner_port = 0
        self._limit = ConnectionLimit(f"{host}:{self.port}")
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-proxy", daemon=True)

    @property
    def is_open(self) -> bool:
        """Whether connections are passed on."""
        return self._thread.is_alive()

    def start(self, inner_port: int) -> None:
        """Pass on ZeroMQ connections to this port of the loopback interface."""
        self._inner_port = inner_port
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end connections, which have a second to deliver what was sent."""
        if self.is_open:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
        self._listener.close()
        if not self._loop.is_closed():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take, sock=self._listener)
        await self._closing.wait()
        server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=1.0)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _take(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._limit.refuses(len(self._connections) + 1):
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            with suppress(OSError, asyncio.TimeoutError, asyncio.CancelledError):
                first = await asyncio.wait_for(reader.read(_PORTION), HELLO_S)
                if first.startswith(_ZEROMQ):
                    await self._pass_on(first, reader, writer)
                elif first:
                    await _answer_in_text(first, reader, writer)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _pass_on(self, first: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner_port)
        try:
            inner_writer.write(first)
            directions = [
                asyncio.ensure_future(_copy(reader, inner_writer)),
                asyncio.ensure_future(_copy(inner_reader, writer)),
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
            await asyncio.gather(_finish(writer), _finish(inner_writer))
        finally:
            inner_writer.transport.abort()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_PORTION):
            writer.write(data)
            await writer.drain()


async def _finish(writer: StreamWriter) -> None:
    """Close, and wait a while until the peer has read everything."""
    writer.close()
    with suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), CLOSE_S)


async def _answer_in_text(first: bytes, reader: StreamReader, writer: StreamWriter) -> None:
    host, port = writer.get_extra_info("sockname")[:2]
    line = (
        f'headwise serves here, over ZeroMQ and not HTTP: connect with headwise.Client("{host}:{port}"), or try '
        f'`headwise generate --address {host}:{port} "Hello"`\n'
    ).encode()
    if _HTTP.match(first):
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(line)}\r\n"
        line = f"{head}Connection: close\r\n\r\n".encode() + line
    writer.write(line)
    await writer.drain()
    writer.write_eof()
    await asyncio.wait_for(_ignore(reader), CLOSE_S)  # unread data would reset the connection


async def _ignore(reader: StreamReader) -> None:
    while await reader.read(_PORTION):
        pass
