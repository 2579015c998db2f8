"""Many prompts at a time: their order, and how many are under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from headwise.runtime.client.token_stream import AsyncTokenStream, TokenStream
from headwise.runtime.protocol.messages import Route
from headwise.runtime.protocol.request import GenerationResult
from headwise.sharing_order import pieces_of, sharing_order

MOST_OPEN = 512
"""Of one call: so a long list neither fills the deployment's queues, nor keeps others' requests behind all of it."""


def _order(routes: Sequence[Route]) -> list[int]:
    """Places of requests in an order in which neighbours share prefixes."""
    order, _ = sharing_order([pieces_of(_beginning(route)) for route in routes])
    return [int(place) for place in order]


def _beginning(route: Route) -> bytes:
    ids = route.token_ids
    return (route.text or "").encode("utf-8", "surrogatepass") if ids is None else ids.tobytes()


def read_all(routes: Sequence[Route], start: Callable[[int], TokenStream]) -> list[GenerationResult]:
    """The results of all requests, in their own order; the first error ends the others. start: one of them"""
    results: dict[int, GenerationResult] = {}
    opened: deque[tuple[int, TokenStream]] = deque()

    def take() -> None:
        place, stream = opened[0]
        results[place] = stream.read()
        opened.popleft()

    try:
        for place in _order(routes):
            if len(opened) == MOST_OPEN:
                take()
            opened.append((place, start(place)))
        while opened:
            take()
    finally:
        for _, stream in opened:
            stream.cancel()
    return [results[place] for place in range(len(routes))]


async def aread_all(routes: Sequence[Route], start: Callable[[int], AsyncTokenStream]) -> list[GenerationResult]:
    """`read_all` in an event loop."""
    room = asyncio.Semaphore(MOST_OPEN)

    async def read(place: int) -> tuple[int, GenerationResult]:
        async with room:
            stream = start(place)
            try:
                return place, await stream.read()
            finally:
                stream.cancel()

    reading = [asyncio.ensure_future(read(place)) for place in _order(routes)]
    try:
        results = dict(await asyncio.gather(*reading))
    finally:
        for each in reading:
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return [results[place] for place in range(len(routes))]
