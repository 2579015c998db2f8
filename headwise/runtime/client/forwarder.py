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

_PREFIX = "hw-relay-"
_NOWHERE = "ipc:///dev/null/none"
"""Nobody can ever listen there."""


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

        It is a socket in a directory of this user alone, and both are gone once it is connected to. If there can be
        none, nothing listens at the address, and `failure` says why.
        """
        self._failures.pop(endpoint, None)
        try:
            engine, directory = Endpoint.parse(endpoint), _private_directory()
            listener = _listen(directory / "s")
        except (OSError, ValueError) as error:
            self._failures[endpoint] = str(error)
            return _NOWHERE
        forwarding = self._attend(self._forward(engine, endpoint, listener, directory))
        self._loop.call_soon_threadsafe(self._loop.create_task, forwarding)
        return f"ipc://{directory / 's'}"

    def failure(self, endpoint: str) -> str:
        """Why the last connection to an engine could not be made; it is told once. Empty: nothing is known."""
        return self._failures.pop(endpoint, "")

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
        except (TimeoutError, EOFError):
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


def _private_directory() -> Path:
    """A new directory with mode 0700, in which a socket's path is short enough."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(bytes(directory)) > _LONGEST_PATH - len("/s"):
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    return directory


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(1)
    except OSError:
        listener.close()
        path.parent.rmdir()
        raise
    return listener
