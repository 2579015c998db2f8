"""`TokenRanks` of ranks that are threads, and give each other arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from support.waiting import PATIENCE_S

from headwise.cache_controller.token_share import TokenShare


class RankInThread:
    """One of ``parts`` ranks; ``table`` is where all of them put what they give."""

    def __init__(self, share: TokenShare, table: list[Any], barrier: threading.Barrier) -> None:
        self.share, self._table, self._barrier = share, table, barrier
        self.asked: list[tuple[int, ...]] = []

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        return np.stack(self._given(x))

    def exchange(self, x: np.ndarray) -> np.ndarray:
        return np.stack([given[self.share.part] for given in self._given(x)])

    def _given(self, x: np.ndarray) -> list[np.ndarray]:
        self.asked.append(x.shape)
        self._table[self.share.part] = np.array(x)
        self._barrier.wait(PATIENCE_S)
        found = list(self._table)
        self._barrier.wait(PATIENCE_S)
        assert len({(each.shape, each.dtype) for each in found}) == 1, "ranks must give arrays alike"
        return found


def on_each(parts: int, work: Callable[[RankInThread], Any]) -> Sequence[Any]:
    """What ``work`` returns on each of so many ranks, by part; raises what one raised."""
    table, barrier = [None] * parts, threading.Barrier(parts)

    def run(part: int) -> Any:
        try:
            return work(RankInThread(TokenShare(part, parts), table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(parts) as threads:
        return list(threads.map(run, range(parts)))
