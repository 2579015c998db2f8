"""Two connections joined to one, and threads that do that for many."""

from __future__ import annotations

import asyncio
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress

PORTION = 1 << 16
"""Most bytes read at once."""
CLOSE_S = 5.0
"""Longest time for the peers to read what is left when a connection ends."""
_LAST_WORDS_S = 1.0

Stream = tuple[StreamReader, StreamWriter]


async def join(one: Stream, other: Stream, passed: Callable[[], None] = lambda: None) -> None:
    """Copy in both directions until one side ends; then close both, which get what was sent before.

    At most two buffers are kept: if one side does not read, the other side cannot write.

    passed: called whenever something has come
    """
    try:
        directions = [
            asyncio.ensure_future(_copy(one[0], other[1], passed)),
            asyncio.ensure_future(_copy(other[0], one[1], passed)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
        await asyncio.gather(_finish(one[1]), _finish(other[1]))
    finally:
        one[1].transport.abort()
        other[1].transport.abort()


async def say_last(words: bytes, stream: Stream) -> None:
    """Send this, and end the connection once the peer has, or after `CLOSE_S`."""
    reader, writer = stream
    writer.write(words)
    await writer.drain()
    writer.write_eof()
    await asyncio.wait_for(_ignore(reader), CLOSE_S)  # unread data would reset the connection


async def _copy(reader: StreamReader, writer: StreamWriter, passed: Callable[[], None]) -> None:
    with suppress(OSError):
        while data := await reader.read(PORTION):
            passed()
            writer.write(data)
            await writer.drain()


async def _finish(writer: StreamWriter) -> None:
    """Close, and wait a while until the peer has read everything."""
    writer.close()
    with suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), CLOSE_S)


async def _ignore(reader: StreamReader) -> None:
    while await reader.read(PORTION):
        pass


class StreamThread:
    """A thread with an event loop, on which connections are served as tasks, from `start` to `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End connections, which have a second to deliver what was sent, and the thread; may be called again."""
        if self.is_open:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    async def _listen(self) -> None:
        """Begin, on the thread."""

    async def _stop_listening(self) -> None:
        """Take no more connections."""

    async def _attend(self, serving: Awaitable[None]) -> None:
        """Serve a connection on this task until it ends, fails, or the thread is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
                await serving
        finally:
            self._connections.discard(task)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self._listen()
        await self._closing.wait()
        await self._stop_listening()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_LAST_WORDS_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}  # also those that have just begun
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
