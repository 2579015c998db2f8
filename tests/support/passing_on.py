"""A port that leads to another one, as port-forwarding does."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class PortForward:
    """Listens at ``address`` (``tcp://127.0.0.1:PORT``) and passes connections on to ``host:port``.

    at: listen at this address, an IPv6 one in brackets
    """

    def __init__(self, host: str, port: int, at: str = "127.0.0.1") -> None:
        self._target = (host, port)
        family = socket.AF_INET6 if ":" in at else socket.AF_INET
        self._listener = socket.create_server((at.strip("[]"), 0), family=family)
        self._sockets: list[socket.socket] = []
        self.address = f"tcp://{at}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                outer, _ = self._listener.accept()
                try:
                    inner = socket.create_connection(self._target)
                except OSError:
                    outer.close()
                    continue
                self._sockets += [outer, inner]
                for one, other in ((outer, inner), (inner, outer)):
                    threading.Thread(target=_copy, args=(one, other), daemon=True).start()

    def cut(self) -> None:
        """End all connections; new ones can be made."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for each in (one, other):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
