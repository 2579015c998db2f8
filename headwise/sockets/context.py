"""ZeroMQ contexts that the garbage collector leaves alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

_open: set[Any] = set()


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context of one's own, until `close_context`.

    One that is forgotten stays, with its sockets. To collect it could stop the process for good: a context that ends
    waits for its sockets, and those may be what the collector would have come to next.
    """
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _open.add(context)
    return context


def close_context(context: zmq.Context[Any], linger_ms: int = 0) -> None:
    """Close a context and its sockets, each after at most ``linger_ms`` for what is still to be sent. May be repeated.

    On the thread that uses the sockets.
    """
    context.destroy(linger=linger_ms)
    _open.discard(context)


def num_open() -> int:
    """Contexts that are open, in use or forgotten."""
    return len(_open)
