from __future__ import annotations

import pytest

from headwise.priority_queue import PriorityQueue


def test_the_first_is_seen_before_it_is_taken_and_what_left_is_never_seen() -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    assert queue.first is None
    for order, item in (((1, 3), "late"), ((0, 2), "urgent"), ((1, 1), "early")):
        queue.push(order, item)
    assert queue.first == "urgent"
    queue.discard((0, 2))
    assert queue.first == "early"
    assert sorted(queue.items()) == ["early", "late"]
    queue.push((0, 2), "urgent again")
    assert [queue.pop() for _ in range(len(queue))] == ["urgent again", "early", "late"]
    assert queue.first is None
    with pytest.raises(IndexError):
        queue.pop()


def test_what_leaves_out_of_turn_does_not_pile_up() -> None:
    queue: PriorityQueue[int] = PriorityQueue()
    for index in range(1_000):
        queue.push((0, index), index)
    for index in range(999, 0, -1):
        queue.discard((0, index))
    assert len(queue._heap) < 50
    assert queue.first == 0
