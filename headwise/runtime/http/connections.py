"""One HTTP connection, and how long it may keep the server waiting.

Uvicorn's own limit is for connections that are idle after a response: not for a head that never ends, a body that
nobody wants, or a peer that does not read.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwise.runtime.http.errors import ApiError
from headwise.sockets.connection_limit import ConnectionLimit

KEEP_ALIVE_S = 60
"""A connection that is idle after an answer is closed after so long."""
HEAD_S = 20.0
"""Longest time for a request's head, and for what is left of a body that was answered already."""
LAST_REQUEST_S = 0.5
"""When the server leaves: for a request that is being sent, and for the first of a new connection, which may be."""
STALL_S = 15.0
"""A peer whose connection takes nothing for so long is gone: the connection is cut, and its request cancelled. In this
time no more of its answer is kept here than the engine produces of it."""


class Connection(H11Protocol):
    """Speaks HTTP/1.1. What is no HTTP is answered in OpenAI's form.

    limit: of connections, all together; beyond it, new ones are closed at once
    """

    def __init__(self, limit: ConnectionLimit, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit = limit
        self._patience: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._limit.refuses(len(self.connections)):
            transport.abort()
        self._watch_peer()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._patience, self._stall, self.timeout_keep_alive_task)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_peer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_peer()

    def shutdown(self) -> None:
        """Close, after the answer under way; what the peer may be sending already is answered, too."""
        if self._patience is None:
            self._close_when_answered()
        else:
            self.loop.call_later(LAST_REQUEST_S, self._close_when_answered)

    def _close_when_answered(self) -> None:
        with suppress(h11.LocalProtocolError):  # it has failed, and is being closed
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._stall)
        self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or a head too long for it. Nothing more is read."""
        body = json.dumps(ApiError(400, f"this is no HTTP/1.1 request that can be served: {msg}").body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            parts = h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()

    def _watch_peer(self) -> None:
        """Bound the time in which no request is served: from its first moment, not from the peer's last byte."""
        is_serving = self.cycle is not None and not self.cycle.response_complete
        if is_serving or self.timeout_keep_alive_task is not None:
            _cancel(self._patience)
            self._patience = None
        elif self._patience is None:
            self._patience = self.loop.call_later(HEAD_S, self.transport.abort)


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
