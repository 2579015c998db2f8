"""Local ends of connections that lead through the scheduler's relay to engines."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from pathlib import Path

from headwise.sockets.endpoint import Endpoint
from headwise.sockets.socks import SocksError, connect
from headwise.sockets.streams import Stream, StreamThread, join

HANDSHAKE_S = 4.0
"""Longest wait for the scheduler to connect to an engine."""
_LONGEST_PATH = 100
"""Bytes of a Unix socket's path; systems allow 103 or 107."""


class Forwarder(StreamThread):
    """Makes addresses at which ZeroMQ reaches engines by way of ``scheduler``, on a thread of its own.

    ZeroMQ could speak SOCKS5 itself, but libzmq (4.3.5) ends the process when a proxy hangs up during the handshake.
    """

    def __init__(self, scheduler: str) -> None:
        super().__init__("headwise-forwarder")
        self._scheduler = Endpoint.parse(scheduler)
        self._failures: dict[str, str] = {}
        self._thread.start()

    def open(self, endpoint: str) -> str:
        """An address (``ipc://...``) for one connection to the engine at ``endpoint``.

        It is a socket in a directory of this user alone, and both are gone once it is connected to.
        """
        self._failures.pop(endpoint, None)
        directory = Path(tempfile.mkdtemp(prefix="hw-relay-"))
        if len(bytes(directory)) > _LONGEST_PATH - 2:
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix="hw-relay-", dir="/tmp"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(str(directory / "s"))
        listener.listen(1)
        forwarding = self._attend(self._forward(Endpoint.parse(endpoint), endpoint, listener, directory))
        self._loop.call_soon_threadsafe(self._loop.create_task, forwarding)
        return f"ipc://{directory / 's'}"

    def failure(self, endpoint: str) -> str:
        """Why the last connection to an engine could not be made; empty: it was made, or is being made."""
        return self._failures.get(endpoint, "")

    async def _forward(self, engine: Endpoint, endpoint: str, listener: socket.socket, directory: Path) -> None:
        try:
            accepted, _ = await asyncio.wait_for(self._loop.sock_accept(listener), HANDSHAKE_S)
        finally:
            listener.close()
            shutil.rmtree(directory, ignore_errors=True)
        local = await asyncio.open_unix_connection(sock=accepted)
        try:
            relayed = await asyncio.wait_for(self._connect(engine), HANDSHAKE_S)
            await join(local, relayed)
        except SocksError as error:
            self._failures[endpoint] = str(error)
        except OSError as error:
            self._failures[endpoint] = error.strerror or "no answer"
        except (EOFError, asyncio.TimeoutError):
            self._failures[endpoint] = "no answer"
        finally:
            local[1].transport.abort()

    async def _connect(self, destination: Endpoint) -> Stream:
        reader, writer = await asyncio.open_connection(self._scheduler.host, self._scheduler.port)
        try:
            await connect(reader, writer, destination)
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer
