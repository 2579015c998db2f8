"""Waiting for a socket, which may change its mind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import zmq

_SLICE_S = 0.25
"""Longest wait before the clock is read again: see `LivenessClock`."""

_Made = TypeVar("_Made")


def within(
    socket: zmq.Socket[Any], event: int, attempt: Callable[[], _Made], until: float, clock: Callable[[], float]
) -> _Made | None:
    """What ``attempt`` gives, which is made once the socket is ready for ``event``; None if it is not before ``until``.

    An attempt does not block, and is made again where there is nothing to be had by then: a socket that could send
    cannot any longer once the other side has refused its connection.
    """
    import zmq

    left = math.inf
    while left > 0:
        left = max(0.0, until - clock())
        if socket.poll(math.ceil(min(left, _SLICE_S) * 1000), event):
            try:
                return attempt()
            except zmq.Again:
                continue
    return None
