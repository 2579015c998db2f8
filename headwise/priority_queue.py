"""Calls that wait for an engine: by priority, then in the order in which they came."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")

Order = tuple[int, ...]
"""Lower is served first; no two are equal."""


class PriorityQueue(Generic[T]):
    """What is taken out before its turn is forgotten at once, so nothing piles up behind those that wait."""

    def __init__(self) -> None:
        self._heap: list[Order] = []
        self._waiting: dict[Order, T] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> T | None:
        """The item whose turn it is; None if none waits."""
        while self._heap and self._heap[0] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0]] if self._heap else None

    def items(self) -> list[T]:
        """All that wait, in no order."""
        return list(self._waiting.values())

    def push(self, order: Order, item: T) -> None:
        """Queue an item; one that comes back with its old order has its old place."""
        self._waiting[order] = item
        heapq.heappush(self._heap, order)

    def pop(self) -> T:
        """The item whose turn it is; raises `IndexError` if none waits."""
        while True:
            order = heapq.heappop(self._heap)
            if order in self._waiting:
                return self._waiting.pop(order)

    def discard(self, order: Order) -> None:
        """Take an item out before its turn; unknown ones are ignored."""
        if self._waiting.pop(order, None) is not None and len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = sorted(self._waiting)  # a sorted list is a heap
