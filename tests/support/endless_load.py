"""Requests that are made again and again while something happens to a deployment, each with known tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from support.reference import Answer
from support.waiting import PATIENCE_S, eventually

from headwise import Client, SamplingParams

REST_S = 1.0
"""Of a reader between two answers: what happens to the deployment needs the cores, too."""


class EndlessLoad:
    """One reader for each of the answers, which streams it again and again until `end`."""

    def __init__(self, client: Client, answers: Sequence[Answer], tokens: int) -> None:
        self._client = client
        self._sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._is_over = threading.Event()
        self._counts = [0] * len(answers)
        self._pool = ThreadPoolExecutor(len(answers))
        self._readers = [self._pool.submit(self._read, *each) for each in enumerate(answers)]

    def _read(self, index: int, answer: Answer) -> None:
        while not self._is_over.is_set():
            result = self._client.stream(answer.prompt_ids, self._sampling).read()
            assert result.token_ids == answer.output_ids, answer.name
            self._counts[index] += 1
            self._is_over.wait(REST_S)

    def check(self) -> None:
        """Raise what a stream has raised."""
        for reader in self._readers:
            if reader.done():
                reader.result()

    def goes_on(self, within_s: float = PATIENCE_S) -> float:
        """Wait until every reader has had a whole answer that was not begun before this call; how many seconds."""
        before, began = list(self._counts), time.monotonic()

        def all_went_on() -> bool:
            self.check()
            return all(now >= then + 2 for now, then in zip(self._counts, before, strict=True))

        eventually(all_went_on, within_s, otherwise=lambda: (before, self._counts))
        return time.monotonic() - began

    def end(self) -> int:
        """Wait for the streams; how many there were. Raises what one of them did."""
        self._is_over.set()
        for reader in self._readers:
            reader.result(PATIENCE_S)
        self._pool.shutdown()
        return sum(self._counts)
