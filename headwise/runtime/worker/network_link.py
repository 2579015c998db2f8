"""The link between two stages of a pipeline, over ZeroMQ: of each rank to the one in its place in the next stage.

    stage    DEALER, connected        next stage    DEALER, bound
             round, array ->
             <- round, array          answers, at start

An engine has few steps on their way at once, which bounds what lies unread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.errors import EngineDiedError
from headwise.liveness_clock import LivenessClock
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import Authenticator, ClientKeys, ServerKeys, secure_client, secure_server

if TYPE_CHECKING:
    import zmq

_ROUND = struct.Struct("<q")

_SLICE_S = 0.25
"""Longest wait before the clock is read again: see `LivenessClock`."""


class _Way:
    """Arrays by one socket, both ways, which count them apart. other: at the other end, for errors"""

    def __init__(self, socket: zmq.Socket[bytes], other: str, timeout_s: float) -> None:
        self._socket, self._other, self._timeout_s = socket, other, timeout_s
        self._clock = LivenessClock()
        self._sent = self._received = 0

    def send(self, array: NDArray[np.float32]) -> None:
        import zmq

        self._wait(zmq.POLLOUT, "took")
        self._sent += 1
        whole = np.ascontiguousarray(array, dtype=np.float32)
        self._socket.send_multipart((_ROUND.pack(self._sent), whole.data))

    def receive(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        import zmq

        self._wait(zmq.POLLIN, "sent")
        self._received += 1
        return self._checked(self._socket.recv_multipart(), shape)

    def _wait(self, event: int, does: str) -> None:
        deadline = self._clock() + self._timeout_s
        while (left := deadline - self._clock()) > 0:
            if self._socket.poll(math.ceil(min(left, _SLICE_S) * 1000), event):
                return
        raise EngineDiedError(f"{self._other} {does} nothing for {self._timeout_s:g} s")

    def _checked(self, frames: Sequence[bytes], shape: tuple[int, ...]) -> NDArray[np.float32]:
        size = 4 * math.prod(shape)
        if len(frames) != 2 or frames[0] != _ROUND.pack(self._received) or len(frames[1]) != size:
            raise EngineDiedError(
                f"{self._other} is in another step: expected were {size} bytes in round {self._received}"
            )
        return np.frombuffer(bytearray(frames[1]), np.float32).reshape(shape)


class NetworkLink:
    """The `HostLink` of one rank: `listen` makes it, for a stage that is not the first, and `connect` gives it the next
    stage, if there is one.

    endpoint: where the stage before connects; empty: there is none

    Not thread-safe. A stage that does not listen yet may be connected to: what it is sent waits.
    """

    def __init__(self, timeout_s: float) -> None:
        self.endpoint = ""
        self._timeout_s = timeout_s
        self._context = open_context()
        self._authenticator: Authenticator | None = None
        self._before: _Way | None = None
        self._next: _Way | None = None

    def listen(self, endpoint: str, keys: ServerKeys | None) -> None:
        """Have the stage before connect here: at ``ipc://PATH``, or ``tcp://HOST:*``, a free port.

        keys: who may connect; None: whoever does, and in the clear
        """
        import zmq

        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self._authenticator = Authenticator(self._context, keys.clients)
            secure_server(socket, keys)
        socket.bind(endpoint)
        self.endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._before = _Way(socket, "the stage of the pipeline before this one", self._timeout_s)

    def connect(self, endpoint: str, keys: ClientKeys | None) -> None:
        """Send to the stage that listens there."""
        import zmq

        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        secure_client(socket, keys)
        socket.connect(endpoint)
        self._next = _Way(socket, "the stage of the pipeline behind this one", self._timeout_s)

    def send(self, array: NDArray[np.float32]) -> None:
        """See `HostLink.send`."""
        assert self._next is not None, "the last stage sends nothing"
        self._next.send(array)

    def receive(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """See `HostLink.receive`."""
        assert self._before is not None, "the first stage receives nothing"
        return self._before.receive(shape)

    def answer(self, array: NDArray[np.float32]) -> None:
        """See `HostLink.answer`."""
        assert self._before is not None, "the first stage answers nobody"
        self._before.send(array)

    def answered(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """See `HostLink.answered`."""
        assert self._next is not None, "nobody answers the last stage"
        return self._next.receive(shape)

    def close(self) -> None:
        """Idempotent."""
        if self._authenticator is not None:
            self._authenticator.close()
        close_context(self._context)
