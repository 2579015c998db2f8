"""The scheduler's socket, to which clients and engines connect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headwise.errors import DeploymentError
from headwise.runtime.protocol.messages import MAX_MESSAGE_BYTES
from headwise.sockets.context import close_context
from headwise.sockets.curve import ServerKeys
from headwise.sockets.listener import Listener

if TYPE_CHECKING:
    import zmq

Send = Callable[[bytes, Any], None]
"""Sends a message to a peer, by its connection's identity, unless it is gone."""

SEND_QUEUE = 100_000
"""Answers that a client may leave unread. Then its connection is closed, and it asks again."""


def listen(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    port: int,
    keys: ServerKeys | None = None,
    users: Iterable[str] = (),
) -> Listener:
    """Listen at the address; port 0: any free port. If that fails, closes the context and raises `DeploymentError`.

    keys, users: only clients with these keys may connect, encrypted; None: all may
    """
    import zmq

    endpoint = f"tcp://{host}:{port or '*'}"
    try:
        return Listener(
            context, endpoint, max_message_bytes=MAX_MESSAGE_BYTES, send_queue=SEND_QUEUE, keys=keys, users=users
        )
    except zmq.ZMQError as error:
        close_context(context)
        raise DeploymentError(
            f"cannot listen on {host}:{port}: {error}; choose another --port (0 takes a free one) or --host"
        ) from None
