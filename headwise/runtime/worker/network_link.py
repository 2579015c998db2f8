"""The link between two stages of a pipeline, over ZeroMQ: of each rank to the one in its place in the next stage.

    stage    DEALER, connected        next stage    DEALER, bound
             round, array ->
             <- round, array          answers, at start

An engine has few steps on their way at once, which bounds what lies unread.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.errors import EngineDiedError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.ops.stage_links import StageLostError
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import Authenticator, ClientKeys, ServerKeys, secure_client, secure_server
from headwise.sockets.waiting import within

if TYPE_CHECKING:
    import zmq

_ROUND = struct.Struct("<q")


@dataclass
class _End:
    """Of a neighbour: a socket for both ways.

    other:          who it is, for errors
    sent, received: arrays so far
    """

    socket: zmq.Socket[bytes]
    other: str
    sent: int = 0
    received: int = 0


class NetworkLink:
    """The `HostLink` of one rank: `listen` gives it the stage before, and `connect` the next one, of which the last
    stage's is the first one, in a ring.

    endpoint: where the stage before connects; empty: nowhere

    Not thread-safe. A stage that does not listen yet may be connected to: what it is sent waits.
    """

    def __init__(self, timeout_s: float) -> None:
        self.endpoint = ""
        self._timeout_s, self._clock = timeout_s, LivenessClock()
        self._context = open_context()
        self._authenticator: Authenticator | None = None
        self._before: _End | None = None
        self._next: _End | None = None

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
        self._before = _End(socket, "the stage of the pipeline before this one")

    def connect(self, endpoint: str, keys: ClientKeys | None) -> None:
        """Send to the stage that listens there."""
        import zmq

        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        secure_client(socket, keys)
        socket.connect(endpoint)
        self._next = _End(socket, "the stage of the pipeline behind this one")

    def send(self, array: NDArray[np.float32]) -> None:
        """See `HostLink.send`."""
        assert self._next is not None, "the last stage sends nothing"
        self._give(self._next, array)

    def receive(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """See `HostLink.receive`."""
        assert self._before is not None, "the first stage receives nothing"
        return self._take(self._before, shape)

    def answer(self, array: NDArray[np.float32]) -> None:
        """See `HostLink.answer`."""
        assert self._before is not None, "the first stage answers nobody"
        self._give(self._before, array)

    def answered(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """See `HostLink.answered`."""
        assert self._next is not None, "nobody answers the last stage"
        return self._take(self._next, shape)

    def _give(self, end: _End, array: NDArray[np.float32]) -> None:
        import zmq

        end.sent += 1
        frames = _ROUND.pack(end.sent), np.ascontiguousarray(array, dtype=np.float32).data
        until = self._clock() + self._timeout_s
        send = partial(end.socket.send_multipart, frames, zmq.NOBLOCK)
        if within(end.socket, zmq.POLLOUT, lambda: send() or True, until, self._clock) is None:
            raise EngineDiedError(f"{end.other} took nothing for {self._timeout_s:g} s")

    def _take(self, end: _End, shape: tuple[int, ...]) -> NDArray[np.float32]:
        import zmq

        end.received += 1
        size, until = 4 * math.prod(shape), self._clock() + self._timeout_s
        receive = partial(end.socket.recv_multipart, zmq.NOBLOCK)
        frames = within(end.socket, zmq.POLLIN, receive, until, self._clock)
        if frames is None:
            raise StageLostError(f"{end.other} sent nothing for {self._timeout_s:g} s")
        if len(frames) != 2 or frames[0] != _ROUND.pack(end.received) or len(frames[1]) != size:
            raise StageLostError(f"{end.other} is in another step: expected were {size} bytes in round {end.received}")
        return np.frombuffer(bytearray(frames[1]), np.float32).reshape(shape)

    def close(self) -> None:
        """Idempotent."""
        if self._authenticator is not None:
            self._authenticator.close()
        close_context(self._context)
