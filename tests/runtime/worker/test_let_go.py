"""What is let go of is gone, and the garbage collector is asked only where that takes it."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from headwise.runtime.worker.let_go import LetGo


class Held:
    """May hold another one."""

    def __init__(self) -> None:
        self.other: object = None


class Silent:
    """Does not tell whether it is still there."""

    __slots__ = ("other",)


def counted() -> tuple[LetGo, list[int]]:
    asked: list[int] = []
    return LetGo(lambda: asked.append(gc.collect())), asked


def test_what_nobody_holds_is_gone_at_once() -> None:
    gone, asked = counted()
    held, array = Held(), np.zeros(3)
    gone.note(held, None, array)
    del held, array
    gone.see_them_gone()
    assert not asked


def test_those_that_hold_each_other_are_gone_then() -> None:
    gone, asked = counted()
    first, second = Held(), Held()
    first.other, second.other = second, first
    is_there = weakref.ref(second)
    gone.note(first)
    del first, second
    gone.see_them_gone()
    assert len(asked) == 1
    assert is_there() is None
    gone.see_them_gone()
    assert len(asked) == 1, "of those it was told before"


def test_of_what_does_not_tell_it_is_not_taken_for_granted() -> None:
    gone, asked = counted()
    gone.note(Silent())
    gone.see_them_gone()
    assert len(asked) == 1
