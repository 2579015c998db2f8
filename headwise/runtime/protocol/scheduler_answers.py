"""What the scheduler answers to the reports of engines and encoders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headwise.runtime.protocol import wire

if TYPE_CHECKING:
    import zmq

MAX_ANSWER_BYTES = 1 << 20
"""More than a directory of thousands of engines takes, and as many keys as there may be."""


def answers(socket: zmq.Socket[bytes], secret: str, *kinds: type) -> Iterator[Any]:
    """The messages of these kinds that have come by now, from who knows the deployment's ``secret``, which they bear.
    Whatever else came is nobody's business. Never waits.
    """
    import zmq

    while True:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames[0]) > MAX_ANSWER_BYTES:
            continue
        try:
            message = wire.decode(frames[0], *kinds)
        except wire.WireError:
            continue
        if message.secret == secret:
            yield message
