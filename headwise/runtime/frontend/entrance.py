"""The port that clients connect to. ZeroMQ's connections go through; who speaks anything else is told what the port is.

ZeroMQ cannot tell them: its listener speaks first, in bytes that no other protocol's clients show.
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

HELLO_S = 30.0
"""Longest wait for what a connection says first."""
CLOSE_S = 5.0
"""Longest that a connection which ends may take to be read to its end."""

_ZEROMQ = b"\xff"
"""First byte of every connection of ZeroMQ since its version 3."""
_HTTP = re.compile(rb"[A-Z]+ \S")
_PORTION = 1 << 16


class Entrance:
    """Listens at ``host:port`` at once, 0 for a free port; raises `DeploymentError` if that cannot be.

    Between `start` and `close`, a thread of its own hands bytes on. No more of them are in memory than a connection's
    two buffers hold: a side that does not read keeps the other from writing.
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
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-entrance", daemon=True)

    @property
    def is_open(self) -> bool:
        """Whether connections are handed on."""
        return self._thread.is_alive()

    def start(self, inner_port: int) -> None:
        """Hand on connections of ZeroMQ to this port of the loopback interface."""
        self._inner_port = inner_port
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and end connections, which have a second to deliver what was said already."""
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
        self._connections.add(task)
        try:
            with suppress(OSError, asyncio.TimeoutError, asyncio.CancelledError):
                said = await asyncio.wait_for(reader.read(_PORTION), HELLO_S)
                if said.startswith(_ZEROMQ):
                    await self._hand_on(said, reader, writer)
                elif said:
                    await _tell(said, reader, writer)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _hand_on(self, said: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner_port)
        try:
            inner_writer.write(said)
            ways = [
                asyncio.ensure_future(_pump(reader, inner_writer)),
                asyncio.ensure_future(_pump(inner_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
            await asyncio.gather(_finish(writer), _finish(inner_writer))
        finally:
            inner_writer.transport.abort()


async def _pump(reader: StreamReader, writer: StreamWriter) -> None:
    with suppress(OSError):
        while said := await reader.read(_PORTION):
            writer.write(said)
            await writer.drain()


async def _finish(writer: StreamWriter) -> None:
    """Have what was written read, if that does not take long."""
    writer.close()
    with suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), CLOSE_S)


async def _tell(said: bytes, reader: StreamReader, writer: StreamWriter) -> None:
    host, port = writer.get_extra_info("sockname")[:2]
    line = (
        f'headwise serves here, over ZeroMQ and not HTTP: connect with headwise.Client("{host}:{port}"), or try '
        f'`headwise generate --address {host}:{port} "Hello"`\n'
    ).encode()
    if _HTTP.match(said):
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(line)}\r\n"
        line = f"{head}Connection: close\r\n\r\n".encode() + line
    writer.write(line)
    await writer.drain()
    writer.write_eof()
    await asyncio.wait_for(_ignore(reader), CLOSE_S)  # what is left unread would end the connection before the line


async def _ignore(reader: StreamReader) -> None:
    while await reader.read(_PORTION):
        pass
