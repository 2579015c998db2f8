"""Has a file's requests answered: so many at a time, in an order in which they share what is cached."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.errors import ConfigError, DeploymentError
from headwise.runtime.batch.answers import AnswerFile
from headwise.runtime.batch.lanes import Lanes
from headwise.runtime.batch.requests import RequestFile, RequestIndex
from headwise.runtime.batch.server import Answer, LaterError, Server
from headwise.runtime.loader.progress import Progress
from headwise.sharing_order import sharing_order

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often it is asked how many engines there are."""
TELL_S = 30.0
"""How often it is logged how far it is."""
MOST_LOSSES = 3
"""How often a request may lose all engines that it was given to, before that is its answer."""


@dataclass(frozen=True)
class BatchOptions:
    """concurrency: requests at a time for each engine
    priority:    of requests that say none: lower is sooner
    patience_s:  how long a server may answer nothing at all while it is asked
    shares:      send requests that share prefixes one after the other; else in the order of the file
    """

    concurrency: int = 64
    priority: int = 1
    patience_s: float = 600.0
    shares: bool = True

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")


@dataclass
class Summary:
    """What came of requests. refused: those with another status than 200; tokens are of the others"""

    answered: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = field(default=0.0, compare=False)

    def add(self, answer: Answer) -> None:
        if answer.status != 200:
            self.refused += 1
            return
        self.answered += 1
        prompt, cached, completion = tokens_of(answer.body)
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.completion_tokens += completion

    def __str__(self) -> str:
        cached = 100 * self.cached_tokens / max(1, self.prompt_tokens)
        return (
            f"{self.answered:,} answered, {self.refused:,} refused, in {self.seconds:,.1f} s: "
            f"{self.prompt_tokens:,} prompt tokens, {cached:.1f} % of them cached, "
            f"and {self.completion_tokens:,} tokens of answers"
        )


def tokens_of(body: Any) -> tuple[int, int, int]:
    """Tokens of a prompt, those of them that were cached, and those of the answer, as any of the APIs says them."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0, 0, 0
    if "cache_read_input_tokens" in usage:  # Anthropic's, beside which only what was not cached is counted
        cached = usage["cache_read_input_tokens"] or 0
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    of = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
    details = usage.get(f"{of[0]}_tokens_details") or {}
    return usage.get(f"{of[0]}_tokens", 0), details.get("cached_tokens", 0), usage.get(f"{of[1]}_tokens", 0)


class BatchRun:
    """One run: as many loops as there may be requests at a time, so many for each engine's lane."""

    def __init__(
        self,
        requests: RequestFile,
        index: RequestIndex,
        answers: AnswerFile,
        server: Server,
        options: BatchOptions,
        progress: Progress,
    ) -> None:
        self._requests, self._index, self._answers = requests, index, answers
        self._server, self._options, self._progress = server, options, progress
        self._count = len(index.offsets)
        self._summary = Summary()
        self._began = self._told_at = self._heard_at = time.monotonic()
        self._allowed = 0  # loops; those beyond end with the request that they are at
        self._loops: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> Summary:
        """Have all requests of the index answered.

        Raises:
            ConfigError: a file cannot be read or written any more.
            DeploymentError: the server has answered nothing for ``patience_s``.
        """
        lanes: Lanes | None = None
        try:
            while lanes is None or self._loops:
                engines = await self._server.engines()
                lanes = self._dealt(engines) if lanes is None else lanes
                self._start_loops(lanes, engines)
                await self._wait()
        finally:
            for loop in self._loops.values():
                loop.cancel()
            await asyncio.gather(*self._loops.values(), return_exceptions=True)
        return self._told()

    def _dealt(self, engines: int) -> Lanes:
        if self._options.shares:
            return Lanes(*sharing_order(self._index.pieces), engines)
        return Lanes(np.arange(self._count), np.zeros(self._count, np.int64))

    def _start_loops(self, lanes: Lanes, engines: int) -> None:
        """As many as there are to be; those that were through are started anew, where there is something left."""
        self._allowed = min(engines * self._options.concurrency, self._count)
        for number in range(self._allowed if lanes.num_left else 0):
            if number not in self._loops:
                self._loops[number] = asyncio.create_task(self._loop(number, lanes))

    async def _wait(self) -> None:
        """Until all loops have ended, or it is time to look for engines. Raises what one has failed by."""
        if not self._loops:
            return
        await asyncio.wait(self._loops.values(), timeout=LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
        for number in [number for number, loop in self._loops.items() if loop.done()]:
            self._loops.pop(number).result()
        if time.monotonic() - self._told_at >= TELL_S:
            log.info("of %d requests: %s", self._count, self._told())

    def _told(self) -> Summary:
        self._told_at = time.monotonic()
        self._summary.seconds = self._told_at - self._began
        return self._summary

    async def _loop(self, number: int, lanes: Lanes) -> None:
        lane = number // self._options.concurrency if self._options.shares else 0
        while number < self._allowed and (place := lanes.take(lane)) is not None:
            request = self._requests.read(self._index.offsets[place])
            answer = await self._answer(request.url, {"priority": self._options.priority, **request.body})
            self._summary.add(answer)
            self._answers.add(request.custom_id, answer.status, answer.body)
            self._progress.update(self._summary.answered + self._summary.refused, self._count)

    async def _answer(self, url: str, body: Mapping[str, Any]) -> Answer:
        """Ask until there is an answer. Raises `DeploymentError` once that is hopeless."""
        losses, refused_since = 0, math.inf
        while True:
            try:
                answer = await self._server.ask(url, body)
                self._heard_at = time.monotonic()
                return answer
            except LaterError as later:
                losses += later.lost is not None
                if later.lost is not None and losses == MOST_LOSSES:
                    return later.lost
                now = time.monotonic()
                is_there = later.is_overloaded or later.lost is not None
                refused_since = math.inf if is_there else min(refused_since, now)
                if now - max(refused_since, self._heard_at) >= self._options.patience_s:
                    raise DeploymentError(
                        f"nothing was answered for {self._options.patience_s:.0f} s: {later}; --resume goes on later"
                    ) from None
                await asyncio.sleep(later.after_s * random.uniform(1.0, 1.5))
