"""One request's output as its caller reads it: an iterator of deltas, plain or asynchronous."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.runtime.client.io_thread import ClientIO
from headwise.runtime.client.peers import Call, Event
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol.messages import Route
from headwise.runtime.protocol.prompt_items import PromptEmbeds
from headwise.runtime.protocol.request import FinishReason, GenerationResult, OutputDelta

T = TypeVar("T")


class _StreamBase:
    """The common part of both streams: the result so far, and cancellation.

    result: the output read so far; complete when the iteration has ended
    """

    def __init__(
        self,
        io: ClientIO,
        route: Route,
        embeds: Sequence[PromptEmbeds],
        files: Sequence[ImageFile],
        deliver: Callable[[Event], None],
    ) -> None:
        self.result = GenerationResult("")
        self._io = io
        self._ended = False
        self._call = Call(route, deliver, embeds, files)  # no reference to the stream: dropping the stream must end it
        io.start(self._call)

    @property
    def prompt_token_ids(self) -> NDArray[np.int32]:
        """``int32 [n]``: the prompt as the model has it. Known once a delta has come, and empty before."""
        return self._call.prompt

    @property
    def waits(self) -> str:
        """Why nothing comes yet, in words, if no engine of the deployment serves; empty: nothing of that is known."""
        return self._call.waits

    def cancel(self) -> None:
        """Abort the request; the iteration ends. Does nothing once the request has finished."""
        if not self._ended:
            self._ended = True
            self.result.finish_reason = FinishReason.ABORT
            self._io.cancel(self._call)

    def _take(self, event: Event) -> OutputDelta | None:
        """The next delta to give, None if the stream was cancelled; raises the error that ended the request."""
        if self._ended:
            return None
        if isinstance(event, HeadwiseError):
            self._ended = True
            raise event
        self.result.request_id = event.request_id
        self.result.add(event)
        self._ended = event.finish_reason is not None
        return event

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.cancel()


class TokenStream(_StreamBase, Iterator[OutputDelta]):
    """Deltas of one request. Leaving the ``with`` block, `close` and dropping the stream abort it."""

    def __init__(
        self, io: ClientIO, route: Route, embeds: Sequence[PromptEmbeds] = (), files: Sequence[ImageFile] = ()
    ) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        super().__init__(io, route, embeds, files, self._events.put)

    def __next__(self) -> OutputDelta:
        delta = None if self._ended else self._take(self._events.get())
        if delta is None:
            raise StopIteration
        return delta

    def read(self) -> GenerationResult:
        """Wait for the end; the whole result."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        self.cancel()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncTokenStream(_StreamBase, AsyncIterator[OutputDelta]):
    """Like `TokenStream`, for the event loop in which it was made."""

    def __init__(
        self, io: ClientIO, route: Route, embeds: Sequence[PromptEmbeds] = (), files: Sequence[ImageFile] = ()
    ) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        super().__init__(io, route, embeds, files, into_loop(self._events, asyncio.get_running_loop()))

    @property
    def unread(self) -> int:
        """Deltas that have come and were not read yet: they are kept until they are."""
        return self._events.qsize()

    async def __anext__(self) -> OutputDelta:
        delta = None if self._ended else self._take(await self._events.get())
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def read(self) -> GenerationResult:
        """Wait for the end; the whole result. Cancelling the task aborts the request."""
        try:
            async for _ in self:
                pass
        finally:
            self.cancel()
        return self.result

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> AsyncTokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


def into_loop(events: asyncio.Queue[T], loop: asyncio.AbstractEventLoop) -> Callable[[T], None]:
    """Deliver from the I/O thread into a loop's queue; a loop that is closed reads no more."""

    def deliver(event: T) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:
            return

    return deliver
