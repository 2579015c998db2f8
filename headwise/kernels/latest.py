"""What all layers of a step, or all steps, ask for again: made once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Source = TypeVar("_Source")
_Made = TypeVar("_Made")


class OfLatest(Generic[_Source, _Made]):
    """``make(source)``, kept until another source is asked for. Sources are not kept: they are the caller's to let go
    of."""

    def __init__(self, make: Callable[[_Source], _Made]) -> None:
        self._make = make
        self._latest: Callable[[], _Source | None] = lambda: None
        self._made: _Made

    def __call__(self, source: _Source) -> _Made:
        if self._latest() is not source:
            self._made, self._latest = self._make(source), weakref.ref(source)
        return self._made


MOST_TABLES = 256
"""Of heads, of which things are kept: a model has one for each layer."""


class OfEach(Generic[_Made]):
    """``make(*sources)``, kept together with its sources, which are known by what they are and not by what they say.

    most: that are kept; one more lets go of them all
    """

    def __init__(self, make: Callable[..., _Made], most: int) -> None:
        self._make, self._most = make, most
        self._kept: dict[tuple[int, ...], tuple[_Made, tuple[Any, ...]]] = {}

    def __call__(self, *sources: Any) -> _Made:
        key = tuple(map(id, sources))
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) == self._most:
                self._kept.clear()
            kept = self._kept[key] = self._make(*sources), sources
        return kept[0]
