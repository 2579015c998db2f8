"""ZeroMQ contexts that the garbage collector leaves alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

_open: set[Any] = set()


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A new context, kept until `close_context`.

    A context that is never closed stays in memory, with its sockets. The garbage collector must not collect it: a
    context that ends waits for its sockets to close, and the collector may not have closed those yet. The process
    would hang for ever.
    """
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _open.add(context)
    return context


def close_context(context: zmq.Context[Any], linger_ms: int = 0) -> None:
    """Close a context and its sockets. Each has at most ``linger_ms`` to send what is left. May be called again.

    Call it on the thread that uses the sockets.
    """
    context.destroy(linger=linger_ms)
    _open.discard(context)


def num_open() -> int:
    """How many contexts are open, used or not."""
    return len(_open)
