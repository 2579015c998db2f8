"""A priority queue from which items can be removed at any time."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")

Order = tuple[float, ...]
"""Lower is served first; no two are equal."""


class PriorityQueue(Generic[T]):
    """The item with the lowest order comes first. An item that is discarded is freed at once."""

    def __init__(self) -> None:
        self._heap: list[Order] = []
        self._waiting: dict[Order, T] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> T | None:
        """The first item; None if the queue is empty."""
        while self._heap and self._heap[0] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0]] if self._heap else None

    def items(self) -> list[T]:
        """All items, in no order."""
        return list(self._waiting.values())

    def push(self, order: Order, item: T) -> None:
        """Add an item. One that is added again with its old order gets its old place."""
        self._waiting[order] = item
        heapq.heappush(self._heap, order)

    def pop(self) -> T:
        """Remove and return the first item; raises `IndexError` if the queue is empty."""
        while True:
            order = heapq.heappop(self._heap)
            if order in self._waiting:
                return self._waiting.pop(order)

    def discard(self, order: Order) -> bool:
        """Remove an item; whether there was one."""
        is_there = self._waiting.pop(order, None) is not None
        if is_there and len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = sorted(self._waiting)  # a sorted list is a heap
        return is_there
