"""Carries out one request for answers: starts its streams, and passes on what comes, whole or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from headwise.errors import HeadwiseError, InvalidRequestError, OverloadedError
from headwise.runtime.client.client import Client
from headwise.runtime.client.token_stream import AsyncTokenStream
from headwise.runtime.http.answers import likeliest, usage_of
from headwise.runtime.http.bodies import Wanted
from headwise.runtime.http.errors import ApiError
from headwise.runtime.http.form import Form
from headwise.runtime.http.logprobs import HeldByOne, HeldLogprobs
from headwise.runtime.http.metrics import AnswerClock, RequestMetrics
from headwise.runtime.protocol.request import GenerationResult, OutputDelta

T = TypeVar("T")

MAX_UNREAD = 2048
"""Deltas of one answer that may wait for a client which reads more slowly than they come."""
LEAST_UNREAD = 256
"""As many may wait even if each of them has many log-probabilities."""
PROMPT_UNREAD = 32
"""Those of a prompt that may wait: each has the log-probabilities of hundreds of tokens."""

WAIT_S = 5.0
"""Who waits for an engine to start is told so that often, by a comment, which keeps proxies from giving up."""

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Generation:
    """Answers one request, as an ASGI application of its own. When the connection ends, so do its streams, and the
    engine frees what they held.

    echoed:   the prompts' texts, to be told before the answers; empty: they are not
    logprobs: counts those that the server holds
    """

    def __init__(
        self,
        client: Client,
        wanted: Wanted,
        form: Form,
        echoed: Sequence[str],
        metrics: RequestMetrics,
        logprobs: HeldLogprobs,
    ) -> None:
        self._client = client
        self._streams: list[AsyncTokenStream] = []
        self._wanted = wanted
        self._form = form
        self._echoed = echoed
        self._metrics = metrics
        self._held = logprobs
        self._max_unread = max(LEAST_UNREAD, MAX_UNREAD // (1 + (wanted.sampling.logprobs or 0)))
        began = time.monotonic()
        self._clocks = [AnswerClock(metrics, began) for _ in range(wanted.num_prompts * wanted.n)]
        self._started: set[int] = set()  # choices of which something has come
        self._sending = asyncio.Lock()
        self._is_open = False  # whether the stream of events has begun

    @property
    def results(self) -> list[GenerationResult]:
        """What there is by now of each answer."""
        return [stream.result for stream in self._streams]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._answer(scope, receive, send))
        except HeadwiseError as error:
            await self._tell(ApiError.of(error), scope, receive, send)
        except ApiError as error:
            await self._tell(error, scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = self._streams
        try:
            self._start(streams)
            async with aclosing(merged(streams)) as deltas:
                with self._held.open() as held:
                    if self._wanted.stream:
                        async with self._telling(send):
                            await self._send_events(streams, deltas, held, send)
                        return
                    answer = await self._whole(streams, deltas, held)
            await answer(scope, receive, send)
        finally:
            for stream in streams:
                self._metrics.ended(stream.result.finish_reason)
                stream.cancel()

    async def _whole(
        self, streams: Sequence[AsyncTokenStream], deltas: AsyncIterator[tuple[int, OutputDelta]], held: HeldByOne
    ) -> JSONResponse:
        async for index, delta in deltas:
            self._take(index, streams[index], delta)
            held.add(delta)
        results = [stream.result for stream in streams]
        return await self._rendered(lambda: JSONResponse(self._told(results)))

    def _told(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        n, kept = self._wanted.n, self._wanted.kept
        if not kept:
            return self._form.whole(results, n, self._echoed)
        return {**self._form.whole(likeliest(results, n, kept), kept, self._echoed), "usage": usage_of(results, n)}

    async def _rendered(self, render: Callable[[], T]) -> T:
        """What ``render`` makes of whole answers. Many log-probabilities, or tokens of long prompts, take long, for
        which no other stream waits."""
        is_long = self._form.has_logprobs or self._form.has_tokens
        return await asyncio.to_thread(render) if is_long else render()

    def _start(self, streams: list[AsyncTokenStream]) -> None:
        """Start all answers. The sampling was checked: what is refused here is the prompt."""
        wanted = self._wanted
        try:
            for index in range(wanted.num_prompts * wanted.n):
                prompt, choice = divmod(index, wanted.n)
                sampling = wanted.samples[choice]
                if wanted.messages is not None:
                    streams.append(self._client.astream_chat(wanted.messages, sampling, **wanted.options))
                else:
                    streams.append(self._client.astream(wanted.prompts[prompt], sampling, **wanted.options))
        except InvalidRequestError as error:
            raise ApiError.of(error, wanted.source) from None

    async def _send_events(
        self,
        streams: Sequence[AsyncTokenStream],
        deltas: AsyncIterator[tuple[int, OutputDelta]],
        held: HeldByOne,
        send: Send,
    ) -> None:
        wanted, form = self._wanted, self._form
        has_begun = [False] * len(streams)
        async for index, delta in deltas:
            self._take(index, streams[index], delta)
            data, echoed = b"", self._echoed[index // wanted.n] if self._echoed else ""
            if not has_begun[index]:
                has_begun[index] = True
                data = form.begin(index, echoed)
            has_tokens = form.has_tokens and delta.token_ids
            if delta.text or delta.finish_reason is not None or delta.logprobs or delta.prompt_logprobs or has_tokens:
                logprobs = form.logprobs(index, echoed, delta)
                data += form.part(index, delta.text, delta.finish_reason and delta.finish_reason.value, logprobs)
            await self._send(data, send)
            if form.repeats:
                held.add(delta)
            else:
                streams[index].result.drop_logprobs()  # they were told
            self._check_unread(streams[index], delta)
        results = [stream.result for stream in streams]
        await self._send(await self._rendered(lambda: form.end(results, wanted.n)), send, is_last=True)

    def _take(self, index: int, stream: AsyncTokenStream, delta: OutputDelta) -> None:
        self._clocks[index].take(delta)
        if index not in self._started:
            self._started.add(index)
            self._form.start(index, stream.prompt_token_ids)
        self._form.take(index, delta)

    async def _send(self, data: bytes, send: Send, is_last: bool = False) -> None:
        """The first event comes with the status: until then an error can have one of its own."""
        async with self._sending:
            if not self._is_open:
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                self._is_open = True
            if data or is_last:
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    @asynccontextmanager
    async def _telling(self, send: Send) -> AsyncIterator[None]:
        """Meanwhile, tell that the answer waits for an engine, if it does."""
        telling = asyncio.ensure_future(self._tell_waiting(send))
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell_waiting(self, send: Send) -> None:
        while True:
            await asyncio.sleep(WAIT_S)
            if any(stream.waits for stream in self._streams):
                await self._send(b": waiting for an engine\n\n", send)

    def _check_unread(self, stream: AsyncTokenStream, delta: OutputDelta) -> None:
        most = self._max_unread if stream.result.token_ids else PROMPT_UNREAD
        if stream.unread > most and delta.finish_reason is None:
            raise OverloadedError(f"{stream.unread} pieces of the answer wait to be read: read faster, or ask for less")

    async def _tell(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_open:
            await self._send(self._form.failed(error.body["error"]), send, is_last=True)
        else:
            await error.response(scope["path"])(scope, receive, send)


async def merged(streams: Sequence[AsyncTokenStream]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """The deltas of several streams as they come, with the stream's place; the first error ends it."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, delta = waiting.pop(task), task.result()
                if delta.finish_reason is None:
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
                yield index, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: AsyncTokenStream) -> OutputDelta:
    return await stream.__anext__()


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> None:
    """Do the work, unless the connection ends first: then it is cancelled."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Return when the connection has ended. The body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
