"""What all layers of a step ask for again, made once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

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
