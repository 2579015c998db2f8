"""An HTTP server on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from headwise.errors import ConfigError, DeploymentError
from headwise.runtime.http.connections import KEEP_ALIVE_S, Connection
from headwise.runtime.http.guard import MAX_HEAD_BYTES
from headwise.sockets.connection_limit import ConnectionLimit

log = logging.getLogger(__name__)

_START_S = 30.0
_LAST_WORDS_S = 1
"""Seconds for the answers under way when the server stops."""
_LOOK_S = 0.05
_SEND_BUFFER = 128 << 10
"""Of a connection in the system, whose own choice is megabytes for who does not read."""


def listen(host: str, port: int) -> socket.socket:
    """A socket at ``host:port`` to which connections can be made at once; 0: any free port.

    Several processes of one user may listen at one port, and the system deals connections out to them: so a server that
    is started again need not wait for its predecessor's end. Raises `DeploymentError`.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it on sockets that it made itself
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise DeploymentError(
            f"cannot listen for HTTP on {host}:{port}: {error.strerror}; choose another --http or --host"
        ) from None
    return listener


def check_certificate(certificate: str, key: str) -> None:
    """Raise `ConfigError` unless these files are a certificate (chain) and its key, both PEM."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        missing = [name for name in (certificate, key) if not Path(name).is_file()]
        why = f"there is no file {missing[0]}" if missing else f"{error}"
        raise ConfigError(f"http_cert {certificate} and http_key {key} cannot be used: {why}") from None


class HttpServer:
    """Serves an application at a listening socket, from `start` to `stop`.

    tls:        files of a certificate and its key; None: no encryption
    port:       that it listens at
    loop_count: grows as long as the thread's loop turns
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, tls: tuple[str, str] | None = None) -> None:
        host, self.port = listener.getsockname()[:2]
        self.loop_count = 0
        self._listener = listener
        certificate, key = tls or (None, None)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=partial(Connection, ConnectionLimit(f"{host}:{self.port}")),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # the application logs its own failures, and nothing has a key in it
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_WORDS_S,
                h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,
                ssl_certfile=certificate,
                ssl_keyfile=key,
                callback_notify=self._beat,
                timeout_notify=0,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="headwise-http", daemon=True)
        self._ended = threading.Event()

    def start(self) -> None:
        """Returns when connections are served. Raises `DeploymentError`."""
        self._thread.start()
        waited = 0.0
        while not self._server.started and not self._ended.wait(0.01):
            waited += 0.01
            if waited > _START_S:
                break
        if not self._server.started:
            self.stop()
            raise DeploymentError(f"the HTTP server on port {self.port} did not start; its log says why")

    @property
    def num_connections(self) -> int:
        """Those that are open."""
        return len(self._server.server_state.connections)

    def leave(self, timeout_s: float) -> bool:
        """Take no more connections, close each when its answer under way has ended, and return when all have. False:
        after ``timeout_s`` some have not; `stop` ends them, and may be called meanwhile.
        """
        has_left, deadline = threading.Event(), time.monotonic() + timeout_s
        assert self._loop is not None, "it was started"
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._take_no_more, has_left, frozenset())
        while not self._ended.wait(_LOOK_S) and not (has_left.is_set() and not self.num_connections):
            if time.monotonic() >= deadline:
                return False
        return True

    def _take_no_more(self, has_left: threading.Event, told: frozenset[asyncio.Protocol]) -> None:
        """On the loop, for as long as it runs: a connection that was being made may come later than the others."""
        assert self._loop is not None
        for server in self._server.servers:
            server.close()
        connections = frozenset(self._server.server_state.connections)
        for connection in connections - told:
            connection.shutdown()
        has_left.set()
        self._loop.call_later(_LOOK_S, self._take_no_more, has_left, connections)

    def stop(self) -> None:
        """Take no more connections, and end the others soon. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            log.exception("the HTTP server on port %d failed", self.port)
        finally:
            self._ended.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._listener])

    async def _beat(self) -> None:
        self.loop_count += 1
