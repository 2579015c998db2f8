"""The link between two stages of a pipeline, over ZeroMQ: of each rank to the one in its place in the next stage.

    stage    PUSH, connected        next stage    PULL, bound
             round, array ->

An engine has few steps on their way at once, which bounds what lies unread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.liveness_clock import LivenessClock
from headwise.runtime.ops.stage_links import StageLostError
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import Authenticator, ClientKeys, ServerKeys, secure_client, secure_server

if TYPE_CHECKING:
    import zmq

_ROUND = struct.Struct("<q")

_SLICE_S = 0.25
"""Longest wait before the clock is read again: see `LivenessClock`."""


class NetworkLink:
    """The `HostLink` of one rank: `listen` makes it, for a stage that is not the first, and `connect` gives it the next
    stage, if there is one.

    endpoint: where the stage before connects; empty: there is none

    Not thread-safe. A stage that does not listen yet may be connected to: what it is sent waits.
    """

    def __init__(self, timeout_s: float) -> None:
        self.endpoint = ""
        self._timeout_s, self._clock = timeout_s, LivenessClock()
        self._context = open_context()
        self._authenticator: Authenticator | None = None
        self._before: zmq.Socket[bytes] | None = None
        self._next: zmq.Socket[bytes] | None = None
        self._sent = self._received = 0

    def listen(self, endpoint: str, keys: ServerKeys | None) -> None:
        """Have the stage before connect here: at ``ipc://PATH``, or ``tcp://HOST:*``, a free port.

        keys: who may connect; None: whoever does, and in the clear
        """
        import zmq

        socket = self._before = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self._authenticator = Authenticator(self._context, keys.clients)
            secure_server(socket, keys)
        socket.bind(endpoint)
        self.endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, endpoint: str, keys: ClientKeys | None) -> None:
        """Send to the stage that listens there."""
        import zmq

        socket = self._next = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        secure_client(socket, keys)
        socket.connect(endpoint)

    def send(self, array: NDArray[np.float32]) -> None:
        """See `HostLink.send`."""
        assert self._next is not None, "the last stage sends nothing"
        self._sent += 1
        whole = np.ascontiguousarray(array, dtype=np.float32)
        self._next.send_multipart((_ROUND.pack(self._sent), whole.data))

    def receive(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """See `HostLink.receive`."""
        assert self._before is not None, "the first stage receives nothing"
        self._received += 1
        deadline = self._clock() + self._timeout_s
        while (left := deadline - self._clock()) > 0:
            if self._before.poll(math.ceil(min(left, _SLICE_S) * 1000)):
                return self._checked(self._before.recv_multipart(), shape)
        raise StageLostError(f"the stage of the pipeline before this one sent nothing for {self._timeout_s:g} s")

    def _checked(self, frames: Sequence[bytes], shape: tuple[int, ...]) -> NDArray[np.float32]:
        size = 4 * math.prod(shape)
        if len(frames) != 2 or frames[0] != _ROUND.pack(self._received) or len(frames[1]) != size:
            raise StageLostError(
                f"the stage of the pipeline before this one is in another step: expected were {size} bytes in round "
                f"{self._received}"
            )
        return np.frombuffer(bytearray(frames[1]), np.float32).reshape(shape)

    def close(self) -> None:
        """Idempotent."""
        if self._authenticator is not None:
            self._authenticator.close()
        close_context(self._context)
